"""What a request says in headers: its latency budget, and whether it wants to know where its time went.

Knows nothing of bodies.
"""

import re
from collections.abc import Mapping

from common.errors import InvalidRequest
from common.messages.generation import SLO
from services.gateway.openai.openapi import BUDGET, TIMING, TPOT, TTFT


def slo_of(headers: Mapping[str, str], default: SLO) -> SLO | None:
    """The budget in TTFT and TPOT; `default` has those that the headers leave out. Raises InvalidRequest."""
    ttft = _budget_s(headers, TTFT) or default.ttft_s
    tpot = _budget_s(headers, TPOT) or default.tpot_s
    return None if ttft is None and tpot is None else SLO(ttft, tpot)


def wants_timing(headers: Mapping[str, str]) -> bool:
    """Raises InvalidRequest for anything but 0 and 1."""
    value = headers.get(TIMING, "0").strip()
    if value not in ("0", "1"):
        raise InvalidRequest(f"{TIMING} is 1 or 0", param=TIMING)
    return value == "1"


def _budget_s(headers: Mapping[str, str], name: str) -> float | None:
    if name not in headers:
        return None
    value = headers[name].strip()
    if not re.fullmatch(BUDGET, value):
        raise InvalidRequest(f"{name} is a number of milliseconds from 1 to 99999999", param=name)
    return float(value) / 1000
