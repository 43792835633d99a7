"""What a request would meet on an instance: seconds to its first token, and seconds per later one.

Mooncake's estimate (FAST '25, section 6: queue, then prefill) over the step times that each worker fits to
its own steps and tells in its beats. Pure. Everything that is predicted rises, or stays, when load rises.
Knows nothing of budgets (admission.py) and of who is chosen (policies/).
"""

from collections.abc import Sequence
from dataclasses import replace
from math import ceil
from statistics import fmean

from common.messages.cluster import LoadReport, StepCost
from common.routing.cluster_view import Instance
from common.routing.policies.base import Work

NOMINAL = StepCost(0.01, 0.001, 0.0)
"""While no instance has told of a step: only good for comparing."""
USUAL_OUTPUT = 128
"""Tokens over which a wait for room counts: a limit of thousands is seldom used up."""

_UNLIMITED = 1 << 30


def knows(instance: Instance) -> bool:
    """Whether it has told what its steps take."""
    return instance.load.cost != StepCost()


def unloaded(instance: Instance) -> Instance:
    """The same instance with nothing to do."""
    load = LoadReport(
        free_blocks=instance.info.num_blocks,
        cost=instance.load.cost,
        residence_s=instance.load.residence_s,
    )
    return replace(instance, load=load, assigned_tokens=0, assigned_to_compute=0, assigned_requests=0)


class Forecast:
    """Predictions over some instances; who has told no step times yet counts as the mean of the others."""

    def __init__(self, instances: Sequence[Instance]) -> None:
        told = [one.load.cost for one in instances if knows(one)]
        self._assumed = _mean(told) if told else NOMINAL

    def ttft_s(self, instance: Instance, work: Work) -> float:
        """Until `work`'s first token is sampled there: room, the queue before it, its own uncached part."""
        cost, info, load = self._cost(instance), instance.info, instance.load
        own, ahead = work.uncached_tokens(instance), instance.tokens_to_compute
        chunk = info.chunk_tokens or _UNLIMITED
        steps = max(ceil((ahead + own) / (info.step_tokens or _UNLIMITED)), ceil(own / chunk))
        seconds = steps * cost.base_s + (ahead + own) * cost.token_s
        # Those ahead count as prompts like this one: how long each of them is nobody tells.
        seconds += cost.context_s * (own * (work.num_tokens - own / 2) + ahead * work.num_tokens / 2)
        if info.chunk_tokens:  # the steps carry those who decode as well
            seconds += steps * (load.requests_running * cost.token_s + load.running_tokens * cost.context_s)
        return seconds + (self.wait_s(instance, work) if work.phase == "both" else 0.0)

    def tpot_s(self, instance: Instance, work: Work) -> float:
        """Per token of `work` after the first, the wait for decode included."""
        cost, load = self._cost(instance), instance.load
        rows = min(instance.requests + 1, instance.info.max_num_seqs or _UNLIMITED)
        held = load.running_tokens + load.waiting_tokens + instance.assigned_tokens + work.num_tokens
        step = cost.base_s + rows * cost.token_s + held * cost.context_s
        if work.phase != "decode":
            return step
        others = instance.tokens_to_compute * cost.token_s  # prompts that are computed in between
        return step + (self.wait_s(instance, work) + others) / max(1, min(work.max_tokens, USUAL_OUTPUT) - 1)

    def wait_s(self, instance: Instance, work: Work) -> float:
        """Until there is room for `work`: sequences leave one residence after they came, on average."""
        info, load = instance.info, instance.load
        capacity = info.num_blocks * info.block_size
        needed = load.waiting_tokens + instance.assigned_tokens + work.num_tokens
        short = max(0, needed - load.free_blocks * info.block_size) / capacity if capacity else 0.0
        if info.max_num_seqs:
            short = max(short, (instance.requests + 1 - info.max_num_seqs) / info.max_num_seqs)
        return short * load.residence_s

    def delay_s(self, instance: Instance, work: Work) -> float:
        """Until the next token of `work`: its first, or for a decode the one after the handoff."""
        if work.phase == "decode":
            return self.wait_s(instance, work) + self.tpot_s(instance, work)
        return self.ttft_s(instance, work)

    def _cost(self, instance: Instance) -> StepCost:
        return instance.load.cost if knows(instance) else self._assumed


def _mean(costs: Sequence[StepCost]) -> StepCost:
    return StepCost(
        fmean(cost.base_s for cost in costs),
        fmean(cost.token_s for cost in costs),
        fmean(cost.context_s for cost in costs),
    )
