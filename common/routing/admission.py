"""Early rejection: who can keep a request's latency budget, and when it is worth asking again if nobody can.

Mooncake's idea (FAST '25, section 7: what cannot be served in time should not be prefilled first). Pure.
Nobody is ever ruled out who is idle, or for whom this request is as it would be if he were, whatever is
predicted: a pessimistic prediction shall cost waiting, never the service. Nor is anybody whose step times are
not known yet. Knows nothing of topologies.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from common.messages.generation import SLO
from common.routing.cluster_view import Instance
from common.routing.policies.base import Work
from common.routing.prediction import Forecast, knows, unloaded

LEAST_RETRY_S = 0.1
RESIDENCE_S = 1.0
"""Of sequences where none has ended yet."""


@dataclass(frozen=True, slots=True)
class TooLate:
    """Nobody can keep the budget now; after `retry_after_s` without new work the first one can."""

    message: str
    retry_after_s: float


def in_time(candidates: Sequence[Instance], work: Work, slo: SLO | None) -> list[Instance] | TooLate:
    """Those of `candidates` that are predicted to keep the part of `slo` that `work` has a part in.

    A prefill has the TTFT, a decode the TPOT with the wait for its room, who does both has both.
    """
    if slo is None:
        return list(candidates)
    forecast = Forecast(candidates)
    late = {one.ref: _too_late(forecast, one, work, slo) for one in candidates}
    kept = [one for one in candidates if late[one.ref] is None]
    if kept:
        return kept
    return min((why for why in late.values() if why is not None), key=lambda why: why.retry_after_s)


def _too_late(forecast: Forecast, one: Instance, work: Work, slo: SLO) -> TooLate | None:
    if one.idle or not knows(one):
        return None
    empty, found = unloaded(one), []
    if slo.ttft_s is not None and work.phase != "decode":
        predicted = forecast.ttft_s(one, work)
        # The queue drains in real time: after so many seconds that many are gone from it.
        wait = min(predicted - slo.ttft_s, predicted - forecast.ttft_s(empty, work))
        found.append((wait, _says("the first token", predicted, slo.ttft_s)))
    if slo.tpot_s is not None and work.phase != "prefill" and work.max_tokens > 1:
        predicted = forecast.tpot_s(one, work)
        most = predicted - forecast.tpot_s(empty, work)
        # What has to leave first, as a share of all that can, leaves within as large a share of a residence.
        share = min(1.0, (predicted - slo.tpot_s) / most) if most > 0 else 0.0
        found.append(
            (share * (one.load.residence_s or RESIDENCE_S), _says("each later token", predicted, slo.tpot_s))
        )
    wait, message = max(found, default=(0.0, ""))
    return TooLate(message, max(LEAST_RETRY_S, wait)) if wait > 0 else None


def _says(what: str, predicted: float, budget: float) -> str:
    return f"{what} is predicted to take {predicted * 1e3:.0f} ms, over the budget of {budget * 1e3:.0f} ms"
