"""What a client sees of one choice: text without special tokens, stop strings and half characters.

Works token by token, so that neither the text nor the count of tokens depends on how they were batched.
Knows nothing of attempts and HTTP.
"""

from common.messages.stream import TokenLogprobs
from services.gateway.detokenizer import Decode, Detokenizer
from services.gateway.request import Delta, Token
from services.gateway.stop_strings import StopMatcher


class ChoiceText:
    """Tokens in, deltas out. `special` ids are never shown, an id in `ending` ends the choice unseen.

    Once `stopped` (a stop string was matched), nothing more comes out, and the tokens after the one that
    completed the match are not counted.
    """

    def __init__(
        self,
        index: int,
        decode: Decode,
        special: frozenset[int],
        ending: frozenset[int],
        matcher: StopMatcher,
    ) -> None:
        self.num_tokens = 0
        self._index = index
        self._ending = ending
        self._detokenizer = Detokenizer(decode, special | ending)
        self._matcher = matcher

    @property
    def stopped(self) -> bool:
        return self._matcher.matched

    def push(self, token_ids: tuple[int, ...], logprobs: tuple[TokenLogprobs, ...] = ()) -> Delta:
        """The next tokens of the choice; `logprobs` is empty or has one for each."""
        pieces: list[str] = []
        tokens: list[Token] = []
        for position, token in enumerate(token_ids):
            if self.stopped:
                break
            self.num_tokens += 1
            pieces.append(self._matcher.feed(self._detokenizer.push(token)))
            if token not in self._ending:
                tokens.append(Token(token, logprobs[position] if logprobs else None))
        return Delta(self._index, "".join(pieces), tuple(tokens), "stop" if self.stopped else None)

    def flush(self) -> str:
        """The text that was held back, once the choice has ended."""
        if self.stopped:
            return ""
        return self._matcher.feed(self._detokenizer.flush()) + self._matcher.flush()
