"""The nearest pair: KV takes the fastest way there is, unless a queue there costs more than it saves.

A pair's hop is the narrowest of node, rack and zone that both ends have in common. What a hop carries inside
one node is what the workers' self-tests said; between nodes it is a sensible constant, or less where the
self-test already said less.
"""

from collections.abc import Sequence
from typing import Literal

from common.messages.cluster import InstanceInfo
from common.routing.cluster_view import Instance
from common.routing.policies.base import Work, cheapest
from common.routing.policies.least_predicted_ttft import within_a_tenth
from common.routing.prediction import Forecast

Hop = Literal["node", "rack", "zone", "far"]

HOP_GBPS: dict[Hop, float] = {"node": 4.0, "rack": 2.5, "zone": 1.0, "far": 0.1}
"""In 1e9 bytes/s: shared memory; 25 Gbit/s Ethernet; its share of a busy core network; a wide-area link."""
HOP_S: dict[Hop, float] = {"node": 0.0001, "rack": 0.0003, "zone": 0.001, "far": 0.02}
"""What a pull takes besides its bytes: some round trips."""
TOKEN_BYTES = 32_768
"""For workers that do not say how large the KV of a token is."""


def hop(one: InstanceInfo, other: InstanceInfo) -> Hop:
    """The narrowest place that both are in. All unnamed zones are one zone; unnamed racks are none in common.

    A rack is one of its zone, and a node one of its rack: equal names in two zones are two racks.
    """
    if one.zone != other.zone:
        return "far"
    if one.rack == other.rack and one.node and one.node == other.node:
        return "node"
    return "rack" if one.rack and one.rack == other.rack else "zone"


def transfer_s(one: InstanceInfo, other: InstanceInfo, num_tokens: int) -> float:
    """How long the KV of `num_tokens` takes between two workers."""
    way = hop(one, other)
    tested = [info.kv_gbps for info in (one, other) if info.kv_gbps]
    gbps = min(tested) if tested and way == "node" else min([*tested, HOP_GBPS[way]])
    return HOP_S[way] + num_tokens * (one.token_bytes or TOKEN_BYTES) / (gbps * 1e9)


class Nearest:
    """See routing/policies/base.py."""

    def choose(self, candidates: Sequence[Instance], work: Work) -> Instance:
        forecast = Forecast(candidates)

        def way_s(one: Instance) -> float:
            ways = (transfer_s(one.info, partner.info, work.num_tokens) for partner in work.partners)
            return min(ways, default=0.0)

        def cost(one: Instance) -> float:
            return forecast.delay_s(one, work) + way_s(one)

        return cheapest(candidates, cost, within_a_tenth, first=way_s)
