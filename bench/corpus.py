"""Text that every machine has: the docstrings of Python's standard library, in a fixed order.

The same Python gives the same text. Knows nothing of tokens.
"""

import ast
import sysconfig
from collections.abc import Iterator
from pathlib import Path

SHORTEST = 200
"""Characters; shorter ones are mostly names and say little."""


def standard_library_docstrings() -> Iterator[str]:
    """Docstrings of modules, classes and functions, file by file in alphabetical order."""
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        yield from docstrings(path.read_text(encoding="utf-8", errors="replace"))


def docstrings(source: str) -> Iterator[str]:
    """The longer docstrings of one module, cleaned of their indentation, in order of their lines."""
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    found = [
        (getattr(node, "lineno", 0), text)
        for node in ast.walk(ast.parse(source))
        if isinstance(node, documented) and (text := ast.get_docstring(node)) and len(text) >= SHORTEST
    ]
    yield from (text for _, text in sorted(found))
