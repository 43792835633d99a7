"""JSON logs on stdout, one object a line, for our own events and for the libraries' alike.

Context bound with `structlog.contextvars` (the request id above all) is on every line of its task. Knows
nothing of who reads the lines.
"""

import logging
import sys
import warnings
from collections.abc import Mapping
from typing import Any, Literal

import orjson
import structlog

Level = Literal["debug", "info", "warning", "error"]


def configure_logging(level: Level, instance: str, role: str) -> None:
    """Send structlog, the standard library's logging and warnings to stdout as JSON lines."""

    def add_identity(_logger: object, _method: str, event: structlog.typing.EventDict) -> Mapping[str, Any]:
        event["instance"] = instance
        event["role"] = role
        return event

    shared: list[structlog.typing.Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True, key="time"),
        add_identity,
    ]
    render: list[structlog.typing.Processor] = [
        structlog.processors.format_exc_info,
        structlog.processors.JSONRenderer(serializer=_json),
    ]
    number = logging.getLevelNamesMapping()[level.upper()]
    structlog.configure(
        processors=[*shared, *render],
        wrapper_class=structlog.make_filtering_bound_logger(number),
        logger_factory=structlog.PrintLoggerFactory(sys.stdout),
        cache_logger_on_first_use=True,
    )
    formatter = structlog.stdlib.ProcessorFormatter(
        foreign_pre_chain=[*shared, structlog.stdlib.add_logger_name],
        processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *render],
    )
    handler = logging.StreamHandler(sys.stdout)
    handler.setFormatter(formatter)
    logging.basicConfig(level=max(number, logging.WARNING), handlers=[handler], force=True)
    logging.captureWarnings(True)
    warnings.simplefilter("default")


def _json(event: object, **_: object) -> str:
    return orjson.dumps(event, default=repr, option=orjson.OPT_NON_STR_KEYS).decode()
