"""Text to tokens and back, with the checkpoint's own tokenizer and chat template; no torch.

`Tokenizer` is what the gateway needs, and with what else it knows of the model its `Vocabulary`;
`ModelTokenizer` is transformers' fast tokenizer behind it, and `TokenizerPool` runs in threads what could
hold up the event loop. Knows nothing of HTTP.
"""

import asyncio
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final, Protocol, TypeVar

from common.engine.grammar import GrammarCompiler
from common.errors import ConfigError, ContextLengthExceeded, InvalidRequest, Overloaded
from services.gateway.token_bytes import token_bytes

T = TypeVar("T")
ChatMessages = Sequence[dict[str, Any]]
"""Messages as chat templates read them: role, content and what else the client gave."""

INLINE_CHARS = 512
"""Up to so much is tokenized on the event loop: half a millisecond for the slowest of texts, which are emoji,
a tenth for prose, where the way to a thread and back takes a quarter."""
TEXT_CHARS = 32
"""What a text costs besides its length, be it empty, in characters."""


@dataclass(frozen=True, slots=True)
class ChatStyle:
    """How messages become a prompt: unless asked otherwise, one for the assistant's next message.

    `continue_final_message` leaves the last one open, and goes without `add_generation_prompt`. Templates add
    the special tokens that they want by themselves.
    """

    add_generation_prompt: bool = True
    continue_final_message: bool = False
    add_special_tokens: bool = False


NEXT_MESSAGE: Final = ChatStyle()


class Tokenizer(Protocol):
    @property
    def vocab_size(self) -> int:
        """Token ids are below this."""
        ...

    @property
    def special_ids(self) -> frozenset[int]:
        """Tokens that are never shown as text."""
        ...

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]: ...

    def encode_chat(self, messages: ChatMessages, style: ChatStyle = NEXT_MESSAGE) -> list[int]:
        """The prompt that the chat template makes. Raises InvalidRequest."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """Text of `ids` without special tokens; U+FFFD where bytes make no character."""
        ...

    def spell(self, ids: Sequence[int]) -> str:
        """Text of `ids` with special tokens by their names."""
        ...

    def bytes_of(self, token: int) -> bytes:
        """What the token stands for; a special token's name."""
        ...

    def pieces(self, ids: Sequence[int]) -> list[str]:
        """The vocabulary's own spelling of each token; "" where it has none."""
        ...


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """What the gateway knows of the model: how its tokens read, which end a text, how long one may get.

    `max_model_len` counts prompt + output tokens; `model` is the name that clients use.
    """

    tokenizer: Tokenizer
    eos_ids: frozenset[int]
    max_model_len: int
    model: str


class ModelTokenizer:
    """The fast tokenizer in a model directory. Raises ConfigError when there is none.

    `vocab_size` is the model's, which may have more ids than the tokenizer knows; None: the tokenizer's.
    """

    def __init__(self, directory: Path, vocab_size: int | None = None) -> None:
        self._hf = _load(directory)
        self._backend = self._hf.backend_tokenizer
        added = self._hf.added_tokens_decoder
        self.special_ids = frozenset(self._hf.all_special_ids) | {i for i, t in added.items() if t.special}
        self.vocab_size = vocab_size or len(self._hf)
        self._added = frozenset(added)
        self._byte_level = "ByteLevel" in repr(self._backend.decoder)
        self._known_bytes: dict[int, bytes] = {}
        """Of the tokens that were asked for; twenty alternatives a token are asked for again and again."""
        self._known_texts: dict[int, str] = {}
        """Of single tokens that were decoded: every token of a stream is, as what the next one follows."""
        self._longest_token = max(len(piece) for piece in self._hf.get_vocab())

    @property
    def longest_token(self) -> int:
        """No token stands for more characters than this."""
        return self._longest_token

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        ids: list[int] = self._backend.encode(text, add_special_tokens=add_special_tokens).ids
        return ids

    def encode_chat(self, messages: ChatMessages, style: ChatStyle = NEXT_MESSAGE) -> list[int]:
        if not self._hf.chat_template:
            raise InvalidRequest("this model has no chat template; use /v1/completions", param="messages")
        from jinja2 import TemplateError

        try:
            text = self._hf.apply_chat_template(
                list(messages),
                tokenize=False,
                add_generation_prompt=style.add_generation_prompt,
                continue_final_message=style.continue_final_message,
            )
        except (TemplateError, TypeError, KeyError, AttributeError, ValueError) as error:
            raise InvalidRequest(
                f"the model's chat template refuses these messages: {error}", param="messages"
            ) from error
        return self.encode(text, add_special_tokens=style.add_special_tokens)

    def decode(self, ids: Sequence[int]) -> str:
        if len(ids) == 1 and (known := self._known_texts.get(ids[0])) is not None:
            return known
        text: str = self._backend.decode(ids, skip_special_tokens=True)
        if len(ids) == 1:
            self._known_texts[ids[0]] = text
        return text

    def spell(self, ids: Sequence[int]) -> str:
        text: str = self._backend.decode(ids, skip_special_tokens=False)
        return text

    def pieces(self, ids: Sequence[int]) -> list[str]:
        return [self._backend.id_to_token(token) or "" for token in ids]

    def bytes_of(self, token: int) -> bytes:
        known = self._known_bytes.get(token)
        if known is None:
            known = self._known_bytes[token] = self._bytes_of(token)
        return known

    def _bytes_of(self, token: int) -> bytes:
        piece: str | None = self._backend.id_to_token(token)
        if piece is None:
            return b""
        return piece.encode() if token in self._added else token_bytes(piece, byte_level=self._byte_level)


def _load(directory: Path) -> Any:
    """transformers' tokenizer; imported here, because only a process that tokenizes should pay for it."""
    try:
        if (directory / "tokenizer.json").is_file():
            from transformers import PreTrainedTokenizerFast

            # AutoTokenizer would read the same file, but imports torch where it is installed.
            return PreTrainedTokenizerFast.from_pretrained(directory)
        from transformers import AutoTokenizer

        loaded = AutoTokenizer.from_pretrained(directory)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{directory} has no tokenizer that can be read: {error}") from error
    if not loaded.is_fast:
        raise ConfigError(f"{directory} has no tokenizer.json; only fast tokenizers are served")
    return loaded


class TokenizerPool:
    """Runs tokenizing in `threads` threads; at most `max_waiting` calls wait, more are refused. Short prompts
    neither wait nor go to a thread.

    Without `grammars` every grammar is refused.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        max_model_len: int,
        *,
        grammars: GrammarCompiler | None = None,
        threads: int = 2,
        max_waiting: int = 1024,
    ) -> None:
        self.tokenizer = tokenizer
        self.max_model_len = max_model_len
        self._grammars = grammars
        self._max_waiting = max_waiting
        self._waiting = 0
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="tokenize")
        longest = getattr(tokenizer, "longest_token", None)
        self._max_chars = max_model_len * longest if longest else None

    async def encode(self, texts: Sequence[str], *, add_special_tokens: bool = True) -> list[list[int]]:
        """Raises ContextLengthExceeded, without tokenizing, for a text that cannot possibly fit."""
        for text in texts:
            if self._max_chars is not None and len(text) > self._max_chars:
                raise too_long(f"{len(text)} characters", self.max_model_len, "prompt")
        encode = partial(self.tokenizer.encode, add_special_tokens=add_special_tokens)
        if _is_short(texts):
            return [encode(text) for text in texts]
        return await self._run(lambda: [encode(text) for text in texts])

    async def encode_chat(self, messages: ChatMessages, style: ChatStyle = NEXT_MESSAGE) -> list[int]:
        """Like `encode`. Raises InvalidRequest when the template refuses the messages."""
        chars = sum(len(m["content"]) for m in messages if isinstance(m.get("content"), str))
        if self._max_chars is not None and chars > self._max_chars:
            raise too_long(f"{chars} characters", self.max_model_len, "messages")
        if _is_short([value for message in messages for value in message.values()]):
            return self.tokenizer.encode_chat(messages, style)
        return await self._run(lambda: self.tokenizer.encode_chat(messages, style))

    async def spell(self, ids: Sequence[int]) -> str:
        """Text of `ids` with special tokens by their names."""
        return await self._run(lambda: self.tokenizer.spell(ids))

    async def pieces(self, ids: Sequence[int]) -> list[str]:
        """The vocabulary's own spelling of each token."""
        return await self._run(lambda: self.tokenizer.pieces(ids))

    async def check_grammar(self, grammar: str, param: str) -> None:
        """Raises InvalidRequest that blames `param` when this model cannot follow the grammar."""
        if self._grammars is None:
            raise InvalidRequest(f"{param}: structured output is not supported here", param=param)
        compiler = self._grammars
        try:
            await self._run(lambda: compiler.check(grammar))
        except InvalidRequest as error:
            raise InvalidRequest(f"{param}: {error.message}", param=param) from error

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def _run(self, work: Callable[[], T]) -> T:
        if self._waiting >= self._max_waiting:
            raise Overloaded("too many requests are being tokenized", retry_after_s=1.0)
        self._waiting += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._threads, work)
        finally:
            self._waiting -= 1


def _is_short(values: Iterable[object]) -> bool:
    """Whether all of `values` are texts that together take less time than going to a thread."""
    chars = 0
    for value in values:
        chars += len(value) + TEXT_CHARS if isinstance(value, str) else INLINE_CHARS
        if chars >= INLINE_CHARS:
            return False
    return True


def too_long(what: str, max_model_len: int, param: str) -> ContextLengthExceeded:
    return ContextLengthExceeded(
        f"this model's context is {max_model_len} tokens, and the prompt has {what}; shorten it", param=param
    )
