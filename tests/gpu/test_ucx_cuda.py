"""KV blocks from one GPU pool to another over UCX, both in this process; where ucxx is installed."""

import asyncio
from typing import Any

import pytest
import torch

from common.engine.runner_torch import TorchKVBuffer
from common.ids import BlockId
from common.kv.layout import KVLayout
from common.transport.kv import KVEndpoint

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("default")]

LAYOUT = KVLayout(kv_heads=3, num_layers=30, block_size=16, head_dim=64, dtype="bfloat16")


async def test_blocks_between_gpu_pools() -> None:
    pytest.importorskip("ucxx")
    source: Any = torch.randn(LAYOUT.pool_shape(4), device="cuda").bfloat16()  # and a context before UCX
    target = torch.zeros_like(source)
    torch.cuda.synchronize()
    from common.transport.ucx import UcxTransport
    from common.transport.ucx_selftest import UcxOptions

    server, client = (UcxTransport(UcxOptions(), "127.0.0.1") for _ in range(2))
    here, there = TorchKVBuffer(source, LAYOUT), TorchKVBuffer(target, LAYOUT)

    async def send(endpoint: KVEndpoint) -> None:
        for number in range(4):
            await endpoint.send(here.block(BlockId(number)), number)

    try:
        await server.listen(send)
        endpoint = await client.connect(server.address, 10)
        async with asyncio.timeout(30):
            for number in range(4):
                await endpoint.recv(there.block(BlockId(3 - number)), number)
        torch.cuda.synchronize()
        assert torch.equal(target.flip(0), source)
    finally:
        await client.close()
        await server.close()
