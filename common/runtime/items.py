"""From what an engine's step yields to what a frame carries. Knows nothing of frames and gateways."""

from common.engine.scheduler import StepOutput
from common.messages.stream import FinishItem, PrefillStats, TokensItem


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
