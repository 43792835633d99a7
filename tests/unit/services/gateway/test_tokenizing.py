"""The model's own tokenizer and chat template, and the errors they end in."""

from pathlib import Path
from threading import get_ident

import pytest
from tokenizers.processors import TemplateProcessing

from common.errors import ConfigError, ContextLengthExceeded, InvalidRequest
from services.gateway.token_bytes import token_bytes
from services.gateway.tokenizing import (
    INLINE_CHARS,
    NEXT_MESSAGE,
    ChatMessages,
    ChatStyle,
    ModelTokenizer,
    TokenizerPool,
)
from tests.support.tiny_models import make_tokenizer

STRICT = (
    "{% if messages[0]['role'] != 'user' %}{{ raise_exception('the first message must be the user\\'s') }}"
    "{% endif %}{{ messages[0]['content'] }}"
)


class ThreadNoting(ModelTokenizer):
    """Knows in which threads it worked."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.threads: list[int] = []

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        self.threads.append(get_ident())
        return super().encode(text, add_special_tokens=add_special_tokens)

    def encode_chat(self, messages: ChatMessages, style: ChatStyle = NEXT_MESSAGE) -> list[int]:
        self.threads.append(get_ident())
        return super().encode_chat(messages, style)


def directory(path: Path, template: str | None = None) -> Path:
    tokenizer = make_tokenizer()
    tokenizer.chat_template = template if template is not None else tokenizer.chat_template
    tokenizer.save_pretrained(path)
    return path


def test_text_there_and_back(tmp_path: Path) -> None:
    tokenizer = ModelTokenizer(directory(tmp_path))
    ids = tokenizer.encode("déjà 😀")
    assert len(ids) == len("déjà 😀".encode())
    assert tokenizer.decode([*ids, 2]) == "déjà 😀"
    assert tokenizer.special_ids == {0, 1, 2}
    assert b"".join(map(tokenizer.bytes_of, ids)).decode() == "déjà 😀"
    assert tokenizer.bytes_of(2) == b"<|end|>"
    assert tokenizer.bytes_of(5000) == b""


def test_the_chat_template_ends_with_the_assistants_turn(tmp_path: Path) -> None:
    tokenizer = ModelTokenizer(directory(tmp_path))
    ids = tokenizer.encode_chat([{"role": "user", "content": "Hi<|end|>"}])
    assert "".join(tokenizer.bytes_of(token).decode() for token in ids) == (
        "<|start|>user\nHi<|end|><|end|>\n<|start|>assistant\n"
    )


def test_special_tokens_are_added_to_a_text_and_not_to_a_template_unless_asked(tmp_path: Path) -> None:
    made = make_tokenizer()
    beginning = TemplateProcessing(single="<|start|> $A", special_tokens=[("<|start|>", 1)])
    made.backend_tokenizer.post_processor = beginning
    made.save_pretrained(tmp_path)
    tokenizer = ModelTokenizer(tmp_path)
    hi = tokenizer.encode("Hi", add_special_tokens=False)
    assert tokenizer.encode("Hi") == [1, *hi]
    messages = [{"role": "user", "content": "Hi"}]
    chat = tokenizer.encode_chat(messages)
    assert tokenizer.encode_chat(messages, ChatStyle(add_special_tokens=True)) == [1, *chat]
    assert tokenizer.spell(chat).count("<|start|>") == 2


@pytest.mark.parametrize(
    ("template", "message"),
    [(STRICT, "the first message must be the user's"), ("", "no chat template")],
)
def test_what_the_template_refuses_is_the_clients_error(tmp_path: Path, template: str, message: str) -> None:
    tokenizer = ModelTokenizer(directory(tmp_path, template))
    with pytest.raises(InvalidRequest, match=message) as caught:
        tokenizer.encode_chat([{"role": "assistant", "content": "x"}])
    assert caught.value.param == "messages"


def test_a_directory_without_a_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(ConfigError):
        ModelTokenizer(tmp_path)


async def test_a_text_that_cannot_fit_is_refused_before_it_is_tokenized(tmp_path: Path) -> None:
    pool = TokenizerPool(ModelTokenizer(directory(tmp_path)), max_model_len=10)
    assert await pool.encode(["ab", "c"]) == [pool.tokenizer.encode("ab"), pool.tokenizer.encode("c")]
    with pytest.raises(ContextLengthExceeded, match="1000000 characters"):
        await pool.encode(["x" * 1_000_000])
    with pytest.raises(ContextLengthExceeded):
        await pool.encode_chat([{"role": "user", "content": "x" * 1_000_000}])
    pool.close()


@pytest.mark.parametrize(
    ("texts", "inline"),
    [
        (["short"], True),
        (["a", "b"], True),
        (["x" * INLINE_CHARS], False),
        (["x"] * 100, False),  # each costs something
    ],
)
async def test_only_short_texts_are_tokenized_on_the_event_loop(
    tmp_path: Path, texts: list[str], inline: bool
) -> None:
    tokenizer = ThreadNoting(directory(tmp_path))
    pool = TokenizerPool(tokenizer, max_model_len=10_000)
    assert await pool.encode(texts) == [tokenizer.encode(text) for text in texts]
    assert (tokenizer.threads[0] == get_ident()) is inline
    messages = [{"role": "user", "content": text} for text in texts]
    tokenizer.threads.clear()
    assert await pool.encode_chat(messages) == tokenizer.encode_chat(messages)
    assert (tokenizer.threads[0] == get_ident()) is inline
    pool.close()


async def test_a_message_with_other_things_than_texts_goes_to_a_thread(tmp_path: Path) -> None:
    tokenizer = ThreadNoting(directory(tmp_path))
    pool = TokenizerPool(tokenizer, max_model_len=10_000)
    await pool.encode_chat([{"role": "user", "content": "x", "calls": [{"name": "y"}]}])
    assert get_ident() not in tokenizer.threads
    pool.close()


def test_a_token_alone_reads_the_same_every_time(tmp_path: Path) -> None:
    tokenizer = ModelTokenizer(directory(tmp_path))
    [letter] = tokenizer.encode("q")
    assert [tokenizer.decode([letter]) for _ in range(3)] == ["q"] * 3
    assert [tokenizer.decode([2]) for _ in range(2)] == ["", ""]
    assert tokenizer.decode([letter, letter]) == "qq"


def test_both_spellings_of_bytes() -> None:
    assert token_bytes("Ġé", byte_level=True) == b" \xe9"
    assert token_bytes("▁é", byte_level=False) == " é".encode()
    assert token_bytes("<0xE9>", byte_level=False) == b"\xe9"
