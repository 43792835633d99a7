"""Cutting a step so that the logits of whole prompts never lie in memory at once.

Log probabilities of a prompt take logits at every position: 100 MB for 500 tokens of a vocabulary of 50,000.
A row that is cut computes the same, a piece at a time. Knows nothing of logits.
"""

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
