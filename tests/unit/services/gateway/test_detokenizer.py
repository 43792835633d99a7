"""Pieces of text add up to the whole decoding, whatever the tokens are and however they are grouped."""

from collections.abc import Callable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models

from services.gateway.text import Detokenizer
from tests.support.tiny_models import make_tokenizer

BYTES = make_tokenizer()
SPECIAL = frozenset(BYTES.all_special_ids)

FAMILY = "삼겹살 👩‍👩‍👧 déjà vu\n日本語"


def sentencepiece() -> Tokenizer:
    """A vocabulary as Llama spells it: "▁" for a space, <0xE4> for bytes that no other piece has."""
    pieces = ["<unk>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "▁a", "b", "▁the", "é", "c"]
    tokenizer = Tokenizer(
        models.BPE(
            vocab={p: i for i, p in enumerate(pieces)}, merges=[], unk_token="<unk>", byte_fallback=True
        )
    )
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(["</s>"])
    return tokenizer


def decoder_of(tokenizer: Tokenizer) -> Callable[[Sequence[int]], str]:
    return lambda ids: str(tokenizer.decode(list(ids), skip_special_tokens=True))


byte_decode = decoder_of(BYTES.backend_tokenizer)


def pieces_of(detokenizer: Detokenizer, ids: Sequence[int]) -> list[str]:
    return [*(detokenizer.push(token) for token in ids), detokenizer.flush()]


def test_characters_of_many_bytes_are_never_split() -> None:
    ids = BYTES.encode(FAMILY, add_special_tokens=False)
    pieces = pieces_of(Detokenizer(byte_decode, SPECIAL), ids)
    assert "".join(pieces) == FAMILY
    assert not any("\ufffd" in piece for piece in pieces)
    assert len(ids) > len(FAMILY)  # or nothing was there to be split


@given(st.lists(st.integers(min_value=0, max_value=330), max_size=60))
def test_any_tokens_at_all(ids: list[int]) -> None:
    """Broken bytes, special tokens and ids that the tokenizer does not know included."""
    pieces = pieces_of(Detokenizer(byte_decode, SPECIAL), ids)
    assert "".join(pieces) == BYTES.decode(ids, skip_special_tokens=True)


@given(st.text(max_size=30))
def test_any_text(text: str) -> None:
    ids = BYTES.encode(text, add_special_tokens=False)
    pieces = pieces_of(Detokenizer(byte_decode, SPECIAL), ids)
    assert "".join(pieces) == text
    for piece in pieces:
        piece.encode()


def test_a_special_token_inside_a_character() -> None:
    ids = BYTES.encode("日", add_special_tokens=False)
    pieces = pieces_of(Detokenizer(byte_decode, SPECIAL), [ids[0], 2, *ids[1:]])
    assert "".join(pieces) == "日"


def test_a_long_run_without_a_character_is_let_out() -> None:
    broken = BYTES.encode("日", add_special_tokens=False)[:1] * 200
    detokenizer = Detokenizer(byte_decode, SPECIAL)
    early = "".join(detokenizer.push(token) for token in broken)
    assert len(early) > 100
    assert early + detokenizer.flush() == byte_decode(broken)


SP = sentencepiece()
VOCAB = SP.get_vocab()
WORDS = [VOCAB[piece] for piece in ("▁", "▁a", "b", "▁the", "é", "c")]
EMOJI = [VOCAB[f"<0x{byte:02X}>"] for byte in "😀".encode()]


@given(st.lists(st.sampled_from([*([word] for word in WORDS), EMOJI, [1]]), max_size=30))
def test_the_sentencepiece_kind(groups: list[list[int]]) -> None:
    ids = [token for group in groups for token in group]
    decode = decoder_of(SP)
    assert "".join(pieces_of(Detokenizer(decode, frozenset({1})), ids)) == decode(ids)


@pytest.mark.parametrize("gap", [[1], [1, 1], [9999]])
def test_spaces_survive_what_shows_no_text(gap: list[int]) -> None:
    """A word's leading space must not be taken for the text's first one."""
    decode = decoder_of(SP)
    the = VOCAB["▁the"]
    assert "".join(pieces_of(Detokenizer(decode, frozenset({1})), [the, *gap, the])) == "the the"
