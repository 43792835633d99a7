"""Where an attempt is, as a decode worker's gauges show it."""

from common.engine.sequence import Sequence
from common.ids import AttemptKey, InstanceId, RequestId, SequenceId
from common.messages.generation import SamplingParams
from services.decode.decoding import Decoding

KEY = AttemptKey(RequestId("r"), 2, 0)


def test_a_job_that_goes_on_with_earlier_output_is_queued_until_it_is_taken_up() -> None:
    held = Decoding(KEY, InstanceId("g"), deadline=60.0, received=0.0)
    held.seq = Sequence(
        id=SequenceId(1),
        key=KEY,
        tokens=[5, 6, 7, 8],
        num_prompt=3,
        sampling=SamplingParams(max_tokens=9, seed=1),
        arrival=0.0,
        deadline=60.0,
    )
    stages = [held.stage]
    held.started = 1.0
    stages.append(held.stage)
    held.seq.num_computed = 4
    stages.append(held.stage)
    assert stages == ["queued", "prefilling", "decoding"]
