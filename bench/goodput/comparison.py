"""What is compared, on what, with how much effort: the order that a campaign carries out. Pure data."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from bench.goodput.contestants import Contestant, Instances
from bench.goodput.effort import Effort
from bench.goodput.fleet import Plan
from bench.goodput.measure import Order
from bench.goodput.slo import Slo, Unloaded
from bench.goodput.workload import Workload
from deploy.local.spec import plan_processes

BATCHES = 2.0
"""A decode step of so many times eight streams still takes about as long as one of eight."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """`fixed` are SLOs given by the user; without them they are made of the unloaded times. `plan` makes the
    processes of a cluster, for tests that start others."""

    workload: Workload
    contestants: Sequence[Contestant]
    instances: Instances
    effort: Effort
    fixed: tuple[Slo, ...] = ()
    plan: Plan = field(default=plan_processes)

    def order(self, rung: int, rate: float, asked: int, slos: Sequence[Slo]) -> Order:
        loosest = max(slos, key=lambda slo: slo.tpot_s)
        return Order(self.workload, rung, rate, asked, loosest, self.instances.cores)

    def capacity(self, contestant: Contestant, alone: Unloaded, mean_output: float) -> float:
        """Requests/s that the cores could do at most, had they nothing to wait for: where searches begin."""
        decode_s = mean_output * alone.step_s / (8 * BATCHES)
        if contestant.split:
            return min(self.instances.prefill / alone.ttft_s, self.instances.decode / decode_s)
        return self.instances.total / (alone.ttft_s + decode_s)
