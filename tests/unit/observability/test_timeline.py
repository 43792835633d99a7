"""TTFT, TPOT and stage times from hand-made times."""

import pytest

from common.observability.timeline import RequestTimeline


def test_latencies_of_three_arrivals() -> None:
    timeline = RequestTimeline(arrived=10.0)
    assert (timeline.ttft_s, timeline.tpot_s) == (None, None)
    timeline.emitted(10.5)
    assert (timeline.ttft_s, timeline.tpot_s) == (0.5, None)
    timeline.emitted(10.7, count=2)
    timeline.emitted(11.1)
    assert timeline.num_tokens == 4
    assert timeline.ttft_s == 0.5
    assert timeline.tpot_s == pytest.approx(0.6 / 3)


def test_tokens_that_come_first_together_take_no_time() -> None:
    timeline = RequestTimeline(arrived=0.0)
    timeline.emitted(1.0, count=3)
    assert timeline.tpot_s == 0.0


def test_stages_add_up_to_the_whole_also_when_entered_twice() -> None:
    timeline = RequestTimeline(arrived=0.0)
    timeline.enter("queued", 0.0)
    timeline.enter("prefilling", 1.0)
    timeline.enter("queued", 3.0)
    timeline.enter("decoding", 3.5)
    assert timeline.stage_s() == {"queued": 1.5, "prefilling": 2.0}
    timeline.finish(7.5)
    assert timeline.stage_s() == {"queued": 1.5, "prefilling": 2.0, "decoding": 4.0}
