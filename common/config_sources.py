"""Reads settings from a command line and a TOML file, and explains what is wrong with them.

Works on any pydantic-settings class; knows no setting by name and reads no environment (config.py does).
Keys of nested tables are written with dots: `ucx.tls`.
"""

import argparse
import difflib
import tomllib
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn, get_args, get_origin

from pydantic import BaseModel, SecretStr, ValidationError
from pydantic.fields import FieldInfo

from common.errors import ConfigError

Values = dict[str, Any]
"""Raw values by key, nested tables as dicts: what pydantic is about to validate."""


def keys_of(cls: type[BaseModel], prefix: str = "") -> dict[str, FieldInfo]:
    """Every key that `cls` has, nested ones with dots, in order of definition."""
    keys: dict[str, FieldInfo] = {}
    for name, field in cls.model_fields.items():
        nested = field.annotation
        if isinstance(nested, type) and issubclass(nested, BaseModel):
            keys.update(keys_of(nested, f"{prefix}{name}."))
        else:
            keys[prefix + name] = field
    return keys


def merge(low: Values, high: Values) -> Values:
    """`low` with everything that `high` sets, table by table."""
    merged = dict(low)
    for key, value in high.items():
        below = merged.get(key)
        merged[key] = merge(below, value) if isinstance(below, dict) and isinstance(value, dict) else value
    return merged


def unknown_key(what: str, key: str, allowed: Iterable[str]) -> ConfigError:
    """The error for a key that nobody has, with the nearest ones that exist."""
    names = sorted(allowed)
    near = difflib.get_close_matches(key, names, n=3, cutoff=0.5)
    hint = f"did you mean {' or '.join(near)}?" if near else f"known keys: {', '.join(names)}"
    return ConfigError(f"unknown key {what}; {hint}", param=key)


# --- command line --------------------------------------------------------------------------------


class _Parser(argparse.ArgumentParser):
    """Raises ConfigError where argparse would print its usage and exit."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(message)


def parse_arguments(cls: type[BaseModel], role: str, argv: Sequence[str]) -> tuple[Values, Path | None]:
    """What `argv` sets, and the file that `--config` names.

    `--some-key` and `--some_key` are the same. Raises ConfigError; `--help` prints and exits.
    """
    fields = keys_of(cls)
    parser = _Parser(
        prog=f"python -m services.{role}",
        usage="%(prog)s [--config FILE] [--KEY VALUE ...]",
        description=f"Galley's {role}. A key is taken from here, else GALLEY_KEY (GALLEY_UCX__TLS), or FILE.",
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
    )
    parser.add_argument("--config", metavar="FILE", default=None, help="TOML file with settings")
    for key, field in fields.items():
        _add_argument(parser, key, field)
    namespace, rest = parser.parse_known_args([_dashed(word) for word in argv])
    if rest:
        name = rest[0].partition("=")[0]
        if not rest[0].startswith("--"):
            raise ConfigError(f"{rest[0]!r} is not understood; settings are given as --key value")
        raise unknown_key(name, name, map(option_of, ["config", *fields]))
    values: Values = {}
    for key, value in vars(namespace).items():
        if key != "config":
            _put(values, key, value)
    return values, Path(namespace.config) if namespace.config else None


def option_of(key: str) -> str:
    """How `key` is written on a command line: `--num-blocks`."""
    return "--" + key.replace("_", "-")


def _dashed(word: str) -> str:
    name, equals, value = word.partition("=")
    return name.replace("_", "-") + equals + value if word.startswith("--") else word


def _add_argument(parser: argparse.ArgumentParser, key: str, field: FieldInfo) -> None:
    about = (field.description or "").replace("%", "%%")
    if field.annotation is SecretStr:
        parser.epilog = f"{parser.epilog or ''}{key}: {about}. "
        return
    default = field.get_default(call_default_factory=True, validated_data={})
    shown = "" if default in (None, "") else f" (default {default})"
    switch = field.annotation is bool
    parser.add_argument(
        option_of(key),
        dest=key,
        metavar=_metavar(field.annotation),
        nargs="?" if switch else None,
        const="true" if switch else None,
        help=about + shown,
    )


def _metavar(annotation: Any) -> str:
    if get_origin(annotation) is Literal:
        return "|".join(str(choice) for choice in get_args(annotation) if choice)
    if get_origin(annotation) is Annotated:
        return _metavar(get_args(annotation)[0])
    if isinstance(annotation, type):
        return {int: "N", float: "X", bool: "true|false", Path: "PATH"}.get(annotation, "TEXT")
    return _metavar(next(kind for kind in get_args(annotation) if kind is not type(None)))


def _put(values: Values, key: str, value: Any) -> None:
    *tables, last = key.split(".")
    for table in tables:
        values = values.setdefault(table, {})
    values[last] = value


# --- environment and file ------------------------------------------------------------------------


def check_environment(environment: Mapping[str, str], prefix: str, known: frozenset[str]) -> None:
    """Raises ConfigError for a variable with our prefix that no service reads."""
    variables = {prefix + key.upper().replace(".", "__"): key for key in known}
    for name in environment:
        if name.upper() not in variables:
            raise unknown_key(f"{name} in the environment", name, variables)


def read_file(
    cls: type[BaseModel], file: Path, role: str, roles: frozenset[str], known: frozenset[str]
) -> Values:
    """What `file` sets for `role`. Raises ConfigError for an unreadable file and for keys of no service."""
    try:
        content = tomllib.loads(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"cannot read {file}: {error}", param="config") from error
    tables = {name: content.pop(name) for name in sorted(roles) if isinstance(content.get(name), dict)}
    own = frozenset(keys_of(cls))
    _check_file_keys(content, file, known, roles)
    for name, table in tables.items():
        _check_file_keys(table, file, own if name == role else known, frozenset())
    return merge(_only(content, own), tables.get(role, {}))


def _flat(values: Values, whole: Collection[str], prefix: str = "") -> dict[str, Any]:
    """Nested tables by their dotted keys, but for the keys in `whole`, whose value is a table itself."""
    flat: dict[str, Any] = {}
    for name, value in values.items():
        key = prefix + name
        nested = isinstance(value, dict) and key not in whole
        flat.update(_flat(value, whole, f"{key}.") if nested else {key: value})
    return flat


def _check_file_keys(values: Values, file: Path, known: frozenset[str], roles: frozenset[str]) -> None:
    for key in _flat(values, known):
        if key not in known:
            raise unknown_key(f"{key} in {file}", key, known | roles)


def _only(values: Values, own: frozenset[str]) -> Values:
    kept: Values = {}
    for key, value in _flat(values, own).items():
        if key in own:
            _put(kept, key, value)
    return kept


# --- explaining ----------------------------------------------------------------------------------


def explain(
    cls: type[BaseModel], error: ValidationError, origins: Sequence[tuple[str, Values]]
) -> ConfigError:
    """One line for all that pydantic found: where each value was set, what it was, what is allowed.

    `origins` are the sources, strongest first, each with the prefix that its keys are written with.
    """
    fields = keys_of(cls)
    parts, first = [], ""
    for problem in error.errors(include_url=False, include_context=False):
        key = _key_at(problem["loc"], fields)
        first = first or key
        rule = problem["msg"].removeprefix("Value error, ").replace("Input should be", "must be")
        if not key:
            parts.append(rule)
            continue
        shown = "" if fields[key].annotation is SecretStr else f" = {problem['input']!r}"
        parts.append(f"{_spelled(key, origins)}{shown}: {rule}")
    return ConfigError("; ".join(parts), param=first or None)


def _spelled(key: str, origins: Sequence[tuple[str, Values]]) -> str:
    for prefix, values in origins:
        if key in _flat(values, {key}):
            if prefix == "--":
                return option_of(key)
            return prefix + key.upper().replace(".", "__") if prefix.endswith("_") else prefix + key
    return key


def _key_at(location: tuple[int | str, ...], fields: Mapping[str, FieldInfo]) -> str:
    """The key that pydantic's location is in: a union or a list item lies deeper than its key."""
    paths = (".".join(map(str, location[:depth])) for depth in range(len(location), 0, -1))
    return next((path for path in paths if path in fields), "")
