"""Finds stop strings in text that arrives in pieces, and lets no text out that may still become one.

Pure; knows nothing of tokens.
"""


class StopMatcher:
    """Feeds on text; the result does not depend on how the text was cut into pieces.

    The stop string whose match *ends* first wins (then the longer one), because that is the one that is
    seen first when text comes character by character. With `include`, the match itself is let out.
    """

    def __init__(self, stops: tuple[str, ...], *, include: bool = False) -> None:
        if "" in stops:
            raise ValueError("an empty stop string matches everywhere")
        self._stops = stops
        self._include = include
        self._held = ""
        self.matched = False

    def feed(self, text: str) -> str:
        """Text that is certain now. After a match there is none any more."""
        if self.matched or not self._stops:
            return "" if self.matched else text
        text = self._held + text
        ends = [(at + len(stop), at) for stop in self._stops if (at := text.find(stop)) >= 0]
        if ends:
            self.matched = True
            self._held = ""
            end, start = min(ends)
            return text[: end if self._include else start]
        keep = max(_overlap(text, stop) for stop in self._stops)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def flush(self) -> str:
        """The text is over: what was held back is no stop string."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that is a proper beginning of `stop`."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if stop.startswith(text[len(text) - length :]):
            return length
    return 0
