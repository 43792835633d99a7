"""From fields of a request to a grammar: what is taken, what is refused and which field is blamed."""

import asyncio
import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher

from common.engine.grammar import GrammarCompiler
from common.errors import InvalidRequest
from services.gateway.openai.base import parse_body
from services.gateway.openai.chat import ChatRequest
from services.gateway.openai.structured import choice_grammar
from services.gateway.tokenizing import ModelTokenizer, TokenizerPool
from tests.support.structured import SCHEMAS
from tests.support.tiny_models import END_ID, VOCAB, make_tokenizer

TOKENIZER = make_tokenizer()


@pytest.fixture(scope="module")
def compiler(tmp_path_factory: pytest.TempPathFactory) -> GrammarCompiler:
    directory = tmp_path_factory.mktemp("tokenizer")
    TOKENIZER.save_pretrained(directory)
    return GrammarCompiler(directory, VOCAB, (END_ID,))


def ask(**fields: Any) -> ChatRequest:
    body = {"model": "m", "messages": [{"role": "user", "content": "hi"}], **fields}
    request = parse_body(json.dumps(body).encode(), ChatRequest)
    request.check(VOCAB)
    return request


def grammar_of(**fields: Any) -> str:
    return ask(**fields).sampling(10, lambda: 1).grammar


def schema_format(schema: object) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, "strict": True}}


def follows(compiler: GrammarCompiler, grammar: str, text: str) -> bool:
    """Whether the whole text may be said, and may end there."""
    matcher = compiler.compile(grammar)
    ids = TOKENIZER.encode(text, add_special_tokens=False)
    return bool(matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting())


@pytest.mark.parametrize("fields", [{}, {"response_format": None}, {"response_format": {"type": "text"}}])
def test_free_text_has_no_grammar(fields: dict[str, Any]) -> None:
    assert grammar_of(**fields) == ""


def test_json_comes_on_one_line(compiler: GrammarCompiler) -> None:
    grammar = grammar_of(response_format={"type": "json_object"})
    assert follows(compiler, grammar, '{"a": [1, 2], "b":{"c":null}}')
    assert not follows(compiler, grammar, '{"a":  1}')
    assert not follows(compiler, grammar, '{\n"a": 1}')
    assert not follows(compiler, grammar, "[1]")


def test_a_schema_s_own_x_guidance_decides_on_whitespace(compiler: GrammarCompiler) -> None:
    schema = SCHEMAS["object"] | {"x-guidance": {"whitespace_flexible": True}}
    assert follows(
        compiler, grammar_of(response_format=schema_format(schema)), '{ "name":"a",\n "done":true }'
    )


@pytest.mark.parametrize("name", SCHEMAS)
def test_schemas_are_followed(compiler: GrammarCompiler, name: str) -> None:
    grammar = grammar_of(response_format=schema_format(SCHEMAS[name]))
    compiler.check(grammar)
    assert not follows(compiler, grammar, "1.5")


def test_properties_come_in_the_order_of_the_schema(compiler: GrammarCompiler) -> None:
    grammar = grammar_of(response_format=schema_format(SCHEMAS["object"]))
    assert follows(compiler, grammar, '{"name": "a", "done": true}')
    assert not follows(compiler, grammar, '{"done": true, "name": "a"}')


@settings(max_examples=100, deadline=None)
@given(
    choices=st.lists(st.text(st.characters(codec="utf-8"), min_size=1, max_size=8), min_size=1, max_size=4)
)
def test_choices_are_taken_to_the_letter(compiler: GrammarCompiler, choices: list[str]) -> None:
    grammar = choice_grammar(choices)
    assert all(follows(compiler, grammar, choice) for choice in choices)
    assert follows(compiler, grammar, choices[0] + "!") == (choices[0] + "!" in choices)


@pytest.mark.parametrize("fields", [{"guided_regex": "a/b|c+"}, {"structured_outputs": {"regex": "a/b|c+"}}])
def test_expressions_cover_the_whole_output(compiler: GrammarCompiler, fields: dict[str, Any]) -> None:
    for text in ("a/b", "c", "ccc", "a/bc", "", "xc"):
        expected = re.fullmatch("a/b|c+", text) is not None
        assert follows(compiler, grammar_of(**fields), text) == expected, text


def test_both_spellings_of_choices_are_one(compiler: GrammarCompiler) -> None:
    assert grammar_of(guided_choice=["a", "b"]) == grammar_of(structured_outputs={"choice": ["a", "b"]})


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": {}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}},
            "response_format.json_schema.schema",
        ),
        ({"response_format": schema_format(True)}, "response_format.json_schema.schema"),
        ({"response_format": {"type": "text", "json_schema": {"schema": {}}}}, "response_format.json_schema"),
        ({"response_format": {"type": "text", "odd": 1}}, "response_format.odd"),
        ({"guided_choice": []}, "guided_choice"),
        ({"guided_choice": ["a", ""]}, "guided_choice"),
        ({"guided_choice": "a"}, "guided_choice"),
        ({"guided_regex": ""}, "guided_regex"),
        ({"structured_outputs": {"choice": [1]}}, "structured_outputs.choice"),
        ({"structured_outputs": {"json": {}}}, "structured_outputs.json"),
        ({"guided_regex": "a", "guided_choice": ["a"]}, "guided_regex"),
        ({"guided_regex": "a", "response_format": {"type": "json_object"}}, "guided_regex"),
    ],
)
def test_half_asked_and_doubly_asked_is_refused(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as refusal:
        ask(**fields)
    assert refusal.value.param == param


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": schema_format({"type": "foo"})}, "response_format.json_schema.schema"),
        ({"response_format": schema_format({"not": {}})}, "response_format.json_schema.schema"),
        ({"structured_outputs": {"regex": "("}}, "structured_outputs.regex"),
        ({"guided_regex": "(?!a)b"}, "guided_regex"),
        ({"guided_regex": "(a{1,1000}){1,1000}"}, "guided_regex"),
        (
            {"response_format": schema_format({"type": "string", "pattern": "^(a{1,1000}){1,1000}$"})},
            "response_format.json_schema.schema",
        ),
    ],
)
async def test_what_no_model_can_follow_is_refused_by_name(
    compiler: GrammarCompiler, tmp_path: Path, fields: dict[str, Any], param: str
) -> None:
    TOKENIZER.save_pretrained(tmp_path)
    pool = TokenizerPool(ModelTokenizer(tmp_path), 100, grammars=compiler)
    constraint = ask(**fields).constraint
    assert constraint is not None
    with pytest.raises(InvalidRequest, match=re.escape(param)) as refusal:
        await pool.check_grammar(constraint.grammar, constraint.param)
    assert refusal.value.param == param
    await pool.check_grammar(LLMatcher.grammar_from_regex("fine"), param)
    pool.close()
    await asyncio.sleep(0)
