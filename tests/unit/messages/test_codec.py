"""Every message survives the wire, and nothing else becomes one."""

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.errors import MessageInvalid
from common.ids import AttemptKey, Incarnation, InstanceId, InstanceRef, LeaseId, RequestId
from common.messages.cluster import (
    GatewayBeat,
    InstanceInfo,
    KVEvents,
    KVSnapshot,
    KVSnapshotRequest,
    LoadReport,
    WorkerBeat,
)
from common.messages.codec import decode, encode
from common.messages.generation import Abort, Accepted, Job, Refused, Route, SamplingParams
from common.messages.handoff import KVHandoff, KVSource, LeaseGrant
from common.messages.stream import (
    BoundItem,
    DecodingItem,
    FailedItem,
    FinishItem,
    Frame,
    PrefillStats,
    TokenLogprobs,
    TokensItem,
)

KEY = AttemptKey(RequestId("r1"), 2, 0)
REF = InstanceRef(InstanceId("decode-0"), Incarnation("c0ffee"))
SAMPLING = SamplingParams(max_tokens=5, seed=1 << 62, logit_bias=((3, -1.5),), logprobs=0)
GRANT = LeaseGrant(LeaseId("l"), 3, REF, "token")
INFO = InstanceInfo(REF, "decode", (1, 1), "http://h:1")

MESSAGES = [
    Job(KEY, InstanceId("g"), REF, None, (1, 2), (), SAMPLING, 5.5, 0.0),
    Route(REF, None),
    Refused("full", "no room"),
    Abort(KEY, 3, "client"),
    KVHandoff(
        KEY, InstanceId("g"), REF, GRANT, (KVSource("a", (0, 3), (0, 30)),), "f", (1,), (2,), SAMPLING, 1, 2
    ),
    Frame(
        REF.instance,
        REF.incarnation,
        1,
        (
            TokensItem(KEY, 0, (5,), (TokenLogprobs(-0.5, ((5, -0.5),)),), PrefillStats(16, 1.0, 2.0)),
            BoundItem(KEY, REF),
            DecodingItem(KEY, 1.5, 368640),
            FinishItem(KEY, "stop", 3, 2),
            FailedItem(KEY, "code", "why", True),
        ),
    ),
    WorkerBeat(INFO, LoadReport(free_blocks=3), (("g", 4),), 7),
    GatewayBeat(INFO, ((REF, 4),)),
    KVEvents(REF, 7, evicted="00" * 16, stored="0f" * 32),
    KVSnapshotRequest(REF.incarnation),
    KVSnapshot(REF, 1, 7, 0, 2, "0f" * 16),
]


@pytest.mark.parametrize("message", MESSAGES, ids=lambda m: type(m).__name__)
def test_a_message_survives_the_wire(message: object) -> None:
    assert decode(encode(message), type(message)) == message


def test_unknown_fields_are_ignored() -> None:
    raw = orjson.loads(encode(Accepted())) | {"from_the_future": 1}
    assert decode(orjson.dumps(raw), Accepted) == Accepted()


def test_absent_fields_take_their_defaults() -> None:
    spelled_out = orjson.loads(encode(MESSAGES[0])) | {"priority": 0, "slo": None}
    absent = {name: value for name, value in spelled_out.items() if name not in ("priority", "slo")}
    assert decode(orjson.dumps(spelled_out), Job) == decode(orjson.dumps(absent), Job) == MESSAGES[0]


def test_a_field_with_its_default_does_not_travel() -> None:
    assert set(orjson.loads(encode(TokensItem(KEY, 0, (5,))))) == {"kind", "key", "index", "token_ids"}


@pytest.mark.parametrize("wrong", [[True, 1], [1.0], [1, [2]]])
def test_a_list_of_numbers_has_nothing_else_in_it(wrong: list[object]) -> None:
    raw = orjson.loads(encode(MESSAGES[0])) | {"prompt_ids": wrong}
    with pytest.raises(MessageInvalid, match="prompt_ids: expected int"):
        decode(orjson.dumps(raw), Job)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"prompt_ids": "abc"}, "prompt_ids"),
        ({"prompt_ids": [1, "2"]}, "prompt_ids"),
        ({"time_left_s": True}, "time_left_s"),
        ({"key": ["r", 1]}, "key"),
        ({"sampling": {"max_tokens": 3}}, "seed"),
    ],
)
def test_a_wrong_field_is_named(change: dict[str, object], named: str) -> None:
    raw = orjson.loads(encode(MESSAGES[0])) | change
    with pytest.raises(MessageInvalid, match=named):
        decode(orjson.dumps(raw), Job)


def test_another_kind_is_refused() -> None:
    with pytest.raises(MessageInvalid, match="accepted"):
        decode(encode(Accepted()), Job)


@given(st.binary(max_size=60))
def test_garbage_is_only_ever_invalid(data: bytes) -> None:
    with pytest.raises(MessageInvalid):
        decode(data, Job, Abort)


def test_kinds_are_unique() -> None:
    kinds = [decode_kind(message) for message in MESSAGES]
    assert len(set(kinds)) == len(kinds)


def decode_kind(message: object) -> str:
    return str(orjson.loads(encode(message))["kind"])
