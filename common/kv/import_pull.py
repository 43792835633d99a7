"""One pull: which blocks are still missing, which are being received, and what the exporter said last.

Receives are posted straight into the pool's blocks before they are asked for, at most WINDOW at a time,
and end by themselves: the exporter answers every block asked for, if only with an empty message. Knows
nothing of who shares its link and of what happens to the blocks afterwards.
"""

import asyncio
import contextlib
from collections import deque

from common.errors import KVPeerLost, KVTimeout, KVTransferError, MessageInvalid
from common.ids import BlockId
from common.kv.buffer import KVBuffer
from common.kv.codec import KVCodec
from common.kv.import_link import ImportLink
from common.kv.wire import REFUSALS, WINDOW, FinalResult, Kind, Open, WireMessage, data_tag, refused
from common.messages import codec
from common.transport.kv import KVEndpoint

ASK_BLOCKS = WINDOW // 2
"""Blocks in one ASK: two of them keep the window full with few control messages."""


class ImportPull:
    """The blocks of one handoff on their way in.

    | state | event | next |
    |---|---|---|
    | asking | block arrived, PENDING | asking; the next range when the window has room |
    | asking | every block arrived | waiting for FINAL |
    | asking, waiting for FINAL | refusal, silence, endpoint lost | failed |
    | waiting for FINAL | FINAL | complete |
    | complete | ACKED, refusal | acknowledged |

    After a lost endpoint it may `run` again over another link. It then asks for all of them anew: whether
    a block or an empty answer came last over a link that broke cannot be told.
    """

    def __init__(
        self,
        opening: Open,
        buffer: KVBuffer,
        blocks: tuple[BlockId, ...],
        codec: KVCodec | None = None,
        start: int = 0,
    ) -> None:
        """`codec` is that of opening.compression; None for none. The blocks before `start` are there already
        and never written."""
        self.grant = opening.grant
        self.blocks = blocks
        self.receiving: set[asyncio.Task[None]] = set()
        self._open = opening
        self._buffer = buffer
        self._codec = codec
        self._start = start
        self._missing: deque[int] = deque()
        self._arrived = bytearray(len(blocks))
        self._link: ImportLink | None = None
        self._pull = 0
        self._asked_final = False
        self._final: FinalResult | None = None
        self._acked = False
        self._error: KVTransferError | None = None
        self._changed = asyncio.Event()

    async def run(self, link: ImportLink, silence_s: float) -> FinalResult:
        """Fetch what is missing, then FINAL.

        Raises KVTimeout after `silence_s` without any answer, KVPeerLost when the endpoint breaks, and
        KVUnknownLease, KVRevoked, KVMismatch when refused.
        """
        self._join(link)
        while self._final is None:
            if self._error is not None:
                raise self._error
            self._ask(link)
            await self._news(silence_s)
        return self._final

    async def acknowledge(self, link: ImportLink) -> None:
        """Tell the exporter that the lease can go, until it confirms. Raises KVPeerLost."""
        if link is not self._link:
            self._join(link)
        link.post(WireMessage(Kind.ACK, self._pull))
        try:
            # A refusal says that the lease is gone, which is what is wanted here.
            while not self._acked and self._error is None:
                await self._news(None)
        finally:
            link.leave(self._pull)
        if isinstance(self._error, KVPeerLost):
            raise self._error

    def cancel(self) -> None:
        """Ask for no more; the exporter ends the receives that are posted."""
        if self._link is None:
            return
        with contextlib.suppress(KVPeerLost):
            self._link.post(WireMessage(Kind.CANCEL, self._pull))
        self._link.leave(self._pull)

    def fence(self) -> None:
        """Close the link, which ends every receive."""
        if self._link is not None:
            self._link.fence()

    def handle(self, message: WireMessage) -> None:
        """Raises MessageInvalid."""
        if message.kind in REFUSALS:
            self._error = refused(message)
        elif message.kind is Kind.FINAL:
            final = codec.decode(message.body, FinalResult)
            if not final.choices:
                raise MessageInvalid("FINAL without a choice")
            self._final = final
        elif message.kind is Kind.ACKED:
            self._acked = True
        self._changed.set()

    def lost(self, error: KVPeerLost) -> None:
        self._error = error
        self._changed.set()

    def _join(self, link: ImportLink) -> None:
        self._link = link
        self._pull = link.join(self)
        self._error = None
        self._asked_final = False
        self._missing = deque(range(self._start, len(self.blocks)))
        self._arrived = bytearray(index < self._start for index in range(len(self.blocks)))
        link.post(WireMessage(Kind.OPEN, self._pull, count=len(self.blocks), body=codec.encode(self._open)))

    async def _news(self, silence_s: float | None) -> None:
        """Wait until something has come; each sign of life starts the wait anew."""
        try:
            async with asyncio.timeout(silence_s):
                await self._changed.wait()
        except TimeoutError:
            raise KVTimeout(f"no KV and no word from the exporter for {silence_s} s") from None
        self._changed.clear()

    def _ask(self, link: ImportLink) -> None:
        while self._missing and len(self.receiving) + ASK_BLOCKS <= WINDOW:
            first = self._missing[0]
            count = 0
            while count < ASK_BLOCKS and self._missing and self._missing[0] == first + count:
                self._receive(link.endpoint, self._missing.popleft())
                count += 1
            link.post(WireMessage(Kind.ASK, self._pull, first, count))
        if all(self._arrived) and not self._asked_final:
            link.post(WireMessage(Kind.ASK_FINAL, self._pull))
            self._asked_final = True

    def _receive(self, endpoint: KVEndpoint, index: int) -> None:
        task = asyncio.get_running_loop().create_task(self._receive_block(endpoint, self._pull, index))
        self.receiving.add(task)
        task.add_done_callback(self._received)

    async def _receive_block(self, endpoint: KVEndpoint, pull: int, index: int) -> None:
        block, codec = self.blocks[index], self._codec
        data = codec.scratch() if codec else self._buffer.block(block)
        try:
            await endpoint.recv(data, data_tag(pull, index))
        except KVTransferError:
            return  # an empty answer or a broken endpoint: why is told by the control stream
        if codec and pull == self._pull:
            await codec.decode(data, block)
        if pull == self._pull:
            self._arrived[index] = 1

    def _received(self, task: asyncio.Task[None]) -> None:
        self.receiving.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._error = KVTransferError(f"a block could not be taken in: {error!r}")
        self._changed.set()
