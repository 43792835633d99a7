"""Traces of real services: when requests came, how long they were, and which of their prompts begin alike.

Two public forms are read: Mooncake's (JSON lines: timestamp in ms, lengths, one id per block of 512 prompt
tokens; equal ids are equal tokens) and Azure's (CSV: time of day, context and generated tokens; nothing is
said of contents). Knows nothing of who asks and who answers.
"""

import csv
import random
from collections.abc import Iterable
from dataclasses import dataclass, replace
from datetime import datetime
from fractions import Fraction
from pathlib import Path

import orjson

from bench.workloads import token_ids
from common.errors import ConfigError

MOONCAKE_BLOCK_TOKENS = 512
AZURE_COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """`at_s` counts from the trace's first request. `blocks` are the ids of the prompt's blocks, the last
    of which may be partial; () where the form has none."""

    at_s: float
    prompt_tokens: int
    output_tokens: int
    blocks: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Trace:
    """Requests in order of their arrival. `block_tokens` is how many tokens an id of `blocks` stands for."""

    requests: tuple[TraceRequest, ...]
    block_tokens: int = MOONCAKE_BLOCK_TOKENS

    @property
    def rate(self) -> float:
        """Requests a second from the first to the last. Raises ValueError where no time passes."""
        span = self.requests[-1].at_s if self.requests else 0.0
        if span <= 0:
            raise ValueError("a trace in which no time passes has no rate")
        return (len(self.requests) - 1) / span

    def scaled(self, *, length: Fraction = Fraction(1), time: float = 1.0) -> "Trace":
        """All lengths times `length` (at least one token each), all times times `time`: 0.5 is twice as fast.

        Raises ValueError when a block would no longer be a whole number of tokens, or for a factor that is
        not above 0.
        """
        if length <= 0 or time <= 0:
            raise ValueError("a trace is scaled by factors above 0")
        block = self.block_tokens * length
        if any(request.blocks for request in self.requests) and block.denominator != 1:
            raise ValueError(f"blocks of {self.block_tokens} tokens times {length} are no whole tokens")
        scaled = tuple(
            replace(
                request,
                at_s=request.at_s * time,
                prompt_tokens=max(1, round(request.prompt_tokens * length)),
                output_tokens=max(1, round(request.output_tokens * length)),
            )
            for request in self.requests
        )
        return Trace(scaled, max(1, int(block)))

    def part(self, first: int, count: int) -> "Trace":
        """`count` requests from number `first` on, round and round; times count from the first one's."""
        total = len(self.requests)
        if not total:
            raise ValueError("there is no part of a trace without requests")
        lap = self.requests[-1].at_s + (1 / self.rate if total > 1 else 0.0)
        chosen = [
            (self.requests[number % total], number // total * lap) for number in range(first, first + count)
        ]
        start = chosen[0][0].at_s + chosen[0][1] if chosen else 0.0
        moved = tuple(replace(request, at_s=request.at_s + later - start) for request, later in chosen)
        return Trace(moved, self.block_tokens)

    def prompt(self, request: TraceRequest, seed: int | str) -> tuple[int, ...]:
        """Tokens of the request's prompt: equal for equal blocks and `seed`, random besides.

        Without blocks its time and lengths stand for its contents: no two begin alike.
        """
        if not request.blocks:
            return token_ids(random.Random(f"{seed}/{request}"), request.prompt_tokens)
        tokens: list[int] = []
        for block in request.blocks:
            tokens += token_ids(random.Random(f"{seed}/{block}"), self.block_tokens)
        missing = request.prompt_tokens - len(tokens)
        if missing > 0:
            tokens += token_ids(random.Random(f"{seed}/{request.blocks}"), missing)
        return tuple(tokens[: request.prompt_tokens])


def read_trace(path: Path) -> Trace:
    """Read either form; which one it is, the first line tells. Raises ConfigError for any other file."""
    try:
        with path.open(encoding="utf-8", newline="") as file:
            first = file.readline()
            file.seek(0)
            if first.startswith("{"):
                return _in_order(_mooncake(file), MOONCAKE_BLOCK_TOKENS)
            if first.strip().split(",")[: len(AZURE_COLUMNS)] == list(AZURE_COLUMNS):
                return _in_order(_azure(file), MOONCAKE_BLOCK_TOKENS)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{path} cannot be read as a trace: {type(error).__name__}: {error}", param="trace"
        ) from error
    raise ConfigError(f"{path} is a trace neither of Mooncake's form nor of Azure's", param="trace")


def _mooncake(lines: Iterable[str]) -> list[TraceRequest]:
    rows = [orjson.loads(line) for line in lines if line.strip()]
    return [
        TraceRequest(
            row["timestamp"] / 1e3,
            int(row["input_length"]),
            int(row["output_length"]),
            tuple(map(int, row.get("hash_ids", ()))),
        )
        for row in rows
    ]


def _azure(lines: Iterable[str]) -> list[TraceRequest]:
    time, prompt, output = AZURE_COLUMNS
    return [
        TraceRequest(_seconds(row[time]), int(row[prompt]), int(row[output])) for row in csv.DictReader(lines)
    ]


def _seconds(text: str) -> float:
    """Azure writes seven digits of a second, of which datetime reads six, and no time zone."""
    whole, _, fraction = text.partition(".")
    moment = datetime.fromisoformat(f"{whole}+00:00")
    return moment.timestamp() + (float(f"0.{fraction}") if fraction else 0.0)


def _in_order(requests: list[TraceRequest], block_tokens: int) -> Trace:
    if not requests:
        raise ValueError("it has no requests")
    ordered = sorted(requests, key=lambda request: request.at_s)
    start = ordered[0].at_s
    return Trace(tuple(replace(request, at_s=request.at_s - start) for request in ordered), block_tokens)
