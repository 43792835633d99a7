"""A cluster in virtual time (bench/virtual/cluster.py) with faults, and with checks that nothing is left."""

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Literal

from bench.virtual.cluster import NumberTokenizer, VirtualCluster, VirtualWorker
from common.config import (
    SPLIT,
    DecodeSettings,
    EngineSettings,
    GatewaySettings,
    PrefillSettings,
    RouterSettings,
    Topology,
)
from common.engine.runner import BatchPlan
from common.engine.runner_fake import FakeModel
from common.errors import GalleyError
from common.messages.generation import SamplingParams
from tests.support.faulty import Faults
from tests.support.leaks import assert_pool_idle
from tests.support.memory_pool import MemoryPool

__all__ = ["NumberTokenizer", "SimCluster", "SimWorker"]

STEP_S = 0.02
"""What a step takes, whatever is in it, and what each of its tokens adds."""
TOKEN_S = 0.0001

SimWorker = VirtualWorker


class SimCluster(VirtualCluster):
    """`running` starts it, waits until it can serve, and checks at the end that nothing is left."""

    def __init__(
        self,
        *,
        prefill: int = 1,
        decode: int = 1,
        topology: Topology = "disaggregated",
        model: FakeModel | None = None,
        num_blocks: int = 256,
        gateway_settings: GatewaySettings | None = None,
        router_settings: Mapping[str, object] | None = None,
        ordering: Literal["fcfs", "shortest_first", "slack", "priority"] = "fcfs",
        drain_seconds: float = 0,
        kv_pool: MemoryPool | None = None,
        seed: int = 1,
    ) -> None:
        self.faults = Faults()
        pool = kv_pool or (MemoryPool() if topology == "pooled" else None)
        super().__init__(
            model or FakeModel(),
            _step_time,
            router=RouterSettings(topology=topology, **(router_settings or {})),  # type: ignore[arg-type]
            gateway=gateway_settings or GatewaySettings(),
            fate=self.faults,
            kv_pool=pool,
            seed=seed,
        )
        self._topology = topology
        self._ordering = ordering
        self._counts = (prefill if topology in SPLIT else 0, decode)
        self._num_blocks = num_blocks
        self._drain_seconds = drain_seconds
        self.pools: dict[str, int] = {}
        """Blocks of single workers that differ from `num_blocks`."""

    def settings(self, role: type[EngineSettings], instance: str) -> EngineSettings:
        return role(
            instance=instance,
            num_blocks=self.pools.get(instance, self._num_blocks),
            chunk_tokens=64,
            max_num_batched_tokens=256,
            policy="prefill_first" if self._topology == "colocated" else "decode_first",
            ordering=self._ordering,
            drain_seconds=self._drain_seconds,
        )

    @asynccontextmanager
    async def running(self) -> AsyncIterator["SimCluster"]:
        prefills, decodes = self._counts
        workers = [self.settings(PrefillSettings, f"prefill-{number}") for number in range(prefills)]
        workers += [self.settings(DecodeSettings, f"decode-{number}") for number in range(decodes)]
        async with self.started(workers):
            yield self
            await asyncio.sleep(2.0)
            self.assert_idle()

    async def kill(self, name: str) -> None:
        await self.workers.pop(name).kill()

    async def ask_all(
        self, prompts: Sequence[Sequence[int]], sampling: SamplingParams
    ) -> list[list[int] | GalleyError]:
        """All at once; an error stands in the place of its answer."""
        answers = await asyncio.gather(
            *(self.ask(prompt, sampling) for prompt in prompts), return_exceptions=True
        )
        for answer in answers:
            if isinstance(answer, BaseException) and not isinstance(answer, GalleyError):
                raise answer
        return answers  # type: ignore[return-value]

    def assert_idle(self) -> None:
        """Nobody holds anything for any request any more."""
        assert self.gateway.num_in_flight == 0
        for worker in self.workers.values():
            assert not worker.host.worker.held, worker.ref
            assert worker.host.engine.scheduler.is_empty
            assert_pool_idle(worker.host.pool)


def _step_time(plan: BatchPlan) -> float:
    return STEP_S + TOKEN_S * plan.num_tokens
