"""The decode side of the KV pull: fill blocks with a handoff's KV and bring back FINAL.

KVImporter keeps one link (import_link.py) per exporter incarnation, shared by its pulls (import_pull.py).
Blocks of a pull that fails or is cancelled are quarantined until no byte can be written into them any
more, then released. Knows nothing of the engine and of the control plane.
"""

import asyncio
import contextlib
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any

import structlog

from common.clock import Clock
from common.errors import KVMismatch, KVPeerLost, KVTimeout, KVTransferError
from common.ids import BlockId, InstanceRef
from common.kv.buffer import KVBuffer
from common.kv.codec import NO_CODECS, PLAIN, Codecs, choose
from common.kv.import_link import ImportLink
from common.kv.import_pull import ImportPull
from common.kv.layout import KVLayout
from common.kv.wire import MAX_BLOCKS, FinalResult, Open
from common.messages.handoff import KVHandoff
from common.transport.kv import KVTransport

MAX_LINKS = 3
"""Endpoints that one pull may use up: an exporter that fences one is asked again over the next."""

_log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class PullResult:
    """`num_bytes` of KV came over `transport` (its name, for the metric label).

    `seconds` is the whole pull, which may begin before the prefill; `final.age_s` is what of it came after.
    """

    final: FinalResult
    num_bytes: int
    seconds: float
    transport: str


class KVImporter:
    """Everything that this process imports."""

    def __init__(
        self,
        *,
        transport: KVTransport,
        buffer: KVBuffer,
        layout: KVLayout,
        fingerprint: str,
        me: InstanceRef,
        clock: Clock,
        kv_timeout_s: float,
        release: Callable[[Sequence[BlockId]], None],
        codecs: Codecs = NO_CODECS,
        compression: str = PLAIN,
    ) -> None:
        """`release` gets the blocks of a failed pull back, once. `codecs` are those of `buffer`;
        `compression` is how the KV shall come from exporters that can send it so."""
        self._transport = transport
        self._buffer = buffer
        self._layout = layout
        self._fingerprint = fingerprint
        self._me = me
        self._clock = clock
        self._kv_timeout_s = kv_timeout_s
        self._release = release
        self._codecs = codecs
        self._compression = compression
        self._links: dict[tuple[str, InstanceRef], ImportLink] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._acknowledging: set[asyncio.Task[None]] = set()
        self._num_quarantined = 0

    @property
    def num_quarantined(self) -> int:
        """Blocks of ended pulls into which a byte may still be written."""
        return self._num_quarantined

    async def pull(self, handoff: KVHandoff, blocks: Sequence[BlockId], start: int = 0) -> PullResult:
        """Fill `blocks`, in the order of the tokens, and bring FINAL.

        The first `start` hold their KV already: others may be reading them, and they are not touched.

        On success the caller owns the blocks, and the lease is acknowledged in the background. On any
        exception, cancellation included, this importer takes the blocks and releases them once.
        Raises KVPeerLost, KVTimeout (also when the request's own time is up), KVUnknownLease, KVRevoked,
        KVMismatch.
        """
        name = choose(self._compression, handoff.compression, handoff.compressions, self._codecs)
        opening, codec = Open(handoff.grant, self._fingerprint, name), self._codecs.get(name)
        pull = ImportPull(opening, self._buffer, tuple(blocks), codec, start)
        started = self._clock.now()
        try:
            self._check(handoff, blocks)
            async with asyncio.timeout(handoff.time_left_s):
                final = await self._pull(pull, handoff)
        except BaseException as error:
            self._quarantine(pull)
            if isinstance(error, TimeoutError):
                raise KVTimeout("the request's time was up before its KV had arrived") from error
            raise
        self._own(self._acknowledge(pull, handoff), self._acknowledging)
        num_bytes = (len(blocks) - start) * (codec.encoded_bytes if codec else self._buffer.block_bytes)
        return PullResult(final, num_bytes, self._clock.now() - started, self._transport.name)

    async def close(self) -> None:
        """Finish acknowledging, close every endpoint; on return no quarantined block is left."""
        if self._acknowledging:
            await asyncio.wait(self._acknowledging, timeout=1.0)
        for task in self._acknowledging:
            task.cancel()
        for link in list(self._links.values()):
            link.fence()
        while self._tasks or self._acknowledging:
            await asyncio.wait(self._tasks | self._acknowledging)

    def _check(self, handoff: KVHandoff, blocks: Sequence[BlockId]) -> None:
        if handoff.fingerprint != self._fingerprint:
            raise KVMismatch(
                f"the handoff is for {handoff.fingerprint}, this instance has {self._fingerprint}"
            )
        if handoff.grant.reader != self._me:
            raise KVMismatch(f"the lease is granted to {handoff.grant.reader}, this is {self._me}")
        if len(blocks) != self._layout.blocks_for(handoff.num_tokens) or len(blocks) > MAX_BLOCKS:
            raise KVMismatch(f"{len(blocks)} blocks cannot hold {handoff.num_tokens} tokens")
        whole = ((0, self._layout.kv_heads), (0, self._layout.num_layers))
        if [(source.heads, source.layers) for source in handoff.sources] != [whole]:
            raise KVMismatch("only one source that holds all heads and layers can be read")

    async def _pull(self, pull: ImportPull, handoff: KVHandoff) -> FinalResult:
        for links_left in reversed(range(MAX_LINKS)):
            link = await self._link(handoff)
            try:
                return await pull.run(link, self._kv_timeout_s)
            except KVPeerLost:
                # Only a link that is closed for good lets its missing blocks be asked for again.
                if not links_left or not await link.closes_within(self._kv_timeout_s / 2):
                    raise
        raise AssertionError("unreachable: the last link raises")

    async def _link(self, handoff: KVHandoff) -> ImportLink:
        """The link to that exporter incarnation, connected. Raises KVPeerLost, KVTimeout."""
        address = handoff.sources[0].address
        key = (address, handoff.prefill)
        link = self._links.get(key)
        if link is None or not link.usable:
            link = self._links[key] = ImportLink(self._transport, address, self._kv_timeout_s)
            self._own(self._run_link(key, link), self._tasks)
        await link.connected()
        return link

    async def _run_link(self, key: tuple[str, InstanceRef], link: ImportLink) -> None:
        try:
            await link.run()
        finally:
            if self._links.get(key) is link:
                del self._links[key]

    async def _acknowledge(self, pull: ImportPull, handoff: KVHandoff) -> None:
        """Repeat until the exporter confirms or has no such lease; its deadline ends the lease otherwise."""
        with contextlib.suppress(TimeoutError, KVTransferError):
            async with asyncio.timeout(self._kv_timeout_s):
                for _ in range(MAX_LINKS):
                    with contextlib.suppress(KVPeerLost):
                        link = await self._link(handoff)
                        await pull.acknowledge(link)
                        return
        _log.warning("KV lease could not be acknowledged", lease=pull.grant.lease, prefill=handoff.prefill)

    def _quarantine(self, pull: ImportPull) -> None:
        pull.cancel()
        if not pull.receiving:
            self._release(pull.blocks)
            return
        self._num_quarantined += len(pull.blocks)
        self._own(self._release_later(pull), self._tasks)

    async def _release_later(self, pull: ImportPull) -> None:
        open_receives = set(pull.receiving)
        if open_receives:
            _, open_receives = await asyncio.wait(open_receives, timeout=self._kv_timeout_s)
        if open_receives:
            pull.fence()
            await asyncio.wait(open_receives)
        self._num_quarantined -= len(pull.blocks)
        self._release(pull.blocks)

    def _own(self, work: Coroutine[Any, Any, None], tasks: set[asyncio.Task[None]]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        tasks.add(task)
        task.add_done_callback(tasks.discard)
        task.add_done_callback(_log_failure)


def _log_failure(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        _log.error("KV import task failed", exc_info=error)
