"""How deep JSON may be nested, and certificates that are none."""

from pathlib import Path

import orjson
import pytest

from common.errors import ConfigError, InvalidRequest
from services.gateway.http.edge import MAX_JSON_DEPTH, check_depth, tls_context


def nested(depth: int) -> bytes:
    return (
        b'{"a":' * (depth // 2)
        + b"[" * (depth - depth // 2)
        + b"1"
        + b"]" * (depth - depth // 2)
        + b"}" * (depth // 2)
    )


def test_the_limit_is_the_limit() -> None:
    assert orjson.loads(nested(MAX_JSON_DEPTH)) is not None
    check_depth(nested(MAX_JSON_DEPTH))
    with pytest.raises(InvalidRequest, match="nested"):
        check_depth(nested(MAX_JSON_DEPTH + 1))


def test_width_and_brackets_in_text_are_no_depth() -> None:
    check_depth(orjson.dumps([[token] for token in range(10_000)]))
    check_depth(orjson.dumps({"prompt": '[{"\\' * 1000, "[" * 500: ["]" * 10]}))


def test_what_is_no_json_is_left_to_the_parser() -> None:
    check_depth(b"]" * 1000 + b"[" * MAX_JSON_DEPTH)


def test_a_quote_that_is_never_closed_is_looked_for_once() -> None:
    check_depth(b"[]" * MAX_JSON_DEPTH + b'"' + rb"\"a" * 500_000)


def test_certificates_that_are_none(tmp_path: Path) -> None:
    assert tls_context(None, None) is None
    (tmp_path / "cert.pem").write_text("hello")
    with pytest.raises(ConfigError, match="tls_cert"):
        tls_context(tmp_path / "cert.pem", None)
    with pytest.raises(ConfigError, match="tls_cert"):
        tls_context(tmp_path / "nowhere.pem", None)
    with pytest.raises(ConfigError, match="no tls_cert"):
        tls_context(None, tmp_path / "key.pem")
