"""Grammars in tokens: what is refused, what masks allow, and that a state is a function of the output."""

import json
import resource
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher

from common.engine.grammar import MAX_CHARS, GrammarCompiler, fill
from common.engine.matchers import Matchers
from common.engine.runner import PlanRow
from common.errors import InvalidRequest
from common.ids import SequenceId
from common.messages.generation import SamplingParams
from tests.support.tiny_models import END_ID, SPECIAL, VOCAB, make_tokenizer

TOKENIZER = make_tokenizer()
LARGE = json.dumps({"type": "object", "properties": {f"p{number}": {} for number in range(5000)}})
WORD = LLMatcher.grammar_from_regex("ab+c?")


def ids(text: str) -> list[int]:
    found: list[int] = TOKENIZER.encode(text, add_special_tokens=False)
    return found


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tokenizer")
    TOKENIZER.save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def compiler(directory: Path) -> GrammarCompiler:
    return GrammarCompiler(directory, VOCAB, (END_ID,))


def peak_bytes() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024.0


def row(output: str, *, seq: int = 1, grammar: str = WORD, prompt: str = "say: ") -> PlanRow:
    tokens = ids(prompt + output)
    sampling = SamplingParams(max_tokens=20, seed=0, grammar=grammar)
    num_prompt = len(ids(prompt))
    return PlanRow(SequenceId(seq), tokens, 0, len(tokens), num_prompt, (), True, 0, sampling)


def allowed(bits: np.ndarray[tuple[int], np.dtype[np.int32]]) -> set[int]:
    return set(np.flatnonzero(np.unpackbits(bits.view(np.uint8), bitorder="little")).tolist())


@pytest.mark.parametrize(
    ("output", "text", "ends"),
    [("", "a", False), ("a", "b", False), ("ab", "bc", True), ("abb", "bc", True), ("abc", "", True)],
)
def test_a_mask_allows_what_the_expression_does_and_eos_where_it_may_end(
    compiler: GrammarCompiler, output: str, text: str, ends: bool
) -> None:
    masks, failed = Matchers(compiler).masks([row(output)])
    assert masks is not None
    assert not failed
    assert allowed(masks.bits[0]) == {*ids(text), *([END_ID] if ends else [])}


def test_rows_without_a_grammar_get_no_mask(compiler: GrammarCompiler) -> None:
    matchers = Matchers(compiler)
    assert matchers.masks([row("a", grammar="")]) == (None, {})
    masks, _ = matchers.masks([row("a", grammar=""), row("a", seq=2), row("", seq=3)])
    assert masks is not None
    assert masks.rows == (1, 2)


def test_a_state_kept_from_step_to_step_is_that_of_one_rebuilt(compiler: GrammarCompiler) -> None:
    kept = Matchers(compiler)
    for end in range(len("abbbc")):
        text = "abbbc"[:end]
        ours, _ = kept.masks([row(text)])
        fresh, _ = Matchers(compiler).masks([row(text)])
        assert ours is not None
        assert fresh is not None
        assert np.array_equal(ours.bits, fresh.bits)
        assert kept.advance(SequenceId(1), ids("abbbc"[end])[0]) is (end == 4)


def test_a_sequence_whose_tokens_do_not_extend_starts_anew(compiler: GrammarCompiler) -> None:
    matchers = Matchers(compiler)
    matchers.masks([row("abb")])
    masks, failed = matchers.masks([row("")])
    assert masks is not None
    assert not failed
    assert allowed(masks.bits[0]) == set(ids("a"))


def test_what_has_ended_is_forgotten_and_the_rest_is_bounded(compiler: GrammarCompiler) -> None:
    matchers = Matchers(compiler, max_live=3, max_grammars=2)
    matchers.masks([row("", seq=1), row("", seq=2)])
    matchers.forget([SequenceId(1), SequenceId(7)])
    assert matchers.num_live == 1
    for number in range(10):
        matchers.masks([row("", seq=number)])
    assert matchers.num_live == 3
    matchers.masks([row("", seq=number) for number in range(20, 25)])
    assert matchers.num_live == 5
    assert not matchers.advance(SequenceId(20), ids("a")[0])


def test_one_sequence_that_cannot_go_on_fails_alone(compiler: GrammarCompiler) -> None:
    matchers = Matchers(compiler)
    broken = row("", seq=3, grammar="{}")
    masks, failed = matchers.masks([row("a", seq=1), row("xyz", seq=2), broken])
    assert masks is not None
    assert allowed(masks.bits[0]) == set(ids("b"))
    assert set(failed) == {2, 3}
    assert all(isinstance(error, InvalidRequest) for error in failed.values())
    assert (masks.bits[1:] == -1).all()  # they are drawn with the others, so something must be allowed


@pytest.mark.parametrize(
    "grammar",
    [
        LLMatcher.grammar_from_json_schema('{"type": "foo"}'),
        LLMatcher.grammar_from_json_schema('{"uniqueItems": true}'),
        LLMatcher.grammar_from_json_schema('{"$ref": "#"}'),
        LLMatcher.grammar_from_json_schema(LARGE),
        LLMatcher.grammar_from_regex("(unclosed"),
        LLMatcher.grammar_from_regex("(?=look)around"),
        "",
        "nonsense",
        "x" * (MAX_CHARS + 1),
    ],
)
def test_what_is_no_grammar_or_too_long_is_refused_in_one_line(
    compiler: GrammarCompiler, grammar: str
) -> None:
    with pytest.raises(InvalidRequest) as refusal:
        compiler.check(grammar)
    assert refusal.value.message
    assert "\n" not in refusal.value.message


@pytest.mark.parametrize(
    "expression",
    [
        "(a{1,1000}){1,1000}",
        "(a{1000}){1000}",
        "(x|(a|b){1,100}{1,100}{1,100})",
        r"(\w{1,1000}){1,1000}",
        "a{1000000000}",
    ],
)
def test_an_expression_that_explodes_on_the_way_is_refused(
    compiler: GrammarCompiler, expression: str
) -> None:
    grammar = LLMatcher.grammar_from_regex(expression)
    before, begun = peak_bytes(), time.thread_time()
    with pytest.raises(InvalidRequest, match="too many"):
        compiler.check(grammar)
    assert time.thread_time() - begun < 2
    assert peak_bytes() - before < 100e6


@pytest.mark.parametrize("expression", ["a{1,100000}", ".{0,4000}", "[a-z]+( [a-z]+){0,20}", "(a*)*b", "a"])
def test_an_expression_that_only_looks_large_is_taken(compiler: GrammarCompiler, expression: str) -> None:
    compiler.check(LLMatcher.grammar_from_regex(expression))


def test_what_was_found_out_about_a_grammar_is_remembered(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    good, bad = (LLMatcher.grammar_from_regex(one) for one in ("remember", "(a{9999}){9999}"))
    compiler.check(good)
    with pytest.raises(InvalidRequest) as first:
        compiler.check(bad)
    monkeypatch.delattr(compiler.__class__, "compile")
    compiler.check(good)
    with pytest.raises(InvalidRequest) as again:
        compiler.check(bad)
    assert again.value.message == first.value.message


def test_without_a_tokenizer_every_grammar_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match=r"no tokenizer\.json"):
        GrammarCompiler(tmp_path, VOCAB, (END_ID,)).check(WORD)


@pytest.mark.parametrize("width", [VOCAB, 10, 1000])
def test_masks_fit_logits_of_any_width(directory: Path, width: int) -> None:
    compiler = GrammarCompiler(directory, width, (END_ID,))
    bits = np.empty(compiler.mask_words, np.int32)
    fill(compiler.compile(WORD), bits)
    assert len(bits) * 32 >= width
    assert allowed(bits) == set(ids("a"))


def test_special_tokens_are_never_text(compiler: GrammarCompiler) -> None:
    masks, _ = Matchers(compiler).masks([row("", grammar=LLMatcher.grammar_from_regex(r"[\s\S]+"))])
    assert masks is not None
    assert not allowed(masks.bits[0]) & set(range(len(SPECIAL)))


_KEYWORDS = (
    *("type", "properties", "items", "enum", "const", "anyOf", "oneOf", "$ref", "$defs", "required"),
    *("pattern", "minimum", "maxLength", "additionalProperties", "x-guidance", "a"),
)
_JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 3) | st.sampled_from(["string", "object", "a", "^a*$", "#"]),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(_KEYWORDS), inner, max_size=4)
    ),
    max_leaves=12,
)


@settings(max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(schema=st.dictionaries(st.sampled_from(["type", "items", "anyOf", "properties", "$ref"]), _JSON))
def test_no_schema_does_worse_than_being_refused(compiler: GrammarCompiler, schema: object) -> None:
    grammar = json.dumps({"grammars": [{"json_schema": schema}]})
    try:
        compiler.check(grammar)
    except InvalidRequest:
        event("refused")
