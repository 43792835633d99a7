"""Who is compared, with how many workers on which cores, and what a sweep tries."""

import pytest

from bench.goodput.comparison import Comparison
from bench.goodput.contestants import (
    AGAINST,
    Contestant,
    Instances,
    candidates,
    reference,
    topologies,
    wider,
)
from bench.goodput.effort import QUICK, Effort, TimeLimit
from bench.goodput.slo import Unloaded
from bench.goodput.workload import named
from common.errors import ConfigError
from deploy.local.presets import Preset

TWO = Instances(1, 1, ())
SPLIT: dict[Preset, bool] = {
    "disaggregated": True, "pooled": True, "hybrid": True, "chunked": False, "colocated": False
}  # fmt: skip


@pytest.mark.parametrize("name", SPLIT)
def test_every_topology_gets_as_many_workers(name: Preset) -> None:
    [found] = topologies([name], Instances(2, 1, ()))
    assert found.spec is not None
    assert found.split is SPLIT[name]
    assert (found.spec.num_prefill, found.spec.decode) == ((2, 1) if SPLIT[name] else (0, 3))


def test_an_unknown_topology_is_refused_with_the_choices() -> None:
    with pytest.raises(ConfigError, match="disaggregated, pooled, chunked, colocated"):
        topologies(["colocated", "split"], TWO)
    with pytest.raises(ConfigError, match="itself"):
        topologies(["chunked", "chunked"], TWO)


def test_the_reference_is_one_worker_on_one_instances_cores() -> None:
    spec = reference(Instances(1, 1, (0, 1, 2, 3)), {"dtype": "float32"}).spec
    assert spec is not None
    assert spec.settings == {"dtype": "float32"}
    assert (spec.topology, spec.num_prefill, spec.decode, spec.cores) == ("colocated", 0, 1, "0,1")


def settings_of(found: list[Contestant]) -> list[dict[str, str]]:
    return [dict(one.settings) for one in found]


def test_a_sweep_tries_chunks_and_budgets_of_those_that_have_them() -> None:
    chunked, colocated, split = topologies(["chunked", "colocated", "disaggregated"], TWO)
    full = settings_of(candidates(chunked, quick=False))
    assert {one["chunk_tokens"] for one in full} == {"64", "128", "256"}
    assert len(full) == 9
    assert all(int(one["max_num_batched_tokens"]) >= int(one["chunk_tokens"]) for one in full)
    assert settings_of(candidates(colocated, quick=False)) == [
        {"max_num_batched_tokens": budget} for budget in ("512", "2048", "8192")
    ]
    assert candidates(split, quick=False) == []
    assert candidates(Contestant(AGAINST, urls=("http://h:1",)), quick=False) == []


def test_a_quick_sweep_tries_the_best_chunk_with_a_wide_budget_too() -> None:
    [chunked] = topologies(["chunked"], TWO)
    assert len(candidates(chunked, quick=True)) == 3
    best = candidates(chunked, quick=True)[1]
    assert settings_of(wider(best, quick=True)) == [{"chunk_tokens": "128", "max_num_batched_tokens": "2048"}]
    assert wider(best, quick=False) == []


def test_settings_are_in_the_cluster_and_in_words() -> None:
    [chunked] = topologies(["chunked"], TWO)
    found = chunked.using({"chunk_tokens": "64"})
    assert found.spec is not None
    assert found.spec.settings["chunk_tokens"] == "64"
    assert (found.how, chunked.how) == ("chunk_tokens 64", "as configured")


def test_searches_begin_at_what_the_cores_could_do_at_most() -> None:
    contestants = topologies(["colocated", "disaggregated"], TWO)
    comparison = Comparison(named("long-prompt", 1.0), contestants, TWO, QUICK)
    alone = Unloaded(ttft_s=0.25, step_s=0.016)
    colocated, split = (comparison.capacity(one, alone, 64.0) for one in contestants)
    assert split == pytest.approx(4.0)  # prefill binds: a quarter of a second each
    assert colocated == pytest.approx(2 / (0.25 + 64 * 0.016 / 16))


def test_nobody_takes_more_than_twice_its_share_of_the_time() -> None:
    limit = TimeLimit(began=100.0, minutes=10.0)
    assert limit.allows(200, now=100.0, contenders=4)
    assert not limit.allows(301, now=100.0, contenders=4)
    assert limit.allows(301, now=100.0, contenders=2)
    assert not limit.allows(61, now=640.0, contenders=1)
    assert limit.allows(59, now=640.0, contenders=4)  # a minute may always be tried
    assert TimeLimit(100.0, None).allows(1e9, now=1e9, contenders=4)


def test_requests_can_be_more_but_targets_and_slos_stay() -> None:
    effort: Effort = QUICK.with_requests(300)
    assert (effort.requests, QUICK.requests) == (300, 100)
    objectives = QUICK.objectives(Unloaded(0.1, 0.01).slos())
    assert [objective.name for objective in objectives] == ["k20", "k15", "k12"]
