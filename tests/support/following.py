"""Greedy tokens of a cluster against those of transformers, which float32 leaves open at ties only."""

from tests.support.real_cluster import RealCluster
from tests.support.reference import Expected


async def follow(cluster: RealCluster, expected: Expected) -> None:
    """Compare token by token; after a tie decided the other way, ask again from the reference's token."""
    count, done = len(expected.tokens), 0
    while done < count:
        got = await cluster.greedy(expected.prompt + expected.tokens[:done], count - done)
        for token in got:
            position, done = done, done + 1
            if token != expected.tokens[position]:
                where = f"output {position} of a prompt of {len(expected.prompt)} tokens"
                assert token in expected.right[position], where
                break
