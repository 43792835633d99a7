"""Messages to bytes and back: JSON by orjson, one `kind` per message, unknown fields ignored.

Every message class has a KIND; decoding names the classes that are expected, and anything else is a
MessageInvalid, never a half-built object. Encoders and decoders are made once per class from its type
hints. A field that has its default does not travel: a frame has one item per token, and most of an item's
fields are such. Knows nothing of subjects and transports.
"""

import types
from collections.abc import Callable
from dataclasses import MISSING, fields, is_dataclass
from functools import cache
from typing import Any, Literal, NewType, TypeVar, Union, get_args, get_origin, get_type_hints

import orjson

from common.errors import MessageInvalid

Decoder = Callable[[Any], Any]
T = TypeVar("T")


def encode(message: object) -> bytes:
    """One message as JSON, its class named by the `kind` field."""
    return orjson.dumps(message, default=_plain, option=orjson.OPT_PASSTHROUGH_DATACLASS)


def decode(data: bytes, *expected: type[T]) -> T:
    """Bytes to one of the `expected` message classes. Raises MessageInvalid for anything else."""
    try:
        raw = orjson.loads(data)
    except orjson.JSONDecodeError as error:
        raise MessageInvalid(f"not JSON: {error}") from error
    message: T = _tagged(expected)(raw)
    return message


def _plain(value: object) -> object:
    if isinstance(value, tuple):
        return list(value)  # a NamedTuple travels as an array
    if not is_dataclass(value) or isinstance(value, type):
        raise TypeError(f"{type(value).__name__} is not a message")
    kind, slots = _shape(type(value))
    body = {}
    for name, default in slots:
        if (field := getattr(value, name)) is not default:
            body[name] = field
    if kind:
        body["kind"] = kind
    return body


@cache
def _shape(cls: type) -> tuple[str | None, tuple[tuple[str, object], ...]]:
    """KIND, and the name and default (MISSING if it has none) of each field."""
    return getattr(cls, "KIND", None), tuple((f.name, f.default) for f in fields(cls))


def _tagged(classes: tuple[type, ...]) -> Decoder:
    decoders = {cls.KIND: _dataclass(cls) for cls in classes}  # type: ignore[attr-defined]

    def by_kind(raw: Any) -> Any:
        kind = raw.get("kind") if isinstance(raw, dict) else None
        decoder = decoders.get(kind) if isinstance(kind, str) else None
        if decoder is None:
            raise MessageInvalid(f"expected a message of kind {sorted(decoders)}, got {kind!r}")
        return decoder(raw)

    return by_kind


@cache
def _dataclass(cls: type) -> Decoder:
    hints = get_type_hints(cls)
    slots = [
        (f.name, f.default is MISSING and f.default_factory is MISSING, _decoder(hints[f.name]))
        for f in fields(cls)
    ]

    def build(raw: Any) -> Any:
        if not isinstance(raw, dict):
            raise MessageInvalid(f"{cls.__name__} must be an object, got {type(raw).__name__}")
        values = {}
        for name, required, decoder in slots:
            if name in raw:
                try:
                    values[name] = decoder(raw[name])
                except MessageInvalid as error:
                    raise MessageInvalid(f"{cls.__name__}.{name}: {error.message}") from None
            elif required:
                raise MessageInvalid(f"{cls.__name__}.{name} is missing")
        return cls(**values)

    return build


@cache
def _decoder(hint: Any) -> Decoder:
    if isinstance(hint, NewType):
        return _decoder(hint.__supertype__)
    origin, args = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return _union(args)
    if origin is Literal:
        return _literal(args)
    if origin is tuple:
        if len(args) == 2 and args[1] is Ellipsis:
            return _sequence(args[0])
        return _record(tuple, args)
    if isinstance(hint, type) and issubclass(hint, tuple) and hasattr(hint, "_fields"):
        hints = get_type_hints(hint)
        members = tuple(hints[name] for name in hint._fields)
        return _record(hint._make, members)  # type: ignore[attr-defined]
    if is_dataclass(hint) and isinstance(hint, type):
        return _tagged((hint,)) if hasattr(hint, "KIND") else _dataclass(hint)
    if hint in (int, str, bool, float):
        return _scalar(hint)
    raise TypeError(f"messages cannot hold {hint!r}")


def _scalar(cls: type) -> Decoder:
    accepted = (int, float) if cls is float else (cls,)

    def check(raw: Any) -> Any:
        if type(raw) not in accepted:  # JSON knows no subclasses, and a bool is no int here
            raise MessageInvalid(f"expected {cls.__name__}, got {type(raw).__name__}")
        return raw

    return check


def _literal(allowed: tuple[Any, ...]) -> Decoder:
    def check(raw: Any) -> Any:
        if raw not in allowed:
            raise MessageInvalid(f"expected one of {allowed}, got {raw!r}")
        return raw

    return check


def _sequence(hint: Any) -> Decoder:
    item, plain = _decoder(hint), {_plain_type(hint)}

    def build(raw: Any) -> Any:
        if not isinstance(raw, list):
            raise MessageInvalid(f"expected an array, got {type(raw).__name__}")
        return tuple(raw) if plain.issuperset(map(type, raw)) else tuple(map(item, raw))

    return build


def _record(make: Callable[[Any], Any], hints: tuple[Any, ...]) -> Decoder:
    members, plain = [_decoder(hint) for hint in hints], [_plain_type(hint) for hint in hints]

    def build(raw: Any) -> Any:
        if not isinstance(raw, list) or len(raw) != len(members):
            raise MessageInvalid(f"expected an array of {len(members)}")
        if [*map(type, raw)] == plain:
            return make(raw)
        return make([decoder(value) for decoder, value in zip(members, raw, strict=True)])

    return build


def _plain_type(hint: Any) -> Any:
    """The type of JSON values that need no decoding but a look at their type; the hint itself if none is."""
    return _plain_type(hint.__supertype__) if isinstance(hint, NewType) else hint


def _union(args: tuple[Any, ...]) -> Decoder:
    optional = type(None) in args
    rest = tuple(a for a in args if a is not type(None))
    inner = _decoder(rest[0]) if len(rest) == 1 else _tagged(rest)
    if not optional:
        return inner
    return lambda raw: None if raw is None else inner(raw)
