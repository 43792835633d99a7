"""The load client: streams completions from an OpenAI server and keeps what a client can see of each.

Closed loop (a fixed number at a time) measures latency at a given concurrency; open loop (at given times,
whatever the server does) measures what users would meet. Knows nothing of percentiles and of Galley
beyond its public HTTP.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

import httpx
import orjson

from bench.records import RequestRecord, StreamLog, error_text
from bench.sse import data_lines
from bench.workloads import RequestSpec

CONNECT_TIMEOUT_S = 10.0
SILENCE_TIMEOUT_S = 120.0
"""Longest time without a byte before a request counts as failed."""

Done = Callable[[RequestRecord], object]
"""Told of each request as it ends, for progress."""


Clock = Callable[[], float]


class ServerRefused(Exception):
    """The server is there but does not answer as an OpenAI server should."""


class LoadClient:
    """One model on one server. Made by `open_client`; may be shared by any number of tasks.

    All times of a load are taken with `clock`.
    """

    def __init__(
        self, http: httpx.AsyncClient, model: str, max_model_len: int | None, clock: Clock = time.monotonic
    ) -> None:
        self._http = http
        self.clock = clock
        self.model = model
        self.max_model_len = max_model_len

    async def stream(
        self, spec: RequestSpec, *, began: float, due: float | None = None, leave: float | None = None
    ) -> RequestRecord:
        """Send `spec` now and follow it to its end; never raises for what the server does.

        `began` is the time by the clock that the record's times count from; `due` the time, on that scale, at
        which the request should have been sent, else now; `leave` when to hang up while tokens still come.
        """
        clock = self.clock
        sent = clock() - began
        log, status, error = StreamLog(), 0, ""
        try:
            async with self._http.stream("POST", "/v1/completions", content=self._body(spec)) as response:
                status = response.status_code
                if status == httpx.codes.OK:
                    async for payload in data_lines(response.aiter_bytes()):
                        log.add(clock() - began, payload)
                        if leave is not None and clock() - began >= leave:
                            log.left()
                            break
                else:
                    error = _refusal(status, await response.aread())
        except (httpx.HTTPError, httpx.StreamError, ValueError) as failure:
            error = f"{type(failure).__name__}: {failure}".rstrip(": ")
        when = sent if due is None else due
        return log.record(due=when, sent=sent, ended=clock() - began, status=status, error=error)

    def _body(self, spec: RequestSpec) -> bytes:
        body: dict[str, object] = {
            "model": self.model,
            "prompt": spec.prompt,
            "max_tokens": spec.max_tokens,
            "temperature": spec.temperature,
            "ignore_eos": spec.ignore_eos,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if spec.seed is not None:
            body["seed"] = spec.seed
        return orjson.dumps(body)


@asynccontextmanager
async def open_client(
    url: str, *, transport: httpx.AsyncBaseTransport | None = None, clock: Clock = time.monotonic
) -> AsyncIterator[LoadClient]:
    """A client for the first model that the server at `url` lists.

    Raises ServerRefused when the list of models cannot be had. `transport` and `clock` replace network and
    time in tests; the clock of uvloop would count whole milliseconds only.
    """
    async with httpx.AsyncClient(
        base_url=url,
        headers={"Content-Type": "application/json", "X-Galley-Timing": "1"},
        timeout=httpx.Timeout(SILENCE_TIMEOUT_S, connect=CONNECT_TIMEOUT_S, pool=None),
        limits=httpx.Limits(max_connections=None, max_keepalive_connections=None),
        transport=transport,
        trust_env=False,
    ) as http:
        try:
            response = await http.get("/v1/models")
            card = response.raise_for_status().json()["data"][0]
            model, max_model_len = str(card["id"]), card.get("max_model_len")
        except (httpx.HTTPError, ValueError, LookupError, TypeError) as failure:
            raise ServerRefused(f"{url}/v1/models names no model: {failure}") from failure
        yield LoadClient(http, model, max_model_len, clock)


async def closed_loop(
    client: LoadClient, specs: Sequence[RequestSpec], concurrency: int, done: Done = lambda _: None
) -> list[RequestRecord]:
    """Send all `specs`, `concurrency` at a time: a new one as soon as one ends. Records in order of specs."""
    began = client.clock()
    records: dict[int, RequestRecord] = {}
    waiting = iter(enumerate(specs))

    async def user() -> None:
        for index, spec in waiting:
            records[index] = await client.stream(spec, began=began)
            done(records[index])

    async with asyncio.TaskGroup() as users:
        for _ in range(concurrency):
            users.create_task(user())
    return [records[index] for index in range(len(specs))]


async def open_loop(
    client: LoadClient, specs: Sequence[RequestSpec], arrivals: Sequence[float], done: Done = lambda _: None
) -> list[RequestRecord]:
    """Send spec i at `arrivals[i]` s (ascending), however many still run. Records in order of specs."""
    clock = client.clock
    began = clock()

    async def one(spec: RequestSpec, due: float) -> RequestRecord:
        record = await client.stream(spec, began=began, due=due)
        done(record)
        return record

    async with asyncio.TaskGroup() as group:
        tasks = []
        for spec, due in zip(specs, arrivals, strict=True):
            await asyncio.sleep(began + due - clock())
            tasks.append(group.create_task(one(spec, due)))
    return [task.result() for task in tasks]


def _refusal(status: int, body: bytes) -> str:
    try:
        return f"{status}: {error_text(orjson.loads(body)['error'])}"
    except (ValueError, LookupError, TypeError):
        return f"{status}: {body[:200].decode(errors='replace')}"
