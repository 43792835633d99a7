"""Two engines side by side: each in turn, sequences cut back before each round, medians of all."""

from collections.abc import Sequence

from bench.engine.cells import Decode, Prefill
from bench.engine.contender import LONGEST_ROUND, SHORTEST_ROUND, Effort, compare


class Recorder:
    """Writes down what it is asked for."""

    def __init__(self, name: str, log: list[str]) -> None:
        self._name = name
        self._log = log
        self.filled: tuple[int, int] | None = None

    def prefill(self, tokens: Sequence[int]) -> None:
        self._log.append(f"{self._name} prefill {len(tokens)}")

    def fill(self, batch: int, context: int) -> None:
        self.filled = batch, context

    def rewind(self) -> None:
        self._log.append(f"{self._name} rewind")

    def step(self) -> None:
        self._log.append(f"{self._name} step")


def test_engines_take_turns_and_each_round_begins_at_the_same_context() -> None:
    log: list[str] = []
    ours, plain = Recorder("ours", log), Recorder("plain", log)
    times = compare(Decode(4, 256), (ours, plain), [], Effort(rounds=3, round_s=10.0))
    assert len(times) == 2
    assert all(time > 0 for time in times)
    assert ours.filled == plain.filled == (4, 256 - LONGEST_ROUND // 2)
    rounds = [entry for entry in log if entry.endswith("rewind")]
    assert rounds == ["ours rewind", "plain rewind"] * 4  # one to warm up
    assert log[-LONGEST_ROUND:] == ["plain step"] * LONGEST_ROUND


def test_a_slow_engine_is_still_timed_a_few_times_a_round() -> None:
    log: list[str] = []
    compare(Prefill(128), (Recorder("ours", log),), [1] * 128, Effort(rounds=2, round_s=0.0))
    assert log == ["ours prefill 128"] * (2 + 2 * SHORTEST_ROUND)
