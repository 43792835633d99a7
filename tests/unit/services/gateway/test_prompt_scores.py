"""Log probabilities of a prompt come before all else of their choice, whatever frames and attempts do."""

from common.messages.generation import Job, Route
from common.messages.stream import FailedItem, FinishItem, PromptItem, TokenLogprobs, TokensItem
from services.gateway.request import Delta
from tests.support.scripted_cluster import (
    ScriptedCluster,
    ScriptedWorker,
    bind,
    generation,
    go_on,
    play,
    read,
    reasons,
    text_of,
)

SECOND, THIRD = TokenLogprobs(-1.0, ((2, -1.0),)), TokenLogprobs(-2.0, ())
"""Of the prompt "abc", whose first token has none."""


def tell(worker: ScriptedWorker, job: Job, *scores: TokenLogprobs, index: int = 1) -> None:
    worker.emit(job.gateway, PromptItem(job.key, index, scores))


def test_output_waits_for_the_last_of_them() -> None:
    async def story(made: ScriptedCluster) -> None:
        p, d = made.workers["p"], made.workers["d"]
        reply = made.gateway.submit(generation(made, prompt_logprobs=1))
        [job] = await p.jobs.wait_for(1)
        assert job.sampling.prompt_logprobs == 1
        tell(p, job, THIRD, index=2)
        bind(p, job, d)
        go_on(d, job, 2)
        tell(p, job, SECOND)
        tell(p, job, SECOND, THIRD)
        deltas = await read(reply)
        assert deltas[0] == Delta(0, "", (), prompt=(SECOND, THIRD))
        assert [delta.prompt for delta in deltas[1:]] == [()] * (len(deltas) - 1)
        assert text_of(deltas) == "ab"
        assert reasons(deltas) == ["length"]

    play(story)


def test_an_attempt_lost_before_the_last_of_them_is_forgotten_with_its_output() -> None:
    async def story(made: ScriptedCluster) -> None:
        p, d = made.workers["p"], made.workers["d"]
        p2 = made.worker("p2", "prefill")
        made.routes = [Route(p.ref, d.ref), Route(p2.ref, d.ref)]
        reply = made.gateway.submit(generation(made, prompt_logprobs=1))
        [job] = await p.jobs.wait_for(1)
        tell(p, job, THIRD, index=2)
        bind(p, job, d)
        p.emit(job.gateway, FailedItem(job.key, "worker_failed", "lost", True))
        [again] = await p2.jobs.wait_for(1)
        assert (again.output_ids, again.sampling.prompt_logprobs) == ((), 1)
        tell(p2, again, SECOND)
        bind(p2, again, d)
        go_on(d, again, 2)
        deltas = await read(reply)
        assert deltas[0].prompt == (SECOND, THIRD)
        assert text_of(deltas) == "ab"

    play(story)


def test_once_told_they_are_not_asked_for_again() -> None:
    async def story(made: ScriptedCluster) -> None:
        p, d = made.workers["p"], made.workers["d"]
        p2 = made.worker("p2", "prefill")
        made.routes = [Route(p.ref, d.ref), Route(p2.ref, d.ref)]
        reply = made.gateway.submit(generation(made, prompt_logprobs=1))
        [job] = await p.jobs.wait_for(1)
        tell(p, job, SECOND, THIRD)
        bind(p, job, d)
        p.emit(job.gateway, FailedItem(job.key, "worker_failed", "lost", True))
        [again] = await p2.jobs.wait_for(1)
        assert (again.output_ids, again.sampling.prompt_logprobs) == ((1,), None)
        go_on(d, again, 2)
        deltas = await read(reply)
        assert [delta.prompt for delta in deltas if delta.prompt] == [(SECOND, THIRD)]
        assert text_of(deltas) == "ab"

    play(story)


def test_with_max_tokens_0_the_token_that_comes_all_the_same_is_nobody_s() -> None:
    async def story(made: ScriptedCluster) -> None:
        p = made.workers["p"]
        reply = made.gateway.submit(generation(made, max_tokens=0, prompt_logprobs=1))
        [job] = await p.jobs.wait_for(1)
        tell(p, job, SECOND, THIRD)
        p.emit(job.gateway, TokensItem(job.key, 0, (1,)))
        p.emit(job.gateway, FinishItem(job.key, "length", 1))
        deltas = await read(reply)
        assert deltas == [Delta(0, "", (), prompt=(SECOND, THIRD)), Delta(0, "", (), "length")]
        assert (reply.usage.prompt_tokens, reply.usage.completion_tokens) == (3, 0)

    play(story)
