"""What one cache that never forgets would find of a trace's prompts. Pure."""

from bench.traces import Trace


def ideal_hit_rate(trace: Trace) -> float:
    """The share of prompt tokens whose KV an earlier request computed, in full blocks, as if at once.

    As in our own cache the last token of a prompt is always computed, and a block is found only behind the
    same blocks as before. 0 for a trace silent on contents.
    """
    known: dict[tuple[int, int], int] = {}
    """A tree of blocks: (number of the one before, its id) to its own number; 0 is the root."""
    hits = total = 0
    for request in trace.requests:
        total += request.prompt_tokens
        usable = (request.prompt_tokens - 1) // trace.block_tokens
        node, found = 0, True
        for index, block in enumerate(request.blocks[: request.prompt_tokens // trace.block_tokens]):
            found = found and (node, block) in known
            if found and index < usable:
                hits += trace.block_tokens
            node = known.setdefault((node, block), len(known) + 1)
    return hits / total if total else 0.0
