"""Clients that never read: do they end, what do they cost, and do the others notice?

50 streams are read as fast as they come, first alone, then beside 200 streams on small sockets that nobody
reads. One echoing worker gives each stream 40 tokens a second. Figures: how many of the 200 ended as
`slow_reader`, by how much the gateway grew meanwhile, and the others' ITL p99, alone and beside them.
"""

import argparse
import asyncio
import os
import socket
from itertools import pairwise
from urllib.parse import urlsplit

from bench.client import open_client
from bench.fake.cluster import EchoCluster, echo_cluster
from bench.frame import Bench, Frame
from bench.gateway_trial import PROMPT, check
from bench.report import Outcome
from bench.scrape import change_between, scrape
from bench.stats import percentile
from bench.stream_load import StreamRecord, completion_request, connect, finish

SLOW, NORMAL = 200, 50
SLOW_TOKENS = 4000
RECEIVE_BUFFER = 4096
STEPS_PER_S = 40
MAX_NUM_SEQS = 512
ALONE_S, BESIDE_S = 20.0, 60.0
SETTLE_S = 2.0
"""At a phase's start, where requests arrive: not counted."""
ARRIVAL_S = 0.025
"""Between two slow ones: the others shall meet readers, not a burst of new requests."""
MIN_ABORTED, MAX_GROWTH = 190, 50e6


async def run(frame: Frame, _: argparse.Namespace) -> Outcome:
    if frame.url is not None:
        return Outcome({}, ("the pace is the echoing workers': this bench has a cluster of its own",))
    frame.note(f"load of the machine before: {os.getloadavg()[0]:.2f}")
    async with (
        echo_cluster(frame, workers=1, max_num_seqs=MAX_NUM_SEQS, step_ms=1e3 / STEPS_PER_S) as cluster,
        open_client(cluster.url) as client,
    ):
        alone = await _normal(cluster, client.model, ALONE_S)
        before, size = await scrape((cluster.url,)), Size(cluster)
        async with asyncio.TaskGroup() as tasks:
            watch = tasks.create_task(size.watch())
            slow = tasks.create_task(_never_read(cluster.url, client.model))
            beside = await _normal(cluster, client.model, BESIDE_S)
            watch.cancel()
        change = change_between(before, await scrape((cluster.url,)))
        for sock in slow.result():
            sock.close()
    aborted = change.total("galley_requests_aborted_total", reason="slow_reader") if change else 0.0
    figures = {
        "slow_aborted": aborted,
        "gateway_growth_bytes": float(size.growth),
        "itl_p99_alone_ms": _itl_p99_ms(alone),
        "itl_p99_beside_ms": _itl_p99_ms(beside),
    }
    figures["itl_p99_change"] = figures["itl_p99_beside_ms"] / figures["itl_p99_alone_ms"] - 1
    problems = [*check(alone, round(ALONE_S * STEPS_PER_S)), *check(beside, round(BESIDE_S * STEPS_PER_S))]
    if aborted < MIN_ABORTED:
        problems.append(f"{aborted:.0f} of {SLOW} that never read were aborted")
    if size.growth > MAX_GROWTH:
        problems.append(f"the gateway grew by {size.growth / 1e6:.0f} MB")
    return Outcome(figures, tuple(problems))


class Size:
    """By how much the gateway has grown since, at most. `watch` looks ten times a second."""

    def __init__(self, cluster: EchoCluster) -> None:
        self._cluster = cluster
        self._begun = cluster.gateway_bytes()
        self.growth = 0

    async def watch(self) -> None:
        while True:
            self.growth = max(self.growth, self._cluster.gateway_bytes() - self._begun)
            await asyncio.sleep(0.1)


async def _normal(cluster: EchoCluster, model: str, seconds: float) -> list[StreamRecord]:
    """NORMAL streams of `seconds`, read as they come."""
    connections = await connect(cluster.url, NORMAL)
    request = completion_request(cluster.url, model, PROMPT, round(seconds * STEPS_PER_S))
    for connection in connections:
        connection.send(request)
    return await finish(connections, 2 * seconds + 20)


async def _never_read(url: str, model: str) -> list[socket.socket]:
    """SLOW streams, one after the other, of which not a byte is read."""
    loop, parts = asyncio.get_running_loop(), urlsplit(url)
    request = completion_request(url, model, PROMPT, SLOW_TOKENS)
    await asyncio.sleep(SETTLE_S)
    sockets = []
    for _ in range(SLOW):
        sock = socket.socket()
        sock.setblocking(False)
        sock.setsockopt(
            socket.SOL_SOCKET, socket.SO_RCVBUF, RECEIVE_BUFFER
        )  # before connect: sets the window
        await loop.sock_connect(sock, (parts.hostname, parts.port))
        await loop.sock_sendall(sock, request)
        sockets.append(sock)
        await asyncio.sleep(ARRIVAL_S)
    return sockets


def _itl_p99_ms(records: list[StreamRecord]) -> float:
    gaps = [
        1e3 * (later - earlier)
        for record in records
        for earlier, later in pairwise(record.times)
        if earlier > record.times[0] + SETTLE_S
    ]
    return percentile(gaps or [0.0], 99)


BENCH = Bench("200 clients that never read: are they ended, at what cost, and unnoticed by 50 others", run)
