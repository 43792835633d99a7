"""The official Node client, installed as anybody would install it, against a real cluster."""

import asyncio
import json
import shutil
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from tests.support.real_cluster import MODEL, real_cluster
from tests.support.structured import SCHEMAS, SCHEMAS_FILE
from tests.support.tiny_models import make_tiny_model

pytestmark = [pytest.mark.system, pytest.mark.timeout(300)]

PACKAGE = "openai@7.59.0"
SCRIPT = Path(__file__).resolve().parents[1] / "support" / "openai_client.mjs"
INSTALL_S, RUN_S = 200, 60


async def run(directory: Path, limit_s: float, *command: str) -> str:
    """What a command prints. Raises AssertionError when it fails."""
    process = await asyncio.create_subprocess_exec(
        *command, cwd=directory, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    try:
        async with asyncio.timeout(limit_s):
            out, errors = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert process.returncode == 0, out.decode() + errors.decode()
    return out.decode()


@pytest.fixture
async def client(tmp_path: Path) -> Path:
    """A directory with the script and the package that it needs."""
    directory = tmp_path / "node"
    directory.mkdir()
    shutil.copy(SCRIPT, directory)
    (directory / "package.json").write_text('{"private": true}')
    await run(directory, INSTALL_S, "npm", "install", "--no-audit", "--no-fund", "--ignore-scripts", PACKAGE)
    return directory


async def test_chat_responses_and_structured_output(client: Path, tmp_path: Path) -> None:
    model = make_tiny_model("llama", tmp_path / "model")
    async with real_cluster(model, tmp_path / "run") as cluster:
        arguments = (f"{cluster.url}/v1", MODEL, str(SCHEMAS_FILE))
        printed = await run(client, RUN_S, "node", SCRIPT.name, *arguments)
    got: dict[str, Any] = json.loads(printed)
    assert len(got["whole"]) > 0
    for way in ("streamed", "helped", "helpedWhole", "response", "responseHelped", "told", "final"):
        assert got[way] == got["whole"], way
    assert got["finish"] == ["length"]
    assert got["status"] == "incomplete"
    assert got["usage"]["completion_tokens"] == got["wholeUsage"]["completion_tokens"] == 12
    assert got["types"] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        "response.output_text.delta",
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.incomplete",
    ]
    assert [answer["name"] for answer in got["structured"]] == list(SCHEMAS)
    for answer in got["structured"]:
        jsonschema.validate(json.loads(answer["content"]), SCHEMAS[answer["name"]])
        assert answer["finish"] == "stop"
    assert got["models"] == [MODEL, MODEL]
    assert got["refusal"] == {"status": 400, "param": "temperature", "type": "BadRequestError"}
