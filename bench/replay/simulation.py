"""One replay: a trace's requests, at their times, to decode workers that prefill for themselves.

Router, workers, caches and their events are the product's; the model is FakeModel, with step times of about
the default model on one core. Pools are as large as anything could ever need, so that what is not found was
not found because of where the request went. Knows nothing of traces' forms and of what is shown.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from bench.progress import Advance
from bench.stats import percentile
from bench.traces import Trace, TraceRequest
from bench.virtual.cluster import VirtualCluster
from bench.workloads import TOKEN_IDS
from common.config import DecodeSettings, GatewaySettings, RouterSettings, RoutingPolicyName
from common.engine.runner import BatchPlan
from common.engine.runner_fake import FakeModel
from common.errors import GalleyError
from common.kv.layout import KVLayout
from common.messages.generation import SamplingParams

STEP_S = 0.008
TOKEN_S = 0.0005
"""What a step takes, and each of its tokens: the default model on one core, about."""
DAY_S = 86_400.0


@dataclass(frozen=True, slots=True)
class Replay:
    """What a policy made of a trace. Times are virtual seconds; `requests` counts per worker."""

    hit_rate: float
    requests: tuple[int, ...]
    ttft_s: tuple[float, ...]
    failures: tuple[str, ...]

    @property
    def max_over_mean(self) -> float:
        return max(self.requests) * len(self.requests) / max(1, sum(self.requests))

    def ttft(self, percent: float) -> float:
        return percentile(list(self.ttft_s), percent) if self.ttft_s else 0.0


class Replayer:
    """`run` inside run_virtual. `done` is called for each request at its end, and may raise to give up."""

    def __init__(
        self, trace: Trace, policy: RoutingPolicyName, workers: int, seed: int, done: Advance
    ) -> None:
        self._trace = trace
        self._seed = seed
        self._done = done
        self._ttft_s: list[float] = []
        self._failures: list[str] = []
        block, longest = trace.block_tokens, max(r.prompt_tokens + r.output_tokens for r in trace.requests)
        blocks = sum((r.prompt_tokens + r.output_tokens) // block + 2 for r in trace.requests)
        self._workers = [
            DecodeSettings(instance=f"decode-{number}", num_blocks=blocks, max_queued_tokens=1 << 30)
            for number in range(workers)
        ]
        self._cluster = VirtualCluster(
            FakeModel(
                KVLayout(kv_heads=1, num_layers=1, block_size=block, head_dim=1, dtype="float16"),
                vocab_size=TOKEN_IDS[1],
                max_model_len=longest + 1,
            ),
            _step_time,
            router=RouterSettings(topology="chunked", routing_policy=policy),
            gateway=GatewaySettings(
                request_timeout_s=DAY_S, first_token_timeout_s=DAY_S, max_requests=len(trace.requests)
            ),
            seed=seed,
        )

    async def run(self) -> Replay:
        async with self._cluster.started(self._workers), asyncio.TaskGroup() as tasks:
            loop = asyncio.get_running_loop()
            begun = loop.time()
            asking = []
            for number, request in enumerate(self._trace.requests):
                await asyncio.sleep(begun + request.at_s - loop.time())
                asking.append(tasks.create_task(self._ask(number, request)))
            await asyncio.gather(*asking)
            hits = sum(self._counted("prefix_cache_hit_tokens_total"))
            asked = sum(self._counted("prefix_cache_query_tokens_total"))
            requests = tuple(map(int, self._counted("requests_total", status="ok")))
        return Replay(hits / max(asked, 1), requests, tuple(self._ttft_s), tuple(self._failures))

    async def _ask(self, number: int, request: TraceRequest) -> None:
        clock = asyncio.get_running_loop().time
        begun, first = clock(), None
        sampling = SamplingParams(max_tokens=request.output_tokens, seed=number, ignore_eos=True)
        try:
            reply = self._cluster.submit(self._trace.prompt(request, self._seed), sampling)
            try:
                async for _ in reply:
                    first = clock() if first is None else first
            finally:
                reply.close()
        except GalleyError as error:
            self._failures.append(f"request {number}: {error.message}")
        else:
            self._ttft_s.append((first or clock()) - begun)
        self._done(number)

    def _counted(self, name: str, **labels: str) -> Sequence[float]:
        """A counter of every worker, in order of name."""
        found = []
        for instance, worker in sorted(self._cluster.workers.items()):
            own = {"instance": instance, "role": "decode", **labels}
            found.append(worker.metrics.registry.get_sample_value(f"galley_{name}", own) or 0.0)
        return found


def _step_time(plan: BatchPlan) -> float:
    return STEP_S + TOKEN_S * plan.num_tokens
