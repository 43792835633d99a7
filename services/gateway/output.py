"""What workers tell of one choice, put in order: frames may be repeated, lost and repaired, or overtaken.

Pure. Knows nothing of attempts; the caller calls `forget_early` between two of them.
"""

from common.messages.stream import FinishItem, PromptItem, TokenLogprobs, TokensItem


class OutputTokens:
    """Contiguous output tokens from index 0, and items that came too early, at most `limit` tokens in all.

    What is above `limit` is not missed: with limit 0 a finish counts the one token that a worker cannot help.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._early: dict[int, TokensItem] = {}
        self._finish: FinishItem | None = None
        self.ids: list[int] = []

    def forget_early(self) -> None:
        """What was received out of order belongs to an attempt that is over."""
        self._early.clear()
        self._finish = None

    def add(self, item: TokensItem) -> tuple[tuple[int, ...], tuple[TokenLogprobs, ...]]:
        """Token ids (and logprobs) that are new and in order now because of `item`."""
        if not self._early and item.index == len(self.ids):
            next_ids = item.token_ids[: self._limit - len(self.ids)]
            next_logprobs = item.logprobs[: len(next_ids)]
            self.ids.extend(next_ids)
            return next_ids, next_logprobs if len(next_logprobs) == len(next_ids) else ()
        known = self._early.get(item.index)
        if (known is None or len(item.token_ids) > len(known.token_ids)) and item.index < self._limit:
            self._early[item.index] = item
        ids: list[int] = []
        logprobs: list[TokenLogprobs] = []
        while (item_now := self._next_early()) is not None:
            skip = len(self.ids) - item_now.index
            fresh = item_now.token_ids[skip : skip + self._limit - len(self.ids)]
            ids.extend(fresh)
            logprobs.extend(item_now.logprobs[skip : skip + len(fresh)])
            self.ids.extend(fresh)
        return tuple(ids), tuple(logprobs) if len(logprobs) == len(ids) else ()

    def end(self, item: FinishItem) -> None:
        self._finish = item

    @property
    def finish(self) -> FinishItem | None:
        """The finish, once every token that it counts is here."""
        complete = self._finish is not None and len(self.ids) >= min(self._finish.num_tokens, self._limit)
        return self._finish if complete else None

    def _next_early(self) -> TokensItem | None:
        """Take out an early item that starts no later than the next index wanted."""
        if not self._early:
            return None
        index = min(self._early)
        return self._early.pop(index) if index <= len(self.ids) else None


class PromptScores:
    """Log probabilities of all tokens of a prompt but the first; what one attempt told holds for the next."""

    def __init__(self, num_tokens: int) -> None:
        self._known: dict[int, TokenLogprobs] = {}
        self._num_tokens = num_tokens

    def add(self, item: PromptItem) -> bool:
        """Whether that makes them complete, which they were not before."""
        if self.complete:
            return False
        for index, logprobs in enumerate(item.logprobs, start=item.index):
            if 0 < index < self._num_tokens:
                self._known[index] = logprobs
        return len(self._known) == self._num_tokens - 1

    @property
    def complete(self) -> bool:
        return len(self._known) >= self._num_tokens - 1

    @property
    def all(self) -> tuple[TokenLogprobs, ...]:
        """In order, once complete."""
        return tuple(self._known[index] for index in range(1, self._num_tokens))
