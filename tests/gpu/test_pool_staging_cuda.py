"""KV blocks of a GPU's pool through a KV pool and back."""

from typing import Any

import pytest
import torch

from common.engine.pool_staging import staged
from common.engine.runner_torch import TorchKVBuffer
from common.ids import BlockId
from common.kv.layout import KVLayout
from tests.support.memory_pool import MemoryPool
from tests.support.pool_worker import name

pytestmark = pytest.mark.gpu

LAYOUT = KVLayout(kv_heads=3, num_layers=30, block_size=16, head_dim=64, dtype="bfloat16")
COUNT = 40


async def test_blocks_come_back_as_they_were() -> None:
    source: Any = torch.randn(LAYOUT.pool_shape(COUNT), device="cuda").bfloat16()
    target = torch.zeros_like(source)
    torch.cuda.synchronize()
    here, there = TorchKVBuffer(source, LAYOUT), TorchKVBuffer(target, LAYOUT)
    store = MemoryPool(delay_s=0)
    names = [name(number) for number in range(COUNT)]
    blocks = [BlockId(number) for number in range(COUNT)]
    assert await staged(store, here, 2.0).publish(names, [here.block(block) for block in blocks]) == COUNT
    assert await staged(store, there, 2.0).load(names, [there.block(block) for block in blocks]) == COUNT
    assert torch.equal(source, target)
