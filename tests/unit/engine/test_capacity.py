"""How large a pool is by default."""

import pytest

from common.engine.capacity import available_memory, num_blocks_for
from common.errors import ConfigError
from common.kv.layout import KVLayout

# The default model: 30 layers x 2 x 3 heads x 16 tokens x 64 x 2 bytes, so 23,040 B a token.
LAYOUT = KVLayout(kv_heads=3, num_layers=30, block_size=16, head_dim=64, dtype="bfloat16")
MIB = 1 << 20


def blocks(available: int, limit: int = 1 << 62, max_num_seqs: int = 64) -> int:
    return num_blocks_for(
        LAYOUT, available, memory_fraction=0.5, max_num_seqs=max_num_seqs, max_model_len=8192, limit=limit
    )


def test_a_block_of_the_default_model() -> None:
    assert LAYOUT.block_bytes == 16 * 23_040


def test_a_fraction_of_what_is_free() -> None:
    assert blocks(1000 * MIB) == 500 * MIB // LAYOUT.block_bytes


def test_no_more_than_the_limit() -> None:
    assert blocks(1000 * MIB, limit=100 * MIB) == 100 * MIB // LAYOUT.block_bytes


def test_no_more_than_all_sequences_could_use() -> None:
    assert blocks(1 << 50, max_num_seqs=2) == 2 * 8192 // 16


def test_too_little_memory_is_an_error() -> None:
    with pytest.raises(ConfigError, match="num_blocks"):
        blocks(MIB)


def test_the_machine_has_memory() -> None:
    assert 64 * MIB < available_memory() < 1 << 50
