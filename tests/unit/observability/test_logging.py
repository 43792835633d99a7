"""Every line on stdout is one JSON object, whoever wrote it."""

import json
import logging
import subprocess
import sys

SCRIPT = """
import logging, warnings
import structlog
from common.observability.logging import configure_logging

configure_logging("info", "decode-0", "decode")
log = structlog.get_logger()
with structlog.contextvars.bound_contextvars(request_id="r1"):
    log.info("step", tokens={1: 2}, ids=frozenset([3]))
    logging.getLogger("nats").warning("slow %s", "consumer")
log.debug("too quiet")
warnings.warn("old", DeprecationWarning)
try:
    raise ValueError("wrong")
except ValueError:
    log.exception("failed")
"""


def test_lines_of_all_origins_are_json_with_identity_and_context() -> None:
    run = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=30, check=True
    )
    lines = [json.loads(line) for line in run.stdout.splitlines()]
    assert run.stderr == ""
    step, nats, warning, failed = lines
    assert all(
        line["instance"] == "decode-0" and line["role"] == "decode" and "time" in line for line in lines
    )
    assert (step["event"], step["level"], step["request_id"]) == ("step", "info", "r1")
    assert step["tokens"] == {"1": 2}
    assert (nats["event"], nats["logger"], nats["request_id"]) == ("slow consumer", "nats", "r1")
    assert "old" in warning["event"]
    assert "ValueError: wrong" in failed["exception"]
    assert logging.getLogger().level == logging.WARNING
