"""A router's core over made-up beats: for tests of policies, rules and admission."""

import random
from collections.abc import Iterable

from common.clock import VirtualClock
from common.messages.cluster import LoadReport, Role, StepCost, WorkerBeat
from common.routing.cluster_view import ClusterView, Instance
from common.routing.policies import POLICIES, RoutingPolicy
from tests.support.fleet import worker_beat

COST = StepCost(base_s=0.02, token_s=0.001, context_s=1e-7)
"""A worker that computes a prompt of 100 tokens in 0.12 s."""


def policy(name: str, seed: int = 0) -> RoutingPolicy:
    return POLICIES[name](random.Random(seed))


def loaded(
    name: str,
    role: Role = "decode",
    *,
    queued: int = 0,
    running: int = 0,
    held: int = 0,
    waiting: int = 0,
    free_blocks: int = 1000,
    residence_s: float = 0.0,
    cost: StepCost = COST,
    **info: object,
) -> WorkerBeat:
    """A beat: `queued` tokens to compute, `running` requests holding `held`, `waiting` ones to be pulled."""
    load = LoadReport(
        requests_queued=-(-queued // 100),
        requests_running=running,
        requests_waiting_for_kv=-(-waiting // 100),
        queued_tokens=queued + waiting,
        running_tokens=held,
        free_blocks=free_blocks,
        waiting_tokens=waiting,
        cost=cost,
        residence_s=residence_s,
    )
    return worker_beat(name, role, load=load, **info)  # type: ignore[arg-type]


def view_of(beats: Iterable[WorkerBeat]) -> ClusterView:
    view = ClusterView(VirtualClock())
    for beat in beats:
        view.observe(beat)
    return view


def instances(*beats: WorkerBeat) -> list[Instance]:
    return view_of(beats).all()
