"""What long prompts do to streams that are running: the gaps between tokens that clients see.

Knows nothing of who serves and of how it is configured.
"""

import asyncio
import secrets
from collections.abc import Sequence
from dataclasses import dataclass

from bench.client import LoadClient, open_loop
from bench.records import RequestRecord
from bench.stats import percentile
from bench.workloads import fixed, requests, text_of_words, token_ids

STREAMS = 4
STREAM_WORDS = 64
STREAM_TOKENS = 6000
"""More than come in the time; the client hangs up."""
PROMPT_TOKENS = 2048
PROMPT_EVERY_S = 3.0
FIRST_PROMPT_S = 2.0
"""The streams run by then."""


@dataclass(frozen=True, slots=True)
class Gaps:
    """One setting: every gap between two tokens of a stream, in ms, and TTFT of the long prompts, in ms."""

    name: str
    itl_ms: tuple[float, ...]
    ttft_ms: tuple[float, ...]
    problems: tuple[str, ...] = ()

    @property
    def p50(self) -> float:
        return percentile(self.itl_ms, 50)

    @property
    def p99(self) -> float:
        return percentile(self.itl_ms, 99)

    @property
    def longest(self) -> float:
        return max(self.itl_ms)

    def figures(self) -> dict[str, float]:
        """`itl_ms_p50_NAME`, `..._p99_...`, `..._max_...`, and what the prompts waited."""
        found = {"itl_ms_p50": self.p50, "itl_ms_p99": self.p99, "itl_ms_max": self.longest}
        if self.ttft_ms:
            found["prompt_ttft_ms_p50"] = percentile(self.ttft_ms, 50)
        return {f"{figure}_{self.name}": value for figure, value in found.items()}


async def listen(client: LoadClient, name: str, seconds: float, *, prompts: bool) -> Gaps:
    """Keep four streams running for `seconds`; with `prompts` a long one arrives every 3 s meanwhile."""
    began = client.clock()
    arrivals = prompt_arrivals(seconds) if prompts else []
    long_ones = requests(len(arrivals), fixed(PROMPT_TOKENS), fixed(1), seed=1, prompts=token_ids)
    streams = requests(
        STREAMS,
        fixed(STREAM_WORDS),
        fixed(STREAM_TOKENS),
        seed=secrets.randbelow(2**31),
        prompts=text_of_words,
    )
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(client.stream(spec, began=began, leave=seconds)) for spec in streams]
        load = group.create_task(open_loop(client, long_ones, arrivals))
    return gaps_of(name, [task.result() for task in tasks], load.result())


def prompt_arrivals(seconds: float) -> list[float]:
    """Every 3 s, none so late that the streams end while it is computed."""
    count = int((seconds - FIRST_PROMPT_S) / PROMPT_EVERY_S)
    return [FIRST_PROMPT_S + PROMPT_EVERY_S * number for number in range(count)]


def gaps_of(name: str, streams: Sequence[RequestRecord], prompts: Sequence[RequestRecord]) -> Gaps:
    """The gaps of all streams together. An event's gap counts once, whatever number of tokens it brought."""
    errors = dict.fromkeys(record.error for record in (*streams, *prompts) if record.error)
    return Gaps(
        name=name,
        itl_ms=tuple(1e3 * gap for record in streams for gap in record.itl_s),
        ttft_ms=tuple(1e3 * record.ttft_s for record in prompts if record.ttft_s is not None),
        problems=tuple(f"{name}: {error}" for error in errors),
    )
