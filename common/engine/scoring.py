"""Cutting a step into several that compute the same, a piece at a time.

So that the logits of whole prompts never lie in memory at once (100 MB for 500 tokens of a vocabulary of
50,000), or no token shares a pass with another. Knows nothing of logits.
"""

from collections.abc import Iterator
from collections.abc import Sequence as Seq
from dataclasses import replace

from common.engine.runner import PlanRow


def pieces(rows: Seq[PlanRow], limit: int) -> list[list[PlanRow]]:
    """`rows` as steps to be made one after the other, none with more than `limit` tokens of rows to score.

    What need not be scored is in the first. Pieces of one row are in order, and only its last is sampled.
    """
    steps: list[list[PlanRow]] = [[row for row in rows if not row.scored]]
    room = limit
    for row in rows:
        if not row.scored:
            continue
        for begin in range(row.start, row.start + row.count, limit):
            count = min(limit, row.start + row.count - begin)
            if count > room:
                steps.append([])
                room = limit
            last = begin + count == row.start + row.count
            steps[-1].append(replace(row, start=begin, count=count, sample=row.sample and last))
            room -= count
    return [step for step in steps if step]


def tokens_of(row: PlanRow) -> Iterator[PlanRow]:
    """`row`, a token at a time."""
    last = row.start + row.count - 1
    for position in range(row.start, last + 1):
        yield replace(row, start=position, count=1, sample=row.sample and position == last)
