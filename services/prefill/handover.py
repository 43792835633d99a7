"""What prefill asks of others to hand a request over: which decode, and whether that one takes the handoff.

Both with deadlines, as messages get lost. Knows nothing of what follows from an answer.
"""

from dataclasses import replace

from common.errors import ControlError, ControlTimeout, GalleyError, MessageInvalid
from common.ids import InstanceRef
from common.kv.exporter import KVExporter
from common.messages.generation import Accepted, DecodeRoute, DecodeRouteRequest, Job, Refused, Rejected
from common.messages.handoff import KVHandoff, LeaseGrant
from common.runtime.bus import MessageBus

ROUTE_DECODE_S = 0.05
"""How long the choice of a decode may take before the job's fallback is used (design.md 6)."""
HANDOFF_ANSWER_S = 0.5


async def choose_decode(
    bus: MessageBus, request: DecodeRouteRequest, fallback: InstanceRef | None
) -> InstanceRef | None:
    """The router's choice, None if it has none; `fallback` when no router answers in time.

    Never one that the request excludes.
    """
    try:
        answer = await bus.request(
            bus.subjects.route_decode, request, DecodeRoute, Rejected, timeout_s=ROUTE_DECODE_S
        )
    except (ControlError, MessageInvalid):
        return fallback if fallback not in request.exclude else None
    return answer.decode if isinstance(answer, DecodeRoute) else None


async def offer(bus: MessageBus, decode: InstanceRef, handoff: KVHandoff) -> Accepted | Refused | GalleyError:
    """The answer to a handoff, offered twice unchanged; or why there is none."""
    silence = ControlTimeout("no offer was made")
    for _ in range(2):
        try:
            return await bus.request(
                bus.subjects.handoff(decode.instance), handoff, Accepted, Refused, timeout_s=HANDOFF_ANSWER_S
            )
        except ControlTimeout as error:
            silence = error
        except (ControlError, MessageInvalid) as error:
            return error
    return silence


def handoff_of(
    job: Job, grant: LeaseGrant, exporter: KVExporter, fingerprint: str, compression: str
) -> KVHandoff:
    """What the decode is told: `job`, with its times as of now, and where its KV is."""
    return KVHandoff(
        key=job.key,
        gateway=job.gateway,
        prefill=job.worker,
        grant=grant,
        sources=(exporter.source,),
        fingerprint=fingerprint,
        prompt_ids=job.prompt_ids,
        output_ids=job.output_ids,
        sampling=replace(job.sampling, prompt_logprobs=None),  # told already
        time_left_s=job.time_left_s,
        age_s=job.age_s,
        priority=job.priority,
        cache_salt=job.cache_salt,
        slo=job.slo,
        compression=compression,
        compressions=tuple(exporter.codecs),
    )
