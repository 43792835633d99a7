"""Who goes first: to blocks and to a share of a step; and, the other way round, who loses its blocks first.

Pure choices, asked by the Scheduler. A strategy gives each sequence a key; ranks made of keys are what the
Scheduler sorts by, so that admission, growth and preemption follow one and the same order. Aging is not in
here: see waiting.py. Knows nothing of blocks and steps.
"""

import math
from dataclasses import dataclass, field
from typing import Protocol

from common.clock import Clock
from common.engine.prefill_rate import PrefillRate
from common.engine.sequence import Sequence
from common.errors import ConfigError

Rank = tuple[int, float, float, int]
"""Lower goes first: whether it has a key, the key, arrival, id. Those without one go first, by age."""

DEFAULT_TTFT_S = 10.0
"""The TTFT budget, in seconds, of requests that name none: what `slack` assumes."""


class Ordering(Protocol):
    """`key` is asked when a sequence comes and when its first token is sampled; between, a rank stays."""

    def key(self, seq: Sequence, uncomputed: int) -> float | None:
        """Lower goes first, equal ones by age; None: by age, before all that have a key.

        `uncomputed` is how many tokens have to be computed before `seq` can go on.
        """
        ...

    def hopeless_below(self) -> float:
        """Waiting sequences with a key below this go after the others: to hurry no longer helps them."""
        ...


@dataclass(frozen=True, slots=True)
class Fcfs:
    """In the order of arrival at the gateway."""

    def key(self, seq: Sequence, uncomputed: int) -> float | None:  # noqa: ARG002 (part of the protocol)
        return None

    def hopeless_below(self) -> float:
        return -math.inf


@dataclass(frozen=True, slots=True)
class ShortestFirst:
    """The fewest tokens to compute first: the best mean TTFT. Whoever streams already goes before, by age."""

    def key(self, seq: Sequence, uncomputed: int) -> float | None:
        return None if seq.num_output else uncomputed

    def hopeless_below(self) -> float:
        return -math.inf


@dataclass(frozen=True, slots=True)
class Priority:
    """The lowest `priority` first, to the end of the request; equal ones by age. As in vLLM."""

    def key(self, seq: Sequence, uncomputed: int) -> float | None:  # noqa: ARG002 (part of the protocol)
        return seq.priority

    def hopeless_below(self) -> float:
        return -math.inf


@dataclass(frozen=True, slots=True)
class Slack:
    """The least time left to the TTFT budget, minus the time that the prompt takes, first.

    The key is the latest start that would do, which orders by slack at any time. Serving the least slack
    first loses everybody once there is too much work (each is served just after it was lost), so whoever
    cannot make it any more yields to those who can. Whoever streams already goes first, by age.
    """

    clock: Clock
    rate: PrefillRate = field(default_factory=PrefillRate)

    def key(self, seq: Sequence, uncomputed: int) -> float | None:
        if seq.num_output:
            return None
        budget = seq.slo.ttft_s if seq.slo else None
        return seq.arrival + (DEFAULT_TTFT_S if budget is None else budget) - self.rate.seconds(uncomputed)

    def hopeless_below(self) -> float:
        return self.clock.now()


def rank_of(seq: Sequence, key: float | None) -> Rank:
    return (0, 0.0, seq.arrival, seq.id) if key is None else (1, key, seq.arrival, seq.id)


def make_ordering(name: str, clock: Clock, rate: PrefillRate) -> Ordering:
    """The ordering of that name. Raises ConfigError for a name that is none."""
    match name:
        case "fcfs":
            return Fcfs()
        case "shortest_first":
            return ShortestFirst()
        case "slack":
            return Slack(clock, rate)
        case "priority":
            return Priority()
    raise ConfigError(f"ordering {name!r}: use fcfs, shortest_first, slack or priority", param="ordering")
