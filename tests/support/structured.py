"""Ten JSON schemas, one for each kind that a structured answer is asked in, bounded so that any model ends.

They stand in tests/data/schemas.json, where the Node client reads them too. Knows nothing of Galley but how
a schema becomes a grammar.
"""

import json
from pathlib import Path
from typing import Any, Final

from services.gateway.openai.structured import json_grammar

Schema = dict[str, Any]

SCHEMAS_FILE: Final = Path(__file__).resolve().parents[1] / "data" / "schemas.json"
SCHEMAS: Final[dict[str, Schema]] = json.loads(SCHEMAS_FILE.read_text(encoding="utf-8"))


def compact(schema: Schema) -> str:
    """The grammar that the gateway makes of a schema."""
    return json_grammar(json.dumps(schema))
