"""Whatever is lost, late or told twice: an index that is in step holds what the pool holds."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from common.ids import BlockId
from common.kv.block_pool import BlockPool
from common.kv.event_log import CacheEventLog
from common.messages.cluster import KVEvents, KVSnapshot
from common.routing.prefix_index import PrefixIndex
from tests.support.fleet import ref

NUM_BLOCKS = 6
NAMES = [bytes([n]) * 16 for n in range(9)]
cuts = st.integers(1, 4)
places = st.integers(0, 30)


class IndexMachine(RuleBasedStateMachine):
    """One worker that caches and evicts, a network that loses, delays and repeats, and a router's index.

    `told[n]` is what the pool held after event n, kept by the test itself.
    """

    def __init__(self) -> None:
        super().__init__()
        self.index = PrefixIndex()
        self.incarnations = 0
        self.restart()

    @rule()
    def restart(self) -> None:
        """The worker's process is another one; old messages may still be under way."""
        self.incarnations += 1
        self.me = ref("d1", f"i{self.incarnations}")
        self.pool = BlockPool(NUM_BLOCKS, block_size=4)
        self.held: list[BlockId] = []
        self.log = CacheEventLog(self.pool, self.me)
        self.told: dict[int, set[bytes]] = {0: set()}
        if self.incarnations == 1:
            self.network: list[KVEvents | KVSnapshot] = []
        self.index.observe(self.me, NUM_BLOCKS, 0)

    @rule(count=st.integers(1, NUM_BLOCKS), names=st.lists(st.sampled_from(NAMES), max_size=NUM_BLOCKS))
    def work(self, count: int, names: list[bytes]) -> None:
        """Release what is held, take fresh blocks, and name some of them."""
        self.pool.release(self.held)
        self.held = self.pool.allocate(count)
        for block, name in zip(self.held, names, strict=False):
            self.pool.remember(block, name)

    @rule(cut=cuts)
    def tell(self, cut: int) -> None:
        events = self.log.events(cut)
        self.network += events
        self.told[self.log.last] = set(self.pool.contents())

    @rule(cut=cuts)
    def beat(self, cut: int) -> None:
        self.tell(cut)
        if self.index.observe(self.me, NUM_BLOCKS, self.log.last):
            self.network += self.log.snapshot(cut)

    @precondition(lambda self: self.network)
    @rule(place=places, repeat=st.booleans())
    def deliver(self, place: int, repeat: bool) -> None:
        """Mostly in order, for most places are beyond the end."""
        place = place if place < len(self.network) else 0
        message = self.network[place] if repeat else self.network.pop(place)
        if isinstance(message, KVEvents):
            self.index.apply(message)
        else:
            self.index.install(message)

    @precondition(lambda self: self.network)
    @rule(place=places)
    def lose(self, place: int) -> None:
        del self.network[place % len(self.network)]

    @rule()
    def die_and_come_back(self) -> None:
        self.index.drop(self.me)
        assert self.index.total_blocks == 0
        self.index.observe(self.me, NUM_BLOCKS, self.log.last)

    @invariant()
    def in_step_means_equal(self) -> None:
        if not self.index.observe(self.me, NUM_BLOCKS, self.log.last):
            assert self._known() == self.told[self.log.last]
        assert self.index.num_blocks(self.me) <= NUM_BLOCKS

    def teardown(self) -> None:
        """When nothing more is lost, one beat and its snapshot repair everything."""
        self.beat(3)
        while self.network:
            self.deliver(0, repeat=False)
        assert not self.index.observe(self.me, NUM_BLOCKS, self.log.last)
        assert self._known() == set(self.pool.contents())

    def _known(self) -> set[bytes]:
        return {name for name in NAMES if self.index.match([name])}


IndexMachine.TestCase.settings = settings(max_examples=200, stateful_step_count=40)
TestIndex = IndexMachine.TestCase
