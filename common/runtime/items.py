"""From what an engine's step yields to what a frame carries. Knows nothing of frames and gateways."""

from collections.abc import Iterator
from collections.abc import Sequence as Seq

from common.engine.scheduler import StepOutput
from common.engine.sequence import Sequence
from common.messages.stream import FinishItem, PrefillStats, PromptItem, TokenLogprobs, TokensItem

PROMPT_PIECE = 128
"""Prompt tokens per item: 80 KB with twenty alternatives each, so that the outbox can fill frames well."""


def tokens_item(output: StepOutput, prefill: PrefillStats | None = None) -> TokensItem:
    """The item for one sampled token; `prefill` rides on the first one of an attempt."""
    logprobs = (output.logprobs,) if output.logprobs else ()
    return TokensItem(output.seq.key, output.index, (output.token,), logprobs, prefill)


def finish_item(output: StepOutput) -> FinishItem:
    """The item for a sequence's last token, whose `finish` is set.

    "stop" comes of an EOS, a stop id, or a token that completes the grammar.
    """
    assert output.finish is not None
    stop_token = output.token if output.finish == "stop" else None
    return FinishItem(output.seq.key, output.finish, output.index + 1, stop_token)


def prompt_items(seq: Sequence, index: int, logprobs: Seq[TokenLogprobs]) -> Iterator[PromptItem]:
    """Items for the log probabilities of prompt tokens from `index` on."""
    for start in range(0, len(logprobs), PROMPT_PIECE):
        yield PromptItem(seq.key, index + start, tuple(logprobs[start : start + PROMPT_PIECE]))
