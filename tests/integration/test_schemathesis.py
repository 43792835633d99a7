"""/openapi.json holds what it promises: schemathesis finds nothing, and openai's types read every answer."""

import asyncio
import json
import os
import re
import sys
from functools import partial
from pathlib import Path

import httpx
import pytest

from tests.support.real_cluster import real_cluster
from tests.support.tiny_models import END_ID, VOCAB, make_tiny_model

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

ROOT = Path(__file__).resolve().parents[2]
HOOKS = "tests.support.schemathesis_checks"
BOUND_S = 120
OPTIONS = (
    "--max-examples",
    "50",
    "--seed",
    "3",
    "--checks",
    "all",
    "--no-color",
    "--continue-on-failure",
    "--generation-database",
    "none",
)


def model_that_soon_ends(directory: Path) -> Path:
    """Half of its tokens end a text, so that thousands of answers take seconds."""
    make_tiny_model("llama", directory, num_hidden_layers=1)
    file = directory / "generation_config.json"
    config = json.loads(file.read_text()) | {"eos_token_id": [END_ID, *range(VOCAB // 2, VOCAB)]}
    file.write_text(json.dumps(config))
    return directory


async def test_schemathesis_finds_nothing(tmp_path: Path) -> None:
    model = model_that_soon_ends(tmp_path / "model")
    small = partial(real_cluster, max_model_len="256", num_blocks="4096", max_num_seqs="256")
    # Budgets drawn at random are mostly too small to be kept: nearly all requests would end as 429.
    small = partial(small, slo_admission="false")
    async with small(model, tmp_path / "run", topology="colocated") as cluster:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "schemathesis.cli", "run", f"{cluster.url}/openapi.json", *OPTIONS),
            cwd=ROOT,
            env=dict(os.environ) | {"SCHEMATHESIS_HOOKS": HOOKS, "PYTHONPATH": str(ROOT)},
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        try:
            async with asyncio.timeout(BOUND_S):
                told, _ = await process.communicate()
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
        served = await cluster.metrics("gateway")
        async with httpx.AsyncClient(trust_env=False) as http:
            paths = (await http.get(f"{cluster.url}/openapi.json")).json()["paths"]
        await cluster.idle()
    report = told.decode()
    operations = sum(len(methods) for methods in paths.values())
    assert process.returncode == 0, report
    found = re.search(r"(\d+) generated, (\d+) passed", report)
    assert found is not None, report
    assert int(found[1]) == int(found[2]) > 2000, report
    assert operations >= 10
    assert f"Tested: {operations}\n" in report
    assert served.total("galley_requests_total", status="ok") > 200, report
    assert served.total("galley_requests_total", status="error") == 0
