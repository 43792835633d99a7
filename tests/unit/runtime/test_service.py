"""What a process does with itself before it serves."""

import gc
import weakref

from common.runtime.service import settle


class Node:
    """Something that only a collection frees once it points to itself."""

    def __init__(self) -> None:
        self.me = self


def test_a_settled_process_collects_only_what_came_later() -> None:
    before, rubbish = Node(), weakref.ref(Node())
    try:
        settle()
        assert rubbish() is None
        assert gc.get_freeze_count() > 10_000
        kept = weakref.ref(before)
        del before
        later = weakref.ref(Node())
        gc.collect()
        assert later() is None
        assert kept() is not None
    finally:
        gc.unfreeze()
