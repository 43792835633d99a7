"""Log lines as a person reads them."""

import pytest

from deploy.local.processes import readable


@pytest.mark.parametrize(
    ("line", "text"),
    [
        (
            '{"event":"listening","http_url":"http://h:1","level":"info","time":"t"}',
            "listening http_url=http://h:1",
        ),
        (
            '{"event":"failed","error":"no","exception":"Trace\\nback","role":"x"}',
            "failed error=no\nTrace\nback",
        ),
        ("Segmentation fault", "Segmentation fault"),
        ("[1, 2]", "[1, 2]"),
        ('{"no": "event"}', '{"no": "event"}'),
        ("", ""),
    ],
)
def test_readable(line: str, text: str) -> None:
    assert readable(line) == text
