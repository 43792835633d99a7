"""How long requests wait for KV once prefill is done, while their decode runs eight others.

Prompts of several lengths in turn, one at a time, to a prefill and a decode of our own with a core each. The
time is the workers' own (`transfer_ms` of X-Galley-Timing): from the end of the prefill's last step until the
decode asked for FINAL, all KV in hand. Nothing is streamed to the client: on two cores, gateway and client
would take from the workers what eight streams cost. Knows nothing of the screen.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import httpx

from bench.stats import percentile
from bench.workloads import RequestSpec, fixed, requests

RUNNING = 8
RUNNING_PROMPT = 64
RUNNING_TOKENS = 4000
"""More than come in a round; the client hangs up."""
ALONE_TOKENS = 300
OUTPUT_TOKENS = 2
NUM_BLOCKS = 1024
"""Of each worker's pool: what runs in a round, three times."""
WARM_UP_ROUNDS = 4
ROUNDS = 20
SETTLE_S = 1.0
"""Until all eight decode."""
TIMEOUT_S = 120.0


@dataclass(slots=True)
class Exposed:
    """In ms: the mean time per token of eight alone, and, by prompt length, what each prompt waited."""

    step_ms: list[float] = field(default_factory=list)
    transfer_ms: dict[int, list[float]] = field(default_factory=dict)

    def figures(self) -> dict[str, float]:
        """Medians, and over the median step."""
        step = percentile(self.step_ms, 50)
        found = {"step_ms_b8": step}
        for length, times in self.transfer_ms.items():
            exposed = percentile(times, 50)
            found[f"exposed_ms_{length}"] = exposed
            found[f"exposed_ms_p90_{length}"] = percentile(times, 90)
            found[f"exposed_over_step_{length}"] = exposed / step
        return found


class Asker:
    """Whole answers of one model, for what the server says of their timing."""

    def __init__(self, http: httpx.AsyncClient, model: str) -> None:
        self._http = http
        self._model = model

    async def timing(self, spec: RequestSpec) -> Mapping[str, float]:
        """Raises httpx.HTTPError for anything but an answer, KeyError for one without timing."""
        body = {
            "model": self._model,
            "prompt": spec.prompt,
            "max_tokens": spec.max_tokens,
            "temperature": 0,
            "ignore_eos": True,
        }
        response = await self._http.post("/v1/completions", json=body)
        timing: Mapping[str, float] = response.raise_for_status().json()["galley"]
        return timing


@asynccontextmanager
async def open_asker(url: str, *, transport: httpx.AsyncBaseTransport | None = None) -> AsyncIterator[Asker]:
    """For the first model that the server lists. Raises what `timing` raises."""
    headers = {"X-Galley-Timing": "1"}
    async with httpx.AsyncClient(
        base_url=url, headers=headers, timeout=TIMEOUT_S, transport=transport, trust_env=False
    ) as http:
        models = (await http.get("/v1/models")).raise_for_status().json()
        yield Asker(http, models["data"][0]["id"])


async def measure(asker: Asker, lengths: Sequence[int], done: Callable[[int], object]) -> Exposed:
    """Eight alone, then beside eight one prompt of each length a round; `done` hears of each prompt.

    The first rounds do not count: a pool's memory costs ten times as much when it is first written.
    Raises what `Asker.timing` raises.
    """
    found = Exposed(transfer_ms={length: [] for length in lengths})
    alone = await asyncio.gather(*(asker.timing(spec) for spec in _running(0, ALONE_TOKENS)))
    found.step_ms = [timing["tpot_ms"] for timing in alone]
    for number in range(WARM_UP_ROUNDS + ROUNDS):
        async with _beside(asker, number):
            for length in lengths:
                timing = await asker.timing(_prompt(length, number))
                if number >= WARM_UP_ROUNDS:
                    found.transfer_ms[length].append(timing["transfer_ms"])
                done(length)
    return found


@asynccontextmanager
async def _beside(asker: Asker, number: int) -> AsyncIterator[None]:
    """Eight requests that decode meanwhile. Raises RuntimeError when one of them has ended before."""
    tasks = [asyncio.create_task(asker.timing(spec)) for spec in _running(number, RUNNING_TOKENS)]
    try:
        await asyncio.sleep(SETTLE_S)
        yield
        if any(task.done() for task in tasks):
            raise RuntimeError("requests that were to run on have ended")
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _running(number: int, tokens: int) -> list[RequestSpec]:
    return requests(RUNNING, fixed(RUNNING_PROMPT), fixed(tokens), seed=number)


def _prompt(length: int, number: int) -> RequestSpec:
    return requests(number + 1, fixed(length), fixed(OUTPUT_TOKENS), seed=length)[number]
