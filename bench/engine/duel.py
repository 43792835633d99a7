"""Ours and a peer under the same client: every cell, one server after the other, in rounds.

Ours is a chunked cluster of its own with all processes on the same cores; the client takes the others.
Where the peer runs is its owner's matter. Knows nothing of what the cells say.
"""

from collections.abc import Sequence

from bench.client import LoadClient, closed_loop, open_client
from bench.cores import pinned_target
from bench.engine.rivals import Duel, RivalCell
from bench.frame import Frame
from bench.records import RequestRecord
from bench.workloads import RequestSpec
from deploy.local.spec import ClusterSpec

ROUNDS = 3


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
            for number in range(1, ROUNDS + 1):
                for duel in duels:
                    sides = [(ours, duel.ours), (peer, duel.peer)]
                    # Who begins changes, as whatever else the machine does comes and goes.
                    for client, results in sides if number % 2 else reversed(sides):
                        records = await _ask(client, duel.cell, duel.cell.specs(seed=number))
                        results.append(_figure(client, duel.cell, records))
                        done(client)
    return duels


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
