"""`pairs`: names and patterns, what is left open, and which names fit nobody."""

from common.ids import InstanceId
from common.routing.pairs import Pairs

P0, P1 = InstanceId("prefill-0"), InstanceId("prefill-1")
D0, D1, D10 = InstanceId("decode-0"), InstanceId("decode-1"), InstanceId("decode-10")


def test_only_the_named_may_serve_and_the_unnamed_are_free() -> None:
    pairs = Pairs({"prefill-0": ("decode-0",)})
    assert pairs.allow(P0, D0)
    assert not pairs.allow(P0, D1)
    assert pairs.allow(P1, D0)
    assert pairs.allow(P1, D1)


def test_patterns_fit_whole_names_and_several_add_up() -> None:
    pairs = Pairs({"prefill-*": ("decode-1",), "prefill-[02]": ("decode-0",)})
    assert [pairs.allow(P0, d) for d in (D0, D1, D10)] == [True, True, False]
    assert [pairs.allow(P1, d) for d in (D0, D1, D10)] == [False, True, False]
    assert not Pairs({"*": ()}).allow(P0, D0)


def test_names_that_fit_nobody_are_told() -> None:
    pairs = Pairs({"prefil-0": ("decode-0",), "prefill-*": ("decode-7", "deocde-*")})
    assert pairs.unknown([P0, P1], [D0, D1]) == ["prefil-0", "decode-7", "deocde-*"]
    assert Pairs({"prefill-*": ("decode-*",)}).unknown([P0], [D0]) == []
