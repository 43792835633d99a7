"""A KVExporter over UCX in a process of its own: `python -m tests.support.ucx_exporter OPTIONS`.

Speaks lines of JSON. Out: {"address"}, then per request {"handoff", "digest"}, at the end {"released"}.
In: {"lease": number of blocks, "ready": of them, "finish": bool}.
"""

import asyncio
import hashlib
import sys
from typing import Any

import numpy as np
import orjson

from common.clock import SystemClock
from common.ids import AttemptKey, BlockId, RequestId, SystemIds
from common.kv.exporter import KVExporter
from common.kv.layout import KVLayout
from common.kv.wire import FinalResult, FirstToken
from common.messages import codec
from common.messages.generation import SamplingParams
from common.messages.handoff import KVHandoff
from common.transport.ucx import UcxTransport
from common.transport.ucx_selftest import UcxOptions
from tests.support.kv_pair import FINGERPRINT, ref

LAYOUT = KVLayout(kv_heads=3, num_layers=30, block_size=16, head_dim=64, dtype="bfloat16")
"""The default model's: 368,640 bytes a block."""
NUM_BLOCKS = 64
READER = ref("decode")


class ArrayPool:
    """A KVBuffer over one numpy array, as the torch runner's is over one tensor."""

    def __init__(self, num_blocks: int, seed: int | None = None) -> None:
        shape = (num_blocks, LAYOUT.block_bytes)
        random = np.random.default_rng(seed)
        self.array = np.zeros(shape, np.uint8) if seed is None else random.integers(0, 256, shape, np.uint8)
        self.released = 0

    @property
    def num_blocks(self) -> int:
        return len(self.array)

    @property
    def block_bytes(self) -> int:
        return LAYOUT.block_bytes

    def block(self, block: BlockId) -> object:
        return self.array[block]

    def release(self, blocks: object) -> None:
        self.released += len(blocks)  # type: ignore[arg-type]

    def digest(self, num_blocks: int) -> str:
        return hashlib.blake2b(self.array[:num_blocks].tobytes(), digest_size=16).hexdigest()


def say(message: dict[str, Any]) -> None:
    sys.stdout.write("# " + orjson.dumps(message).decode() + "\n")
    sys.stdout.flush()


async def main() -> None:
    transport = UcxTransport(UcxOptions(**orjson.loads(sys.argv[1])), "127.0.0.1")
    pool, me, clock = ArrayPool(NUM_BLOCKS, seed=7), ref("prefill"), SystemClock()
    exporter = KVExporter(
        transport=transport,
        buffer=pool,
        layout=LAYOUT,
        fingerprint=FINGERPRINT,
        me=me,
        clock=clock,
        ids=SystemIds(),
        secret=b"secret",
        release=pool.release,
        kv_timeout_s=10.0,
    )
    await transport.listen(exporter.serve)
    say({"address": transport.address})
    number = 0
    while line := await asyncio.to_thread(sys.stdin.readline):
        wanted, number = orjson.loads(line), number + 1
        count, key = wanted["lease"], AttemptKey(RequestId(f"r{number}"), 1, 0)
        blocks = [BlockId(index) for index in range(count)]
        lease = exporter.start(key, blocks, count * 16, clock.now() + 60, wanted["ready"] * 16)
        if wanted["finish"]:
            exporter.finish(lease, FinalResult((FirstToken(0, number),)))
        handoff = KVHandoff(
            key=key,
            gateway=READER.instance,
            prefill=me,
            grant=exporter.bind(lease, READER),
            sources=(exporter.source,),
            fingerprint=FINGERPRINT,
            prompt_ids=tuple(range(count * 16)),
            output_ids=(),
            sampling=SamplingParams(max_tokens=1, seed=1),
            time_left_s=60.0,
            age_s=0.0,
        )
        say({"handoff": codec.encode(handoff).decode(), "digest": pool.digest(count)})
    await exporter.close()
    await transport.close()
    say({"released": pool.released})


if __name__ == "__main__":
    asyncio.run(main())
