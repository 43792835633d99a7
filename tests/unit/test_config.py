"""Settings: where they come from, who wins, and what is said about a wrong one."""

from pathlib import Path

import pytest

from common.config import (
    SERVICES,
    DecodeSettings,
    GatewaySettings,
    PrefillSettings,
    RouterSettings,
    ServiceSettings,
    load,
    parse_cores,
    resolve,
)
from common.config_sources import keys_of
from common.errors import ConfigError


@pytest.fixture(autouse=True)
def _no_galley_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    import os

    for name in list(os.environ):
        if name.startswith("GALLEY_"):
            monkeypatch.delenv(name)


def write(path: Path, text: str) -> list[str]:
    file = path / "galley.toml"
    file.write_text(text)
    return ["--config", str(file)]


def test_the_defaults_are_those_of_the_agreement() -> None:
    decode = resolve(DecodeSettings, [])
    agreed = {
        "dtype": "auto",
        "block_size": 16,
        "num_blocks": None,
        "memory_fraction": 0.8,
        "max_model_len": None,
        "max_num_seqs": 64,
        "max_num_batched_tokens": 2048,
        "chunk_tokens": 256,
        "kv_timeout_s": 10,
        "beat_ms": 200,
        "drain_seconds": 30,
        "cache_dir": Path("~/.cache/galley"),
    }
    assert {key: getattr(decode, key) for key in agreed} == agreed
    gateway = resolve(GatewaySettings, [])
    assert (gateway.port, gateway.request_timeout_s, gateway.first_token_timeout_s) == (8000, 600, 60)
    assert (resolve(RouterSettings, []).port, decode.port) == (8001, 0)
    assert gateway.host == "127.0.0.1"


def test_command_line_wins_over_environment_over_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GALLEY_NUM_BLOCKS", "20")
    monkeypatch.setenv("GALLEY_CHUNK_TOKENS", "21")
    monkeypatch.setenv("GALLEY_UCX__RNDV_THRESH", "inf")
    file = write(tmp_path, 'num_blocks = 10\nchunk_tokens = 11\nmax_num_seqs = 12\n[ucx]\ntls = "sm"\n')
    settings = resolve(DecodeSettings, [*file, "--num-blocks=30"])
    assert (settings.num_blocks, settings.chunk_tokens, settings.max_num_seqs) == (30, 21, 12)
    assert (settings.ucx.tls, settings.ucx.rndv_thresh) == ("sm", "inf")


def test_a_role_table_is_for_that_role_and_wins_over_the_top_level(tmp_path: Path) -> None:
    file = write(tmp_path, "num_blocks = 10\n[decode]\nnum_blocks = 20\n[decode.ucx]\ntls = 'tcp'\n")
    assert resolve(PrefillSettings, file).num_blocks == 10
    decode = resolve(DecodeSettings, file)
    assert (decode.num_blocks, decode.ucx.tls) == (20, "tcp")


def test_one_file_and_environment_serve_all_services(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GALLEY_FIRST_TOKEN_TIMEOUT_S", "7")
    monkeypatch.setenv("GALLEY_NUM_BLOCKS", "")
    file = write(tmp_path, 'topology = "chunked"\nnum_blocks = 10\n[ucx]\ntls = "sm"\n')
    for cls in SERVICES.values():
        resolve(cls, file)
    assert resolve(RouterSettings, file).topology == "chunked"
    assert resolve(GatewaySettings, file).first_token_timeout_s == 7


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--num-bloks", "3"], "unknown key --num-bloks; did you mean --num-blocks"),
        (["--topology", "chunked"], "unknown key --topology"),
        (["--ucx.tsl=sm"], "did you mean --ucx.tls"),
        (["decode"], "'decode' is not understood"),
        (["--num-blocks", "0"], "--num-blocks = '0': must be greater than or equal to 1"),
        (["--num-blocks", "many"], "--num-blocks = 'many': must be a valid integer"),
        (["--dtype", "float8"], "--dtype = 'float8': must be 'auto', 'float32', 'bfloat16' or 'float16'"),
        (["--memory-fraction", "1.5"], "--memory-fraction = '1.5': must be less than or equal to 1"),
        (["--instance", "a.b"], "--instance = 'a.b'"),
        (["--cores", "4-2"], "'4-2' is not a core or a range of cores"),
        (["--kv-timeout-s", "inf"], "--kv-timeout-s = 'inf'"),
        (["--config", "/no/such/file"], "cannot read /no/such/file"),
    ],
)
def test_a_wrong_command_line_is_named(argv: list[str], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve(DecodeSettings, argv)
    assert said in caught.value.message


def test_an_unknown_variable_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GALLEY_UCX__TSL", "sm")
    with pytest.raises(
        ConfigError, match="unknown key GALLEY_UCX__TSL in the environment; did you mean GALLEY_UCX__TLS"
    ):
        resolve(RouterSettings, [])


def test_an_impossible_variable_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GALLEY_BEAT_MS", "0")
    with pytest.raises(ConfigError, match="GALLEY_BEAT_MS = '0': must be greater than or equal to 20"):
        resolve(RouterSettings, [])


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("num_bloks = 3", "unknown key num_bloks in .*galley.toml; did you mean num_blocks"),
        ("[decode]\ntopology = 'chunked'", "unknown key topology"),
        ("[prefill]\nnonsense = 1", "unknown key nonsense"),
        ("block_size = 0", "galley.toml: block_size = 0: must be greater than or equal to 1"),
        ("num_blocks = ", "cannot read .*galley.toml"),
    ],
)
def test_a_wrong_file_is_named(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        resolve(DecodeSettings, write(tmp_path, text))


def test_load_exits_with_2_and_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        load(RouterSettings, ["--topology", "ring"])
    assert caught.value.code == 2
    told = capsys.readouterr().err
    assert told.count("\n") == 1
    assert told.startswith("router: --topology = 'ring': must be 'disaggregated', 'pooled', ")


@pytest.mark.parametrize("cls", SERVICES.values())
def test_help_lists_every_key_with_its_explanation(
    cls: type[ServiceSettings], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        load(cls, ["--help"])
    assert caught.value.code == 0
    text = " ".join(capsys.readouterr().out.split())
    for key, field in keys_of(cls).items():
        assert field.description, key
        assert key.replace("_", "-") in text or f"{key}:" in text
        assert field.description.replace("- ", "-") in text


def test_the_secret_comes_from_the_environment_and_is_not_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GALLEY_SECRET", "hunter2")
    settings = resolve(DecodeSettings, ["--host", "0.0.0.0"])
    assert settings.secret.get_secret_value() == "hunter2"
    assert "hunter2" not in repr(settings)
    with pytest.raises(ConfigError, match="unknown key --secret"):
        resolve(DecodeSettings, ["--secret", "hunter3"])


def test_settings_built_in_a_test_do_not_see_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GALLEY_PORT", "1")
    assert GatewaySettings().port == 8000


def test_instances_without_a_name_get_different_ones() -> None:
    first, second = DecodeSettings(), DecodeSettings()
    assert first.instance.startswith("decode-")
    assert first.instance != second.instance


@pytest.mark.parametrize(
    ("model", "served", "name"),
    [
        ("default", "", "SmolLM2-135M-Instruct"),
        ("/models/tiny-llama/", "", "tiny-llama"),
        ("org/tiny", "", "tiny"),
        ("org/tiny", "chat", "chat"),
    ],
)
def test_the_served_name_is_the_last_part_of_the_model(model: str, served: str, name: str) -> None:
    assert GatewaySettings(model=model, served_model_name=served).model_name == name


@pytest.mark.parametrize(
    ("spec", "cores"),
    [("", ()), ("3", (3,)), ("0,2-4", (0, 2, 3, 4)), (" 1 , 0 ", (0, 1)), ("2-2,2", (2,))],
)
def test_cores_are_written_as_taskset_writes_them(spec: str, cores: tuple[int, ...]) -> None:
    assert parse_cores(spec) == cores


@pytest.mark.parametrize("spec", ["a", "1-", "-1", "3-1", "1,,b", "0x1"])
def test_other_cores_are_refused(spec: str) -> None:
    with pytest.raises(ValueError, match="write them like 0,2-3"):
        parse_cores(spec)
