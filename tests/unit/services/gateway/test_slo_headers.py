"""Which latency budget a request has: its headers', else the gateway's, else none."""

import pytest

from common.errors import InvalidRequest
from common.messages.generation import SLO
from services.gateway.http.headers import slo_of

NONE = SLO()


def test_headers_win_over_the_default_one_by_one() -> None:
    default = SLO(2.0, 0.1)
    assert slo_of({}, NONE) is None
    assert slo_of({}, default) == default
    assert slo_of({"X-Galley-TTFT-Ms": "500"}, default) == SLO(0.5, 0.1)
    assert slo_of({"X-Galley-TPOT-Ms": "40"}, NONE) == SLO(None, 0.04)


def test_nonsense_is_refused_whatever_the_default() -> None:
    with pytest.raises(InvalidRequest):
        slo_of({"X-Galley-TTFT-Ms": "soon"}, SLO(2.0))
