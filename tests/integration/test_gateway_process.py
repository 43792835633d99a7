"""The gateway as a process, with a real nats-server and a real router, in front of workers that only beat."""

import json
from pathlib import Path

import aiohttp
import pytest

from tests.integration.test_router_process import beating
from tests.support.fleet import worker_beat
from tests.support.nats import NatsServer, running_nats
from tests.support.service_process import running_service
from tests.support.tiny_models import make_tokenizer

GATEWAY, ROUTER = "services.gateway", "services.router"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a gateway reads of a model: configuration and tokenizer, no weights."""
    directory: Path = tmp_path_factory.mktemp("tiny")
    make_tokenizer().save_pretrained(directory)
    config = {"model_type": "llama", "max_position_embeddings": 128, "eos_token_id": 2, "vocab_size": 320}
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def arguments(nats: NatsServer, model: Path) -> list[str]:
    names = ["--cluster", "test", "--instance", "g1", "--served-model-name", "tiny"]
    return ["--nats-url", nats.url, "--port", "0", "--model", str(model), *names]


async def test_it_is_ready_when_a_pair_and_a_router_are(model: Path) -> None:
    async with running_nats() as nats, running_service(GATEWAY, *arguments(nats, model)) as gateway:
        status, body = await gateway.get("/v1/models")
        assert isinstance(body, dict)
        assert (status, body["data"][0]["id"], body["data"][0]["max_model_len"]) == (200, "tiny", 128)
        await gateway.until("/readyz", 503)
        router_arguments = ["--nats-url", nats.url, "--port", "0", "--cluster", "test"]
        async with running_service(ROUTER, *router_arguments):
            async with beating(nats, worker_beat("p1", "prefill"), worker_beat("d1")):
                await gateway.until("/readyz", 200)
                ask = {"model": "tiny", "prompt": "x"}
                url = gateway.url + "/v1/completions"
                async with aiohttp.ClientSession() as http, http.post(url, json=ask) as response:
                    assert response.status == 503  # these workers beat, but take no jobs
                    assert response.headers["Retry-After"]
            await gateway.until("/readyz", 503)
        assert await gateway.terminate() == 0


async def test_it_waits_for_a_nats_that_comes_later(model: Path) -> None:
    nats = NatsServer()
    async with running_service(GATEWAY, *arguments(nats, model)) as gateway:
        _, body = await gateway.get("/readyz")
        assert isinstance(body, dict)
        assert body["reason"] == "the message bus is not connected"
        assert (await gateway.get("/healthz"))[0] == 200
        assert await gateway.terminate() == 0
