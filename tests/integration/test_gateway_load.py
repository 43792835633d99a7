"""What the gateway benches stand on: echoing workers, real processes, streams, some of them never read."""

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from rich.console import Console

from bench.fake.cluster import EchoCluster, echo_cluster
from bench.frame import Frame
from bench.gateway_trial import PROMPT, check, delays, saturate
from bench.scrape import scrape
from bench.stream_load import completion_request, connect, finish
from tests.support.tiny_models import make_tokenizer

SLOW = 5


@pytest.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[EchoCluster]:
    """Two workers that make 100 steps a second, behind a gateway that holds little that is unread."""
    make_tokenizer().save_pretrained(tmp_path)
    config = {"model_type": "llama", "max_position_embeddings": 8192, "eos_token_id": 2, "vocab_size": 320}
    (tmp_path / "config.json").write_text(json.dumps(config))
    settings = {"model": str(tmp_path), "served_model_name": "tiny", "max_unread_bytes": "13000"}
    async with echo_cluster(
        Frame(Console(quiet=True)), workers=2, max_num_seqs=64, step_ms=10.0, settings=settings
    ) as made:
        yield made


async def test_streams_are_whole_and_slow_readers_end_alone(cluster: EchoCluster) -> None:
    trial = await saturate(cluster, "tiny", streams=8, rate=400.0, seconds=1.0)
    assert trial.problems == ()
    added = await delays(cluster, "tiny", streams=4, rate=200.0, seconds=0.5)
    assert added.problems == ()
    assert 0 < added.itl_ms < 1000
    assert 0 < added.ttft_ms < 1000

    await cluster.set_pace(0.002)
    sockets = [await ask_without_reading(cluster.url) for _ in range(SLOW)]
    normal = await connect(cluster.url, 4)
    for stream in normal:
        stream.send(completion_request(cluster.url, "tiny", PROMPT, 1500))
    assert check(await finish(normal, 60), 1500) == ()
    async with asyncio.timeout(20):
        while await aborted(cluster.url) < SLOW:  # noqa: ASYNC110 (metrics tell nobody when they change)
            await asyncio.sleep(0.1)
    for sock in sockets:
        sock.close()


async def ask_without_reading(url: str) -> socket.socket:
    loop, parts = asyncio.get_running_loop(), urlsplit(url)
    sock = socket.socket()
    sock.setblocking(False)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    await loop.sock_connect(sock, (parts.hostname, parts.port))
    await loop.sock_sendall(sock, completion_request(url, "tiny", PROMPT, 4000))
    return sock


async def aborted(url: str) -> float:
    snapshot = await scrape((url,))
    assert snapshot is not None
    return snapshot.total("galley_requests_aborted_total", reason="slow_reader")
