"""What one cache that never forgets would find of a trace's prompts. Pure."""

from bench.traces import Trace


def ideal_hit_rate(trace: Trace) -> float:
    """The share of prompt tokens whose KV an earlier request computed, in full blocks, as if at once.

    As in our own cache the last token of a prompt is always computed. 0 for a trace silent on contents.
    """
    seen: set[int] = set()
    hits = total = 0
    for request in trace.requests:
        total += request.prompt_tokens
        usable = request.blocks[: (request.prompt_tokens - 1) // trace.block_tokens]
        known = next((i for i, block in enumerate(usable) if block not in seen), len(usable))
        hits += known * trace.block_tokens
        seen.update(request.blocks[: request.prompt_tokens // trace.block_tokens])
    return hits / total if total else 0.0
