"""Ending an attempt on another instance for certain: the abort is repeated until answered or moot.

Knows nothing of what an attempt is.
"""

import asyncio

from common.clock import Clock
from common.errors import ControlDisconnected, ControlError, ControlTimeout, MessageInvalid, NoResponders
from common.ids import InstanceRef
from common.messages.generation import Abort, Accepted
from common.routing.cluster_view import ClusterView
from common.runtime.bus import MessageBus

REPEAT_S = 0.5


async def abort_until_answered(
    bus: MessageBus,
    view: ClusterView,
    clock: Clock,
    target: InstanceRef,
    abort: Abort,
) -> None:
    """Send `abort` every 0.5 s until the target answers, is another incarnation, or the time is over.

    Who seems dead is told when it comes back: it may still hold what was taken from it. Never raises: when
    this returns, the target holds nothing of the attempt or soon notices by itself.
    """
    until = clock.now() + abort.time_left_s
    while clock.now() < until:
        known = view.get(target) is not None
        if view.state(target) == "dead":
            if not known:
                return
            await asyncio.sleep(REPEAT_S)
            continue
        try:
            await bus.request(bus.subjects.abort(target.instance), abort, Accepted, timeout_s=REPEAT_S)
            return
        except ControlTimeout:
            continue
        except NoResponders:
            if not known:
                return
            await asyncio.sleep(REPEAT_S)
        except (ControlDisconnected, MessageInvalid):
            await asyncio.sleep(REPEAT_S)
        except ControlError:
            return
