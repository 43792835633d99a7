"""In which order a frame's items reach their requests."""

import asyncio
from collections.abc import Iterable

from common.ids import AttemptKey, Incarnation, InstanceId, InstanceRef, RequestId
from common.messages.stream import FinishItem, Frame, FrameItem, TokensItem
from services.gateway.delivery import Delivery

WORKER = InstanceRef(InstanceId("d"), Incarnation("1"))


class Flow:
    """A request that notes what it is told in a list that all share."""

    def __init__(self, name: str, told: list[str], *, begun: bool) -> None:
        self.begun = begun
        self._name = name
        self._told = told

    def items(self, source: InstanceRef, items: Iterable[FrameItem]) -> None:
        assert source == WORKER
        for item in items:
            self._told.append(
                f"{self._name}{item.index}" if isinstance(item, TokensItem) else f"{self._name}."
            )
        self.begun = True


def key(request: str) -> AttemptKey:
    return AttemptKey(RequestId(request), 1, 0)


def frame(number: int, index: int, *requests: str) -> Frame:
    """Token `index` of each request."""
    items = tuple(TokensItem(key(request), index, (7,)) for request in requests)
    return Frame(WORKER.instance, WORKER.incarnation, number, items)


def make(begun: str, new: str) -> tuple[Delivery, list[str]]:
    told: list[str] = []
    flows = {RequestId(name): Flow(name, told, begun=name in begun) for name in begun + new}
    strange = lambda _ref, request, items: told.append(f"?{request}{len(list(items))}")  # noqa: E731
    return Delivery(flows, strange), told  # type: ignore[arg-type]


async def test_who_waits_for_a_first_token_has_it_first_and_a_turn_to_answer() -> None:
    delivery, told = make("ab", "xy")
    delivery.take(frame(1, 0, "a", "x", "b", "y"))
    asyncio.get_running_loop().call_soon(told.append, "after")
    assert told == ["x0", "y0"]
    await asyncio.sleep(0)
    assert told == ["x0", "y0", "a0", "b0", "after"]


async def test_where_nobody_waits_nothing_is_put_off() -> None:
    delivery, told = make("ab", "")
    delivery.take(frame(1, 0, "a", "b"))
    assert told == ["a0", "b0"]


async def test_frames_do_not_overtake_what_was_put_off() -> None:
    delivery, told = make("ab", "x")
    delivery.take(frame(1, 0, "a", "x", "b"))
    delivery.take(frame(2, 1, "b", "a", "x"))
    assert told == ["x0", "a0", "b0", "b1", "a1", "x1"]
    await asyncio.sleep(0)
    assert len(told) == 6


async def test_items_of_one_request_stay_together_and_strangers_are_told() -> None:
    delivery, told = make("a", "")
    items = (TokensItem(key("a"), 0, (7,)), FinishItem(key("a"), "stop", 1), *frame(1, 0, "s").items)
    delivery.take(Frame(WORKER.instance, WORKER.incarnation, 1, items))
    assert told == ["?s1", "a0", "a."]
