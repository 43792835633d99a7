"""The engine's loop: the order of its words, what a failed step costs, and that it ends clean."""

import asyncio
from collections.abc import AsyncIterator, Callable
from collections.abc import Sequence as Seq
from contextlib import asynccontextmanager
from typing import Any

import pytest

from common.clock import LoopClock
from common.engine.engine import Engine
from common.engine.executor import FakeExecutor, ThreadExecutor
from common.engine.runner import BatchPlan, StepExecutor, StepResult
from common.engine.runner_fake import FakeModel, FakeRunner
from common.engine.scheduler import StepOutput
from common.engine.sequence import Sequence
from common.errors import GalleyError, InvalidRequest, StepFailed, WorkerFailed
from common.ids import BlockId, SequenceId
from common.messages.generation import SamplingParams
from common.messages.stream import TokenLogprobs
from tests.support.leaks import assert_pool_idle
from tests.support.sequences import greedy, make_scheduler, make_sequence
from tests.support.virtual_loop import run_virtual

MODEL = FakeModel()


class Recorder:
    """An EngineSink that writes down what it hears, and wakes whoever waits for an end."""

    def __init__(self) -> None:
        self.heard: list[tuple[str, int, int]] = []
        self.tokens: dict[int, list[int]] = {}
        self.scores: dict[int, list[TokenLogprobs]] = {}
        self.errors: dict[int, GalleyError] = {}
        self.ended: dict[int, asyncio.Event] = {}
        self.num_executed = 0
        self.on_started: Callable[[Sequence], None] = lambda seq: None

    def started(self, seq: Sequence) -> None:
        self.heard.append(("started", seq.id, len(seq.blocks)))
        self.on_started(seq)

    def executed(self, plan: BatchPlan) -> None:
        self.num_executed += plan.num_tokens

    def progressed(self, seq: Sequence) -> None:
        self.heard.append(("progressed", seq.id, seq.num_computed))

    def scored(self, seq: Sequence, index: int, logprobs: Seq[TokenLogprobs]) -> None:
        self.heard.append(("scored", seq.id, index))
        self.scores.setdefault(seq.id, []).extend(logprobs)

    def stepped(self, outputs: Seq[StepOutput]) -> None:
        for output in outputs:
            self.heard.append(("token", output.seq.id, output.index))
            self.tokens.setdefault(output.seq.id, []).append(output.token)
            if output.finish is not None or output.handed_over:
                self.end(output.seq.id).set()

    def failed(self, seq: Sequence, error: GalleyError) -> None:
        self.errors[seq.id] = error
        self.end(seq.id).set()

    def end(self, number: int) -> asyncio.Event:
        return self.ended.setdefault(number, asyncio.Event())


@asynccontextmanager
async def running(sink: Recorder, executor: StepExecutor, num_blocks: int = 16) -> AsyncIterator[Engine]:
    engine = Engine(make_scheduler(MODEL, num_blocks), executor, sink, LoopClock(asyncio.get_running_loop()))
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(engine.run())
        yield engine
        await engine.close()
    assert engine.scheduler.is_empty
    assert_pool_idle(engine.scheduler.pool)


def fake_executor(
    fail_when: Callable[[BatchPlan], bool] | None = None, num_blocks: int = 16, seconds: float = 0.01
) -> FakeExecutor:
    return FakeExecutor(FakeRunner(MODEL, num_blocks, fail_when), lambda plan: seconds)


def test_words_come_in_order_and_time_is_the_step_s() -> None:
    async def main() -> None:
        sink = Recorder()
        async with running(sink, fake_executor()) as engine:
            engine.add(make_sequence(1, [5] * 20, greedy(2)))
            await sink.end(1).wait()
            assert engine.last_step_ms == pytest.approx(10.0)
            assert engine.residence_s == pytest.approx(0.03)
            assert engine.step_times.cost().base_s == pytest.approx(0.01, rel=0.1)
        assert sink.heard == [
            ("started", 1, 2),
            ("progressed", 1, 16),
            ("progressed", 1, 20),
            ("token", 1, 0),
            ("progressed", 1, 21),
            ("token", 1, 1),
        ]
        assert sink.tokens[1] == MODEL.expected_tokens([5] * 20, greedy(2))

    run_virtual(main())


async def test_a_thread_computes_while_the_loop_is_free() -> None:
    sink = Recorder()
    prompts = {number: [number] * (3 * number) for number in range(1, 6)}
    async with running(sink, ThreadExecutor(FakeRunner(MODEL, 16))) as engine:
        for number, prompt in prompts.items():
            engine.add(make_sequence(number, prompt, greedy(20)))
        for number in prompts:
            await sink.end(number).wait()
    assert sink.tokens == {n: MODEL.expected_tokens(prompt, greedy(20)) for n, prompt in prompts.items()}


def test_a_failed_step_costs_its_sequences_and_nothing_else() -> None:
    async def main() -> None:
        sink = Recorder()
        async with running(sink, fake_executor(fail_when=lambda plan: plan.step == 1)) as engine:
            engine.add(make_sequence(1, [1] * 4))
            await sink.end(1).wait()
            assert_pool_idle(engine.scheduler.pool)
            engine.add(make_sequence(2, [2] * 4))
            await sink.end(2).wait()
        assert isinstance(sink.errors[1], StepFailed)
        assert sink.tokens == {2: MODEL.expected_tokens([2] * 4, greedy(8))}

    run_virtual(main())


async def test_any_error_of_a_runner_is_a_failed_step() -> None:
    def explode(plan: BatchPlan) -> bool:
        raise RuntimeError("out of memory")

    sink = Recorder()
    async with running(sink, ThreadExecutor(FakeRunner(MODEL, 16, explode))) as engine:
        engine.add(make_sequence(1, [1] * 4))
        await sink.end(1).wait()
    assert "RuntimeError: out of memory" in sink.errors[1].message


def test_an_abort_during_a_step_is_silent() -> None:
    async def main() -> None:
        sink = Recorder()
        async with running(sink, fake_executor()) as engine:
            sink.on_started = lambda seq: sink.end(-1).set()
            engine.add(make_sequence(1, [1] * 4))
            await sink.end(-1).wait()
            assert engine.abort(SequenceId(1))
            assert not engine.abort(SequenceId(1))
            engine.add(make_sequence(2, [2] * 4, greedy(1)))
            await sink.end(2).wait()
        assert [number for what, number, _ in sink.heard if what != "started"] == [2, 2]

    run_virtual(main())


def test_released_blocks_wake_an_engine_that_waits_for_room() -> None:
    async def main() -> None:
        sink = Recorder()
        leased: list[BlockId] = []
        async with running(sink, fake_executor(num_blocks=2), num_blocks=2) as engine:
            pool = engine.scheduler.pool

            def lease(seq: Sequence) -> None:
                pool.retain(seq.blocks)
                leased.extend(seq.blocks)

            sink.on_started = lease
            engine.add(make_sequence(1, [1] * 20, hand_over=True))
            await sink.end(1).wait()
            sink.on_started = lambda seq: None
            engine.add(make_sequence(2, [2] * 4, greedy(3)))
            await asyncio.sleep(1)
            assert 2 not in sink.tokens
            pool.release(leased)
            await sink.end(2).wait()
        assert sink.tokens[2] == MODEL.expected_tokens([2] * 4, greedy(3))

    run_virtual(main())


def test_close_fails_what_is_left() -> None:
    async def main() -> None:
        sink = Recorder()
        async with running(sink, fake_executor()) as engine:
            for number in range(1, 4):
                engine.add(make_sequence(number, [number] * 100, greedy(50)))
            await asyncio.sleep(0.015)
        assert {number: type(error) for number, error in sink.errors.items()} == dict.fromkeys(
            (1, 2, 3), WorkerFailed
        )
        with pytest.raises(WorkerFailed):
            engine.add(make_sequence(4, [1]))

    run_virtual(main())


def test_close_after_a_cancelled_run_frees_the_plan_it_left() -> None:
    async def main() -> None:
        sink = Recorder()
        engine = Engine(
            make_scheduler(MODEL, 16), fake_executor(), sink, LoopClock(asyncio.get_running_loop())
        )
        run = asyncio.create_task(engine.run())
        sink.on_started = lambda seq: sink.end(-1).set()
        engine.add(make_sequence(1, [1] * 4))
        await sink.end(-1).wait()
        run.cancel()
        await asyncio.wait([run])
        assert engine.scheduler.pool.num_used == 1
        await engine.close()
        assert isinstance(sink.errors[1], WorkerFailed)
        assert_pool_idle(engine.scheduler.pool)

    run_virtual(main())


class Picky:
    """A runner that cannot go on with sequence 0."""

    def __init__(self, inner: FakeRunner) -> None:
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def execute(self, plan: BatchPlan) -> StepResult:
        result = self._inner.execute(plan)
        lost = [row.seq for row in plan.rows if row.seq == 0]
        tokens = {seq: token for seq, token in result.tokens.items() if seq not in lost}
        return StepResult(plan.step, tokens, {seq: InvalidRequest("no way on") for seq in lost})


def test_a_sequence_that_fails_costs_no_other() -> None:
    async def main() -> None:
        sink = Recorder()
        async with running(sink, FakeExecutor(Picky(FakeRunner(MODEL, 16)), lambda plan: 0.01)) as engine:
            for number in (0, 1):
                engine.add(make_sequence(number, [1] * 5))
            await sink.end(0).wait()
            await sink.end(1).wait()
            assert isinstance(sink.errors[0], InvalidRequest)
            assert len(sink.tokens[1]) == 8
            assert 0 not in sink.tokens

    run_virtual(main())


def test_scores_are_told_chunk_by_chunk_before_the_token() -> None:
    async def main() -> None:
        sink = Recorder()
        prompt = list(range(1, 36))
        async with running(sink, fake_executor()) as engine:
            engine.add(make_sequence(0, prompt, SamplingParams(0, 0, prompt_logprobs=2)))
            await sink.end(0).wait()
        assert sink.scores[0] == list(MODEL.score(prompt, range(1, 35), 2))
        told = [("scored", 0, 1), ("progressed", 0, 32), ("scored", 0, 17), ("progressed", 0, 35)]
        assert sink.heard[2:] == [*told, ("scored", 0, 33), ("token", 0, 0)]

    run_virtual(main())
