"""What one request leaves behind: its times, the histograms, and one canonical log line.

Knows nothing of how requests are served.
"""

from dataclasses import dataclass

import structlog

from common.errors import GalleyError
from common.observability.metrics import GatewayMetrics
from common.observability.timeline import RequestTimeline, Stage
from services.gateway.request import Generation, Usage

log = structlog.get_logger()


@dataclass(slots=True)
class RequestRecord:
    """The timeline of one request, fed while it runs."""

    generation: Generation
    timeline: RequestTimeline
    metrics: GatewayMetrics
    stage: Stage = "queued"
    migrations: int = 0

    def enter(self, stage: Stage, now: float) -> None:
        if stage != self.stage or not self.timeline.stages:
            self.stage = stage
            self.timeline.enter(stage, now)

    def tokens(self, count: int, now: float) -> None:
        """`count` output tokens arrived together."""
        if count == 0:
            return
        metrics = self.metrics
        metrics.generated_tokens.inc(count)
        if (last := self.timeline.last_token) is not None:
            metrics.itl_seconds.observe(now - last)
        else:
            metrics.ttft_seconds.observe(now - self.timeline.arrived)
        for _ in range(count - 1):
            metrics.itl_seconds.observe(0.0)
        self.timeline.emitted(now, count)

    def migrated(self, choice: int, num_tokens: int, cause: GalleyError) -> None:
        self.migrations += 1
        self.metrics.migrations.inc()
        log.info(
            "choice migrated",
            request_id=self.generation.request,
            choice=choice,
            num_tokens=num_tokens,
            cause=cause.message,
        )

    def close(self, now: float, usage: Usage, attempts: int, error: GalleyError | None, aborted: str) -> None:
        """The request has ended, well (no error), with `error`, or `aborted` for that reason."""
        self.timeline.finish(now)
        status = "aborted" if aborted else "error" if error else "ok"
        self.metrics.requests(status).inc()
        if aborted:
            self.metrics.requests_aborted(aborted).inc()
        timeline = self.timeline
        if status == "ok" and timeline.tpot_s is not None:
            self.metrics.tpot_seconds.observe(timeline.tpot_s)
        log.info(
            "request",
            request_id=self.generation.request,
            client_id=self.generation.client_id,
            status=status,
            aborted=aborted,
            error=error.code if error else "",
            message=error.message if error else "",
            choices=len(self.generation.choices),
            prompt_tokens=usage.prompt_tokens,
            completion_tokens=usage.completion_tokens,
            cached_tokens=usage.cached_tokens,
            attempts=attempts,
            migrations=self.migrations,
            ttft_ms=to_ms(timeline.ttft_s),
            tpot_ms=to_ms(timeline.tpot_s),
            total_ms=to_ms(now - timeline.arrived),
            stages_ms={stage: to_ms(seconds) for stage, seconds in timeline.stage_s().items()},
        )


def to_ms(seconds: float | None) -> float | None:
    """Rounded milliseconds."""
    return None if seconds is None else round(seconds * 1000, 2)
