"""Every kind of message of docs/protocol.md is lost once: the answer is right and nothing is left behind."""

import asyncio

import pytest

from common.engine.runner_fake import FakeModel
from common.messages.generation import SamplingParams
from services.gateway.request import ChoiceSpec, Generation
from tests.support.sim_cluster import SimCluster
from tests.support.virtual_loop import run_virtual

MODEL = FakeModel()
SAMPLING = SamplingParams(max_tokens=20, seed=5)
PROMPTS = [[(11 * n + i) % MODEL.vocab_size for i in range(n)] for n in (3, 40, 200)]
ANSWERS = [MODEL.expected_tokens(prompt, SAMPLING) for prompt in PROMPTS]
REPAIRED_WITHIN_S = 3.0
"""Of virtual time; without a loss the three answers take under a second."""

INBOX = "_INBOX.galley.sim"
LOSSES = [
    ("route", ""),
    ("route.ok", ""),
    ("route.decode", ""),
    ("route.decode.ok", ""),
    ("job", ""),
    ("accepted", f"{INBOX}.job.prefill-0"),
    ("handoff", ""),
    ("accepted", f"{INBOX}.handoff.decode-0"),
    ("bound", ""),
    ("tokens", "galley.sim.stream"),
    ("decoding", ""),
    ("finish", ""),
    ("beat.worker", ""),
    ("beat.router", ""),
    ("beat.gateway", ""),
]


@pytest.mark.parametrize(("kind", "subject"), LOSSES)
def test_one_lost_message_of_a_kind_changes_no_answer(kind: str, subject: str) -> None:
    async def main() -> None:
        async with SimCluster(prefill=1, decode=1).running() as cluster:
            lost = cluster.faults.drop(kind, subject=subject)
            async with asyncio.timeout(REPAIRED_WITHIN_S):
                assert await cluster.ask_all(PROMPTS, SAMPLING) == ANSWERS
            await asyncio.sleep(1)  # the beats may come after the answers
            assert lost.hits == 1

    run_virtual(main())


@pytest.mark.parametrize(("kind", "subject"), LOSSES)
def test_a_kind_that_is_lost_again_and_again_is_repaired_in_the_end(kind: str, subject: str) -> None:
    async def main() -> None:
        async with SimCluster(prefill=2, decode=2).running() as cluster:
            lost = cluster.faults.drop(kind, subject=subject, times=3)
            async with asyncio.timeout(10 * REPAIRED_WITHIN_S):
                assert await cluster.ask_all(PROMPTS, SAMPLING) == ANSWERS
            await asyncio.sleep(1)
            assert lost.hits

    run_virtual(main())


def test_a_lost_resend_is_asked_for_again() -> None:
    async def main() -> None:
        async with SimCluster().running() as cluster:
            frame = cluster.faults.drop("tokens", skip=3)
            resend = cluster.faults.drop("resend")
            async with asyncio.timeout(REPAIRED_WITHIN_S):
                assert await cluster.ask_all(PROMPTS, SAMPLING) == ANSWERS
            assert (frame.hits, resend.hits) == (1, 1)

    run_virtual(main())


@pytest.mark.parametrize("answered", [False, True], ids=["abort", "its answer"])
def test_a_lost_abort_is_repeated_until_nothing_is_held(answered: bool) -> None:
    async def main() -> None:
        async with SimCluster().running() as cluster:
            if answered:
                lost = cluster.faults.drop("accepted", subject=f"{INBOX}.abort", times=2)
            else:
                lost = cluster.faults.drop("abort", times=2)
            sampling = SamplingParams(max_tokens=2000, seed=5)
            choice = ChoiceSpec(0, tuple(PROMPTS[1]), sampling)
            gateway = cluster.gateway
            reply = gateway.submit(Generation(gateway.new_request_id(), (choice,)))
            async for _ in reply:
                break
            reply.close()
            await asyncio.sleep(2)
            assert lost.hits
            cluster.assert_idle()

    run_virtual(main())


@pytest.mark.parametrize("kind", ["job", "handoff"])
def test_the_only_worker_that_did_not_answer_is_asked_again(kind: str) -> None:
    async def main() -> None:
        async with SimCluster(prefill=1, decode=1).running() as cluster:
            lost = cluster.faults.drop(kind, times=2)  # the message and its one repetition
            async with asyncio.timeout(2 * REPAIRED_WITHIN_S):
                assert await cluster.ask(PROMPTS[1], SAMPLING) == ANSWERS[1]
            assert lost.hits == 2

    run_virtual(main())
