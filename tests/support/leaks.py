"""What must be true when everything has ended: no block held."""

from common.kv.block_pool import BlockPool


def assert_pool_idle(pool: BlockPool) -> None:
    """Every block is free or cached; cached ones are only kept on the chance of a hit."""
    assert pool.num_used == 0, f"{pool.num_used} of {pool.num_blocks} KV blocks are still held"
    assert pool.num_free == pool.num_blocks
