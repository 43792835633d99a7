"""Where a sequence may begin and where it ends: context length, pool size, max_tokens, EOS and stop ids.

Pure rules over one sequence. Stop strings are the gateway's, which sees text.
"""

from collections.abc import Collection
from dataclasses import dataclass

from common.engine.sequence import Sequence
from common.errors import ContextLengthExceeded, InvalidRequest, PoolExhausted
from common.messages.stream import FinishReason


@dataclass(frozen=True, slots=True)
class Limits:
    """`max_model_len`: tokens that the model's positions allow. `pool_tokens`: tokens the KV pool holds."""

    max_model_len: int
    pool_tokens: int
    eos_token_ids: Collection[int] = ()

    def check(self, seq: Sequence) -> None:
        """Raises InvalidRequest (ContextLengthExceeded) for what no instance of this model can compute,
        PoolExhausted for what this pool can never hold."""
        num_tokens = len(seq.tokens)
        if seq.num_uncomputed < 1:
            raise InvalidRequest("nothing to compute: the prompt needs at least one token")
        if num_tokens >= self.max_model_len:
            raise ContextLengthExceeded(
                f"{num_tokens} tokens leave no room for output within {self.max_model_len}: shorten it"
            )
        if num_tokens > self.pool_tokens:
            raise PoolExhausted(f"{num_tokens} tokens are more than the {self.pool_tokens} of the KV pool")

    def length(self, seq: Sequence) -> int:
        """Tokens, prompt and output, at which the sequence ends with `length`."""
        # The last token is never computed, so it needs no KV: one more than the pool holds.
        return min(seq.num_prompt + seq.sampling.max_tokens, self.max_model_len, self.pool_tokens + 1)

    def finish(self, seq: Sequence) -> FinishReason | None:
        """Whether the newest token ended the sequence; before min_tokens only its length can."""
        token, sampling = seq.tokens[-1], seq.sampling
        if seq.num_output >= sampling.min_tokens:
            eos = token in self.eos_token_ids and not sampling.ignore_eos
            if eos or token in sampling.stop_token_ids:
                return "stop"
        return "length" if len(seq.tokens) >= self.length(seq) else None
