"""Ours and a peer under the same client: every cell, one server after the other, in rounds.

Ours is a chunked cluster of its own with all processes on the same cores; the client takes the others.
Where the peer runs is its owner's matter. Knows nothing of what the cells say.
"""

import os
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from bench.client import LoadClient, closed_loop, open_client
from bench.engine.rivals import Duel, RivalCell
from bench.frame import Frame
from bench.records import RequestRecord
from bench.target import Target
from deploy.local.spec import ClusterSpec

ROUNDS = 3


class StreamsFailed(Exception):
    """A server did not do what was asked, so that there is nothing to compare."""


@asynccontextmanager
async def pinned_cluster(frame: Frame, cores: Sequence[int], spec: ClusterSpec) -> AsyncIterator[Target]:
    """A cluster with every process on `cores`, and this process on the others, if there are any."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)  # what is started inherits it
    try:
        async with frame.target(spec) as target:
            os.sched_setaffinity(0, (before - set(cores)) or before)
            yield target
    finally:
        os.sched_setaffinity(0, before)


async def fight(frame: Frame, peer_url: str, cores: Sequence[int], cells: Sequence[RivalCell]) -> list[Duel]:
    """Three rounds of all cells. Raises StreamsFailed, ServerRefused and ClusterFailed."""
    spec = ClusterSpec(
        decode=1, topology="chunked", cores=",".join(map(str, cores)), settings={"dtype": "bfloat16"}
    )
    duels = [Duel(cell) for cell in cells]
    async with (
        pinned_cluster(frame, cores, spec) as target,
        open_client(target.url) as ours,
        open_client(peer_url) as peer,
    ):
        with frame.progress("measurements", (ROUNDS + 1) * 2 * len(cells)) as done:
            for number in range(ROUNDS + 1):
                for duel in duels:
                    # A round of its own warms up; who begins changes, as a busy machine comes and goes.
                    sides = [(ours, duel.ours), (peer, duel.peer)]
                    for client, results in sides if number % 2 else reversed(sides):
                        figure = await _ask(client, duel.cell, seed=number)
                        if number:
                            results.append(figure)
                        done(figure)
    return duels


async def _ask(client: LoadClient, cell: RivalCell, seed: int) -> float:
    records = await closed_loop(client, cell.specs(seed), cell.concurrency)
    _check(client, cell, seed, records)
    try:
        return cell.figure(records)
    except ValueError as error:
        raise StreamsFailed(f"{client.model}: {error}") from error


def _check(client: LoadClient, cell: RivalCell, seed: int, records: Sequence[RequestRecord]) -> None:
    for spec, record in zip(cell.specs(seed), records, strict=True):
        if record.error:
            raise StreamsFailed(f"{client.model}: {record.error}")
        if record.output_tokens != spec.max_tokens or record.prompt_tokens != len(spec.prompt):
            told = f"{record.prompt_tokens} tokens in, {record.output_tokens} out"
            raise StreamsFailed(f"{client.model}: asked for {len(spec.prompt)} and {spec.max_tokens}: {told}")
