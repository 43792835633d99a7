"""What a worker's engine holds, as its beats tell it. Knows nothing of who asks and why."""

from common.engine.engine import Engine
from common.messages.cluster import LoadReport


def load_of(engine: Engine, *, waiting_for_kv: int, waiting_tokens: int = 0) -> LoadReport:
    """`waiting_for_kv` requests are outside the engine; `waiting_tokens` as in LoadReport."""
    scheduler = engine.scheduler
    return LoadReport(
        requests_queued=scheduler.num_waiting,
        requests_running=scheduler.num_running,
        requests_waiting_for_kv=waiting_for_kv,
        queued_tokens=scheduler.queued_tokens + waiting_tokens,
        running_tokens=scheduler.running_tokens,
        free_blocks=scheduler.pool.num_free,
        step_ms=engine.last_step_ms,
        waiting_tokens=waiting_tokens,
        cost=engine.step_times.cost(),
        residence_s=engine.residence_s,
    )
