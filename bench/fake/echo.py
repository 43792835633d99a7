"""A model that repeats its prompt for ever, at a steady pace: the cheapest tokens whose text is known.

Real requests, scheduling, frames and beats go around it; only the arithmetic and the KV bytes are missing.
Knows nothing of processes and of the bus.
"""

import asyncio

from common.engine.runner import BatchPlan, PlanRow, SampledToken, StepResult
from common.ids import BlockId
from common.kv.codec import NO_CODECS
from common.kv.layout import KVLayout

BLOCK_SIZE = 256
VOCAB_SIZE = 1_000_000


class NoBuffer:
    """A pool of blocks that hold nothing: nobody pulls from a worker that prefills for itself."""

    block_bytes = 0

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks

    def block(self, _: BlockId) -> memoryview:
        return memoryview(bytearray())


class EchoRunner:
    """Output token i is prompt token i, counted round; nothing ends it but max_tokens."""

    layout = KVLayout(kv_heads=1, num_layers=1, block_size=BLOCK_SIZE, head_dim=1, dtype="float32")
    eos_token_ids = ()
    vocab_size = VOCAB_SIZE
    weights_fingerprint = "echo"
    kv_codecs = NO_CODECS

    def __init__(self, max_model_len: int, num_blocks: int) -> None:
        self.max_model_len = max_model_len
        self.buffer = NoBuffer(num_blocks)

    def execute(self, plan: BatchPlan) -> StepResult:
        return StepResult(plan.step, {row.seq: SampledToken(_echo(row)) for row in plan.rows if row.sample})


def _echo(row: PlanRow) -> int:
    return row.tokens[(row.start + row.count) % row.num_prompt]


class Pace:
    """A StepExecutor whose steps end `step_s` seconds apart, however long the rest of the loop takes.

    They end at multiples of `step_s` on the loop's clock, and `phase` (0 to 1) of a step later, so that
    workers of different phases are never in step. `step_s` may be changed at any time.
    """

    def __init__(self, runner: EchoRunner, step_s: float, phase: float) -> None:
        self.step_s = step_s
        self._runner = runner
        self._phase = phase
        self._ended = 0.0

    async def execute(self, plan: BatchPlan) -> StepResult:
        now = asyncio.get_running_loop().time()
        if now - self._ended > 2 * self.step_s:  # after a pause
            self._ended = ((now / self.step_s - self._phase) // 1 + self._phase) * self.step_s
        self._ended += self.step_s
        await asyncio.sleep(self._ended - now)
        return self._runner.execute(plan)

    async def close(self) -> None:
        """Nothing to wait for."""
