"""Ours and a peer under the same client: every cell, one server after the other, in rounds.

Ours is a chunked cluster of its own with all processes on the same cores; the client takes the others.
Where the peer runs is its owner's matter. Knows nothing of what the cells say.
"""

import asyncio
import secrets
from collections.abc import Sequence
from itertools import count

from bench.client import LoadClient, closed_loop, open_client
from bench.cores import pinned_target
from bench.engine.rivals import Duel, RivalCell
from bench.frame import Frame
from bench.progress import Advance
from bench.records import RequestRecord
from bench.workloads import RequestSpec
from deploy.local.spec import ClusterSpec

ROUNDS = 3
REST_S = 2.0
"""Before the other server's turn: vLLM's worker spins for a second after its last request."""


class StreamsFailed(Exception):
    """A server did not do what was asked, so that there is nothing to compare."""


async def fight(frame: Frame, peer_url: str, cores: Sequence[int], cells: Sequence[RivalCell]) -> list[Duel]:
    """Three rounds of all cells. Raises StreamsFailed, ServerRefused and ClusterFailed."""
    spec = ClusterSpec(
        decode=1, topology="chunked", cores=",".join(map(str, cores)), settings={"dtype": "bfloat16"}
    )
    duels = [Duel(cell) for cell in cells]
    async with (
        pinned_target(frame, cores, spec) as target,
        open_client(target.url) as ours,
        open_client(peer_url) as peer,
    ):
        for client in (ours, peer):
            for cell in cells:
                await _ask(client, cell, cell.warm_up())
        with frame.progress("measurements", ROUNDS * 2 * len(cells)) as done:
            await _rounds(duels, ours, peer, done)
    return duels


async def _rounds(duels: Sequence[Duel], ours: LoadClient, peer: LoadClient, done: Advance) -> None:
    """All cells, three times; who begins changes, as whatever else the machine does comes and goes."""
    seeds = count(secrets.randbelow(2**31))  # the peer may remember prompts of earlier runs
    busy: LoadClient | None = None
    for number in range(ROUNDS):
        for index, duel in enumerate(duels):
            specs = duel.cell.specs(next(seeds))
            sides = [(ours, duel.ours), (peer, duel.peer)]
            for client, results in sides if (number + index) % 2 else reversed(sides):
                if busy is not client:
                    await asyncio.sleep(REST_S)
                busy = client
                results.append(_figure(client, duel.cell, await _ask(client, duel.cell, specs)))
                done(client)


async def _ask(client: LoadClient, cell: RivalCell, specs: Sequence[RequestSpec]) -> list[RequestRecord]:
    records = await closed_loop(client, specs, cell.concurrency)
    for spec, record in zip(specs, records, strict=True):
        if record.error:
            raise StreamsFailed(f"{client.model}: {record.error}")
        if record.output_tokens != spec.max_tokens or record.prompt_tokens != len(spec.prompt):
            told = f"{record.prompt_tokens} tokens in, {record.output_tokens} out"
            raise StreamsFailed(f"{client.model}: asked for {len(spec.prompt)} and {spec.max_tokens}: {told}")
    return records


def _figure(client: LoadClient, cell: RivalCell, records: Sequence[RequestRecord]) -> float:
    try:
        return cell.figure(records)
    except ValueError as error:
        raise StreamsFailed(f"{client.model}: {error}") from error
