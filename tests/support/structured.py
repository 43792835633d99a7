"""Ten JSON schemas, one for each kind that a structured answer is asked in, bounded so that any model ends.

Knows nothing of Galley but how a schema becomes a grammar.
"""

import json
from typing import Any, Final

from services.gateway.openai.structured import json_grammar

Schema = dict[str, Any]


def _object(**properties: Schema) -> Schema:
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


_NAME: Final[Schema] = {"type": "string", "minLength": 1, "maxLength": 12}
_YEAR: Final[Schema] = {"type": "integer", "minimum": 1900, "maximum": 2100}

SCHEMAS: Final[dict[str, Schema]] = {
    "object": _object(name=_NAME, done={"type": "boolean"}),
    "nested": _object(person=_object(name=_NAME, born=_object(year=_YEAR)), note={"type": "null"}),
    "array": {"type": "array", "items": _NAME, "minItems": 3, "maxItems": 5},
    "enum": _object(color={"enum": ["red", "green", "blue", None, 7]}),
    "const": {"const": {"kind": "fixed", "of": [1, "two"]}},
    "range": _object(score={"type": "integer", "minimum": -5, "maximum": 42}),
    "pattern": _object(code={"type": "string", "pattern": "^[A-Z]{2}-[0-9]{3}$"}),
    "anyOf": {
        "anyOf": [
            _object(city=_NAME),
            _object(lat=_YEAR, lon={"type": "integer", "minimum": 0, "maximum": 9}),
        ]
    },
    "$ref": {
        "$defs": {"point": _object(x=_YEAR, y=_YEAR)},
        **_object(start={"$ref": "#/$defs/point"}, end={"$ref": "#/$defs/point"}),
    },
    "unicode": _object(**{"città 👩‍👩‍👧": _NAME, "이름": {"enum": ["삼겹살", "김치"]}}),
}


def compact(schema: Schema) -> str:
    """The grammar that the gateway makes of a schema."""
    return json_grammar(json.dumps(schema))
