"""One reader's endpoint on the exporter: its control messages, its pulls, its fence.

Each pull is a task that sends what was asked for as soon as it is ready, PENDING while nothing is, and a
refusal when the lease is taken back. Knows nothing of how leases are granted.
"""

import asyncio
import contextlib
from collections import deque
from collections.abc import Coroutine
from typing import TYPE_CHECKING, Any

import structlog

from common.errors import KVMismatch, KVPeerLost, KVRevoked, KVTransferError, KVUnknownLease, MessageInvalid
from common.ids import BlockId, InstanceRef, LeaseId
from common.kv.control_stream import ControlStream
from common.kv.wire import WINDOW, Kind, Open, WireMessage, data_tag, refusal
from common.messages import codec
from common.transport.kv import KVEndpoint

if TYPE_CHECKING:
    from common.kv.exporter import KVExporter

PENDING_S = 0.5
"""How often a waiting reader hears that we are alive; the protocol promises once a second."""
MAX_PULLS = 1024
MAX_ASKED = 2 * WINDOW
"""A reader's receive may end before our send does, so it may be a window ahead of us."""

_log = structlog.get_logger()


class ExportPull:
    """One pull of one lease generation.

    | state | event | next |
    |---|---|---|
    | serving | ASK, ASK_FINAL, lease advanced or finished | serving: DATA, FINAL or PENDING |
    | serving | lease ended or bound again | over: refusal, unsent blocks answered empty |
    | serving | CANCEL | over: unsent blocks answered empty |
    | serving | ACK | over: lease released, ACKED |
    | over | sends do not end in kv_timeout_s | over: endpoint closed |
    """

    def __init__(self, session: "ExportSession", pull: int, opening: Open, num_blocks: int) -> None:
        self.pull = pull
        self.lease: LeaseId = opening.grant.lease
        self.num_blocks = num_blocks
        self._generation = opening.grant.generation
        self._session = session
        self._exporter = session.exporter
        self._codec = session.exporter.codecs.get(opening.compression)
        self._asked: deque[int] = deque()
        self._sending: set[asyncio.Task[None]] = set()
        self._wants_final = False
        self._cancelled = False
        self.over = False
        self._changed = asyncio.Event()

    def wake(self) -> None:
        self._changed.set()

    def ask(self, first: int, count: int) -> None:
        """Raises MessageInvalid for more than the protocol allows."""
        if first + count > self.num_blocks or len(self._asked) + len(self._sending) + count > MAX_ASKED:
            raise MessageInvalid(f"blocks {first}+{count} may not be asked for now")
        self._asked.extend(range(first, first + count))
        self.wake()

    def ask_final(self) -> None:
        self._wants_final = True
        self.wake()

    def cancel(self) -> None:
        self._cancelled = True
        self.wake()

    def acknowledge(self) -> None:
        """Raises KVRevoked."""
        self._exporter.acknowledge(self.lease, self._generation)
        self._cancelled = True
        self.wake()

    async def run(self) -> None:
        """Serve until the pull is over and none of its sends is in flight."""
        try:
            while not self._cancelled:
                self._changed.clear()
                self._answer()
                await self._wait()
        except KVPeerLost:
            pass  # the session sees it too and ends everything
        except KVTransferError as error:
            self._exporter.count_failed()
            taken = isinstance(error, KVUnknownLease)  # it was known when this pull began
            why = KVRevoked("the lease has ended") if taken else error
            with contextlib.suppress(KVPeerLost):
                self._session.stream.post(refusal(self.pull, why))
        self.over = True
        await self._drain()

    def _answer(self) -> None:
        held = self._exporter.table.get(self.lease, self._generation)
        num_ready = self._exporter.num_ready_blocks(held.num_ready, held.num_tokens)
        while self._asked and self._asked[0] < num_ready and len(self._sending) < WINDOW:
            index = self._asked.popleft()
            self._exporter.table.begin_read(self.lease, self._generation)
            task = asyncio.get_running_loop().create_task(self._send(index, held.blocks[index]))
            self._sending.add(task)
            task.add_done_callback(self._sent)
        if self._wants_final:
            final = self._exporter.table.give_final(self.lease, self._generation)
            if final is not None:
                self._session.stream.post(WireMessage(Kind.FINAL, self.pull, body=codec.encode(final)))
                self._wants_final = False

    async def _wait(self) -> None:
        owing = bool(self._asked) or self._wants_final
        try:
            # No PENDING while a send is in flight: it would hide from the reader that nothing moves.
            async with asyncio.timeout(PENDING_S if owing and not self._sending else None):
                await self._changed.wait()
        except TimeoutError:
            self._session.stream.post(WireMessage(Kind.PENDING, self.pull))

    async def _send(self, index: int, block: BlockId) -> None:
        endpoint, exporter = self._session.endpoint, self._exporter
        try:
            codec, buffer = self._codec, exporter.buffer
            data = await codec.encode(block) if codec else buffer.block(block)
            await endpoint.send(data, data_tag(self.pull, index))
            exporter.count_sent(codec.encoded_bytes if codec else buffer.block_bytes)
        except Exception as error:
            if not isinstance(error, KVTransferError) or endpoint.alive:
                # A send that fails alone would leave the reader's receive open for ever.
                _log.error("KV send failed, closing the endpoint", lease=self.lease, exc_info=error)
                self._session.fence()
        finally:
            exporter.table.end_read(self.lease)

    def _sent(self, task: asyncio.Task[None]) -> None:
        self._sending.discard(task)
        self.wake()

    async def _drain(self) -> None:
        with contextlib.suppress(KVTransferError):
            while self._asked:
                await self._session.void(self.pull, self._asked.popleft())
        if not self._sending:
            return
        _, stuck = await asyncio.wait(self._sending, timeout=self._exporter.kv_timeout_s)
        if stuck:
            _log.warning("KV sends do not end, closing the endpoint", lease=self.lease, sends=len(stuck))
            self._session.fence()
            await asyncio.wait(stuck)


class ExportSession:
    """All pulls over one endpoint. `reader` is who showed a valid token first."""

    def __init__(self, exporter: "KVExporter", endpoint: KVEndpoint) -> None:
        self.exporter = exporter
        self.endpoint = endpoint
        self.stream = ControlStream(endpoint)
        self.reader: InstanceRef | None = None
        self.closed = asyncio.Event()
        self._pulls: dict[int, ExportPull] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        """Serve until the endpoint breaks; on return it is closed and no send reads a block."""
        try:
            why = await self.stream.run(self._handle)
            _log.debug("KV reader left", reader=self.reader, pulls=len(self._pulls), why=why.message)
            if self._pulls:
                self.exporter.count_failed()
        finally:
            await self.endpoint.close()
            for pull in list(self._pulls.values()):
                pull.cancel()
            while self._tasks:
                await asyncio.wait(self._tasks)
            self.closed.set()

    def fence(self) -> None:
        """Close the endpoint: ends every send on it, and with it this session."""
        self._own(self.endpoint.close())

    async def void(self, pull: int, index: int) -> None:
        """Answer a block that will not be sent."""
        await self.endpoint.send(b"", data_tag(pull, index))

    def _handle(self, message: WireMessage) -> None:
        pull = self._pulls.get(message.pull)
        if message.kind is Kind.OPEN:
            self._open(message)
        elif pull is None or pull.over:
            self._refuse_over(message)
        elif message.kind is Kind.ASK:
            pull.ask(message.first, message.count)
        elif message.kind is Kind.ASK_FINAL:
            pull.ask_final()
        elif message.kind is Kind.CANCEL:
            pull.cancel()
        elif message.kind is Kind.ACK:
            self._acknowledge(pull)
        else:
            raise MessageInvalid(f"a reader does not send {message.kind.name}")

    def _open(self, message: WireMessage) -> None:
        if message.pull in self._pulls or len(self._pulls) >= MAX_PULLS:
            raise MessageInvalid(f"pull {message.pull} cannot be opened now")
        opening = codec.decode(message.body, Open)
        try:
            self.exporter.admit(opening, message.count, self)
        except KVTransferError as error:
            self.exporter.count_failed()
            # A mismatch is an operator's to mend; the others are part of life.
            level = _log.error if isinstance(error, KVMismatch) else _log.info
            level("KV reader refused", reader=opening.grant.reader, why=error.message)
            self.stream.post(refusal(message.pull, error))
            return
        self.reader = self.reader or opening.grant.reader
        pull = ExportPull(self, message.pull, opening, message.count)
        self._pulls[message.pull] = pull
        self._own(self._serve(pull))

    def _acknowledge(self, pull: ExportPull) -> None:
        try:
            pull.acknowledge()
        except KVRevoked as error:
            self.stream.post(refusal(pull.pull, error))
        else:
            self.stream.post(WireMessage(Kind.ACKED, pull.pull))

    def _refuse_over(self, message: WireMessage) -> None:
        """The pull was refused or is over; what the reader asked for before it knew is answered empty."""
        if message.kind is Kind.CANCEL:
            return
        if message.count > MAX_ASKED:
            raise MessageInvalid(f"{message.count} blocks in one ASK")
        self.stream.post(refusal(message.pull, KVUnknownLease("this pull is not (any more) open")))
        if message.kind is Kind.ASK:
            self._own(self._void_range(message))

    async def _void_range(self, message: WireMessage) -> None:
        with contextlib.suppress(KVTransferError):
            for index in range(message.first, message.first + message.count):
                await self.void(message.pull, index)

    async def _serve(self, pull: ExportPull) -> None:
        self.exporter.joined(pull)
        try:
            await pull.run()
        finally:
            self.exporter.left(pull)
            del self._pulls[pull.pull]

    def _own(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.error("KV export task failed", reader=self.reader, exc_info=error)
