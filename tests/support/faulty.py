"""Faults on the in-memory bus: lose, delay or hold back chosen messages, exactly as often as said.

A test adds rules to `Faults` and gives it to MemoryHub as its fate. Which message is meant is said by
subject and kind; a reply to a request on `s` has the subject `_INBOX.s`.
"""

from dataclasses import dataclass

import orjson


@dataclass(slots=True)
class Rule:
    """`times` messages whose subject starts with `subject` and whose kind is `kind` (None: any), after
    letting `skip` such pass, arrive `delay_s` late, or never when that is None."""

    kind: str | None
    subject: str
    times: int
    skip: int
    delay_s: float | None
    hits: int = 0

    def concerns(self, subject: str, kinds: tuple[str, ...]) -> bool:
        return subject.startswith(self.subject) and (self.kind is None or self.kind in kinds)


class Faults:
    """A `Fate` for MemoryHub; rules count down in the order given, the first that applies decides."""

    def __init__(self) -> None:
        self._rules: list[Rule] = []
        self.seen: dict[str, int] = {}
        """How many messages of each kind the bus was given; frames count their items' kinds too."""

    def drop(self, kind: str | None = None, *, subject: str = "", times: int = 1, skip: int = 0) -> Rule:
        """Lose messages; the rule's `hits` tells how many were lost so far."""
        return self._add(Rule(kind, subject, times, skip, None))

    def delay(
        self, delay_s: float, kind: str | None = None, *, subject: str = "", times: int = 1, skip: int = 0
    ) -> Rule:
        """Let messages arrive late; later ones may overtake them."""
        return self._add(Rule(kind, subject, times, skip, delay_s))

    def heal(self) -> None:
        """Forget all rules."""
        self._rules.clear()

    def __call__(self, subject: str, payload: bytes) -> float | None:
        kinds = kinds_of(payload)
        for kind in kinds:
            self.seen[kind] = self.seen.get(kind, 0) + 1
        for rule in self._rules:
            if not rule.concerns(subject, kinds) or rule.hits >= rule.times:
                continue
            if rule.skip > 0:
                rule.skip -= 1
                continue
            rule.hits += 1
            return rule.delay_s
        return 0.0

    def _add(self, rule: Rule) -> Rule:
        self._rules.append(rule)
        return rule


def kinds_of(payload: bytes) -> tuple[str, ...]:
    """The kind of a message and, for a frame, of its items; a part of a long message is of kind "part"."""
    if payload.startswith(b"part "):
        return ("part",)
    try:
        raw = orjson.loads(payload)
    except orjson.JSONDecodeError:
        return ()
    if not isinstance(raw, dict):
        return ()
    items = raw.get("items") or []
    return (raw.get("kind", ""), *sorted({item["kind"] for item in items}))
