"""What the gateway knows of the model: how its tokens read, which end a text, how long one may get."""

from dataclasses import dataclass

from services.gateway.tokenizing import Tokenizer


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """`max_model_len` counts prompt + output tokens; `model` is the name that clients use."""

    tokenizer: Tokenizer
    eos_ids: frozenset[int]
    max_model_len: int
    model: str
