"""How many tokens a prefill step needs to keep the matrix units busy: L_m of DistServe (OSDI '24, 4.3).

Below it a step takes nearly as long for fewer tokens, so that short prompts are better computed together;
above it nothing is gained, and the larger the last step of a prompt, the more KV is left to travel when the
prompt is done. Measured, because a CPU (around 128) and a GPU (many more) differ. Knows nothing of torch.
"""

import time
from collections.abc import Callable
from typing import Final

from common.engine.runner import BatchPlan, ModelRunner, PlanRow
from common.ids import BlockId, SequenceId
from common.messages.generation import SamplingParams

LEAST: Final = 128
"""Fewer are never taken: every step has a cost of its own."""
WORTH: Final = 1.05
"""How much faster per token a step of twice the size must be."""
ROUNDS: Final = 3
PATIENCE_S: Final = 1.0
"""For one size; a step that takes so long has saturated whatever there is."""


def measure_saturation(runner: ModelRunner, limit: int) -> int:
    """Tokens, at most `limit`, from which a longer prefill step gains no more.

    Writes to the first blocks, so call it before anything owns a block. Takes about half a second on a CPU.
    """
    room = runner.buffer.num_blocks * runner.layout.block_size
    return saturating_tokens(
        lambda tokens: _step_seconds(runner, tokens), min(limit, room, runner.max_model_len)
    )


def saturating_tokens(seconds_of: Callable[[int], float], limit: int) -> int:
    """The first of LEAST, twice LEAST ... whose double is not worth it, or `limit`.

    `seconds_of` runs one step of so many tokens.
    """
    tokens = min(LEAST, limit)
    seconds = _best(seconds_of, tokens)
    while seconds < PATIENCE_S and 2 * tokens <= limit:
        doubled = _best(seconds_of, 2 * tokens)
        if doubled * WORTH > 2 * seconds:
            return tokens
        tokens, seconds = 2 * tokens, doubled
    return tokens if seconds >= PATIENCE_S else limit


def _best(seconds_of: Callable[[int], float], tokens: int) -> float:
    """The fastest of a few: whatever else the machine does only makes a step slower."""
    best = spent = seconds_of(tokens)
    for _ in range(ROUNDS - 1):
        if spent >= PATIENCE_S:
            break
        spent += (seconds := seconds_of(tokens))
        best = min(best, seconds)
    return best


def _step_seconds(runner: ModelRunner, tokens: int) -> float:
    blocks = tuple(BlockId(number) for number in range(runner.layout.blocks_for(tokens)))
    sampling = SamplingParams(max_tokens=1, seed=0)
    row = PlanRow(SequenceId(0), [0] * tokens, 0, tokens, tokens, blocks, True, 0, sampling)
    begin = time.perf_counter()
    runner.execute(BatchPlan(0, (row,), gone=(SequenceId(0),)))
    return time.perf_counter() - begin
