"""The data plane over UCX: endpoints with tagged messages between two processes, through ucxx.

Uses ucxx's context, worker and endpoint objects, but not its asyncio layer: there a pending receive in
blocking mode is a loop over sleep(0), and an idle worker would burn a core. Here UCX's file descriptor
wakes the event loop, which makes progress and resolves what has completed (`_Progress`).

Tags are 40 bits; the upper 24 of UCX's 64 name the receiving endpoint, because UCX matches tags per
process. Error handling is on, also for shared memory (MM_ERROR_HANDLING), so that a dead peer ends what
is pending. UCX does not report the length of a received message: one that is too long is an error, one
that is too short is not noticed. Knows nothing of leases and blocks.
"""

import asyncio
import contextlib
import os
import struct
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import structlog

from common.config import EngineSettings
from common.errors import ConfigError, KVPeerLost, KVTimeout, KVTransferError
from common.observability.metrics import WorkerMetrics
from common.transport.kv import Buffer, KVEndpoint, OnEndpoint
from common.transport.ucx_lanes import transport_of
from common.transport.ucx_selftest import SelfTest, UcxOptions, candidates, self_test

os.putenv("UCX_WARN_UNUSED_ENV_VARS", "n")  # or it warns of what `import ucxx` itself puts there

import ucxx._lib.libucxx as ucp
from ucxx._lib.arr import Array

SPIN_S = 30e-6
LINGER_S = 1e-3
"""While blocks move, look for more for so long before giving the event loop a turn, and so long before
sleeping on the file descriptor: a message comes in pieces, and shared memory wakes nobody when its queue
has room again. 32 blocks of 368,640 bytes: 0.5 GB/s without, 6 to 10 with, on two cores."""
MAX_SPIN_S = 1e-3
BULK_BYTES = 16 << 10
CLOSE_NS = 10**10
HANDSHAKE_S = 5.0

_HELLO = struct.Struct(">4sI")
_MAGIC = b"GLKE"
_MAX_PREFIX = (1 << 24) - 1
_TAG_BITS = 40

_log = structlog.get_logger()


@dataclass(eq=False, slots=True)
class _Pending:
    """One request under way. `buffer` is kept alive for it, whoever waits or no longer does."""

    request: Any
    done: asyncio.Future[None]
    buffer: Any
    owner: object
    bulk: bool


class _Progress:
    """Makes UCX progress on the event loop: on its file descriptor's events and after each submission."""

    def __init__(self, worker: Any, polling: bool) -> None:
        self._worker = worker
        self._polling = polling
        self._loop = asyncio.get_running_loop()
        self._pending: list[_Pending] = []
        self._scheduled: asyncio.Handle | None = None
        self._closed = False
        self._moved_at = 0.0
        worker.init_blocking_progress_mode()
        self._fd: int = worker.epoll_file_descriptor
        self._loop.add_reader(self._fd, self._progress)
        self.kick()

    def submit(self, request: Any, buffer: Any, owner: object) -> asyncio.Future[None]:
        """Done when the request is; fails with ucxx's error."""
        done: asyncio.Future[None] = self._loop.create_future()
        self._pending.append(_Pending(request, done, buffer, owner, buffer.nbytes >= BULK_BYTES))
        self.kick()
        return done

    def kick(self) -> None:
        """Make progress on the next turn of the loop."""
        if self._scheduled is None and not self._closed:
            self._scheduled = self._loop.call_soon(self._kicked)

    def of(self, owner: object) -> list[asyncio.Future[None]]:
        """What `owner` has submitted and UCX has not completed, even if nobody waits for it any more."""
        return [pending.done for pending in self._pending if pending.owner is owner]

    def close(self) -> None:
        self._closed = True
        self._loop.remove_reader(self._fd)
        if self._scheduled is not None:
            self._scheduled.cancel()

    def _kicked(self) -> None:
        self._scheduled = None
        self._progress()

    def _progress(self) -> None:
        bulk = any(pending.bulk for pending in self._pending)
        if bulk:
            self._spin()
        self._worker.progress()
        self._resolve()
        lingering = bulk and time.perf_counter() - self._moved_at < LINGER_S
        # Armed means: whatever comes from now on makes the descriptor readable.
        if self._polling or lingering or not self._worker.arm():
            self.kick()

    def _spin(self) -> None:
        now = time.perf_counter()
        end, idle_after = now + MAX_SPIN_S, now + SPIN_S
        while now < min(end, idle_after):
            moved = self._worker.progress_once()
            now = time.perf_counter()
            if moved:
                self._moved_at = now
                idle_after = now + SPIN_S
        # Not with sched_yield: a thread that yields often falls so far behind the model's, on the same core,
        # that Linux then lets it wait for many milliseconds.

    def _resolve(self) -> None:
        under_way = []
        for pending in self._pending:
            if pending.request.completed:
                _settle(pending)
            else:
                under_way.append(pending)
        self._pending = under_way


def _settle(pending: _Pending) -> None:
    if pending.done.done():
        return
    try:
        pending.request.check_error()
    except ucp.UCXError as error:
        pending.done.set_exception(error)
        pending.done.exception()  # nobody may be waiting any more
    else:
        pending.done.set_result(None)


class UcxEndpoint:
    """One connection. Made by UcxTransport; messages go to the peer's prefix and come to ours."""

    def __init__(
        self, progress: _Progress, endpoint: Any, prefix: int, on_close: Callable[[Any], None]
    ) -> None:
        self._progress = progress
        self._endpoint = endpoint
        self._prefix = prefix
        self._peer_prefix = 0
        self._on_close = on_close
        self._closing: asyncio.Task[None] | None = None

    @property
    def alive(self) -> bool:
        return self._closing is None and bool(self._endpoint.alive)

    async def greet(self, timeout_s: float) -> None:
        """Tell the peer our prefix and learn its own. Raises KVPeerLost, KVTimeout."""
        theirs = bytearray(_HELLO.size)
        try:
            async with asyncio.timeout(timeout_s):
                await self._run(
                    lambda array: self._endpoint.stream_send(array), _HELLO.pack(_MAGIC, self._prefix)
                )
                await self._run(lambda array: self._endpoint.stream_recv(array), theirs)
        except TimeoutError:
            raise KVTimeout(f"no greeting from the KV peer within {timeout_s} s") from None
        magic, self._peer_prefix = _HELLO.unpack(theirs)
        if magic != _MAGIC:
            raise KVPeerLost("what answers there is not a KV endpoint of ours")

    async def send(self, buffer: Buffer, tag: int) -> None:
        ucx_tag = ucp.UCXXTag(self._peer_prefix << _TAG_BITS | tag)
        await self._run(lambda array: self._endpoint.tag_send(array, ucx_tag), buffer)

    async def recv(self, buffer: Buffer, tag: int) -> None:
        ucx_tag = ucp.UCXXTag(self._prefix << _TAG_BITS | tag)
        await self._run(lambda array: self._endpoint.tag_recv(array, ucx_tag), buffer)

    async def close(self) -> None:
        if self._closing is None:
            self._closing = asyncio.get_running_loop().create_task(self._close())
        await asyncio.shield(self._closing)

    async def _run(self, start: Callable[[Any], Any], buffer: Buffer) -> None:
        if not self.alive:
            raise KVPeerLost("the KV endpoint is closed")
        array = Array(buffer)
        try:
            # Shielded: giving up the wait leaves the request, and so the buffer, with UCX.
            await asyncio.shield(self._progress.submit(start(array), array, self))
        except ucp.UCXMessageTruncatedError as error:
            raise KVTransferError(f"a KV message was longer than its buffer: {error}") from error
        except ucp.UCXError as error:
            raise KVPeerLost(f"the KV endpoint broke: {error}") from error

    async def _close(self) -> None:
        # Cancels what is pending and closes by force; may take seconds.
        await asyncio.to_thread(self._endpoint.close_blocking, CLOSE_NS, 1)
        self._progress.kick()
        open_requests = self._progress.of(self)
        if open_requests:
            await asyncio.wait(open_requests)
        self._on_close(self)


class UcxTransport:
    """KVTransport over one UCX worker. `name` is the transport that the newest endpoint's blocks take."""

    def __init__(self, options: UcxOptions, host: str, name: str = "ucx") -> None:
        """`host` is the IP address that peers can reach this process at. Raises ConfigError."""
        if options.progress_mode not in ("", "blocking", "polling"):
            raise ConfigError(f"ucx.progress_mode {options.progress_mode}: use blocking or polling")
        try:
            self._context = ucp.UCXContext(options.config())
            self._worker = ucp.UCXWorker(
                self._context, enable_delayed_submission=False, enable_python_future=False
            )
        except ucp.UCXError as error:
            raise ConfigError(f"UCX does not start with {options.config()}: {error}") from error
        self._progress = _Progress(self._worker, options.progress_mode == "polling")
        self._host = host
        self._name = name
        self.gbps = 0.0
        """What the self-test of this machine saw, in 1e9 bytes/s; 0 where it did not pass."""
        self._loop = asyncio.get_running_loop()
        self._listener: Any = None
        self._on_endpoint: OnEndpoint | None = None
        self._endpoints: list[UcxEndpoint] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._next_prefix = 1
        self._closed = False

    @property
    def name(self) -> str:
        return self._name

    @property
    def address(self) -> str:
        if self._listener is None:
            raise RuntimeError("listen first: only then is there a port")
        return f"{self._host}:{self._listener.port}"

    async def listen(self, on_endpoint: OnEndpoint) -> None:
        self._on_endpoint = on_endpoint
        self._listener = ucp.UCXListener.create(
            worker=self._worker, port=0, cb_func=self._incoming, cb_args=(), deliver_endpoint=True
        )
        self._progress.kick()

    async def connect(self, address: str, timeout_s: float) -> KVEndpoint:
        host, _, port = address.rpartition(":")
        try:
            raw = ucp.UCXEndpoint.create(self._worker, host, int(port), True)
        except (ucp.UCXError, ValueError) as error:
            raise KVPeerLost(f"no KV endpoint at {address}: {error}") from error
        endpoint = self._wrap(raw)
        try:
            await endpoint.greet(timeout_s)
        except BaseException:
            await endpoint.close()
            raise
        self._note_transport(raw)
        return endpoint

    async def close(self) -> None:
        """Close every endpoint and stop listening. Idempotent."""
        if self._closed:
            return
        self._closed = True
        self._listener = None
        await asyncio.gather(*(endpoint.close() for endpoint in list(self._endpoints)))
        while self._tasks:
            await asyncio.wait(self._tasks)
        self._progress.close()

    def _incoming(self, raw: Any) -> None:
        # Called while UCX makes progress, which an endpoint's close also does in a thread of its own.
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._accept, raw)

    def _accept(self, raw: Any) -> None:
        task = self._loop.create_task(self._serve(self._wrap(raw)))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _serve(self, endpoint: UcxEndpoint) -> None:
        assert self._on_endpoint is not None
        try:
            await endpoint.greet(HANDSHAKE_S)
            self._note_transport(endpoint._endpoint)
            await self._on_endpoint(endpoint)
        except KVTransferError as error:
            _log.info("KV peer did not get through", error=error.message)
        except Exception:
            _log.exception("serving a KV peer failed")  # costs that peer its endpoint, nobody else
        finally:
            await endpoint.close()

    def _wrap(self, raw: Any) -> UcxEndpoint:
        prefix = self._next_prefix
        self._next_prefix = prefix % _MAX_PREFIX + 1
        endpoint = UcxEndpoint(self._progress, raw, prefix, self._endpoints.remove)
        self._endpoints.append(endpoint)
        return endpoint

    def _note_transport(self, raw: Any) -> None:
        name = transport_of(raw.handle) if raw.alive else ""
        if name and name != self._name:
            _log.info("KV transport", transport=name, before=self._name)
            self._name = name


async def open_ucx(settings: EngineSettings, metrics: WorkerMetrics) -> UcxTransport:
    """The transport of a worker, with the settings that were fastest on this machine.

    Raises ConfigError when UCX does not start, or `require_transport` is not what would be used.
    """
    tried = candidates(settings.ucx)
    test = await self_test(tried, settings.cache_path)
    if test is None:
        _log.warning("no UCX setting passed the self-test; KV goes as UCX chooses")
        test = SelfTest(tried[-1], 0.0, "unknown")
    wanted = settings.require_transport
    if wanted and test.transport != wanted:
        raise ConfigError(f"require_transport is {wanted}, but KV would go over {test.transport}")
    _log.info("UCX self-test", transport=test.transport, gbps=round(test.gbps, 2), options=test.options)
    metrics.kv_transfer_gbps(test.transport).set(test.gbps)
    transport = UcxTransport(test.options, settings.reachable_host, test.transport)
    transport.gbps = test.gbps
    return transport
