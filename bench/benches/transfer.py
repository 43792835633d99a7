"""What moving KV costs: our endpoints beside ucx_perftest, and the transfer that a request has to wait for.

First messages of one KV block, 32 in flight, between processes on two cores: ours, and Debian's ucx_perftest.
Then a prefill and a decode of ours on a core each: while eight requests decode, prompts of 512 and 2,048
tokens come one at a time; their KV travels in chunks while they are computed, and what is left after the last
chunk is the exposed transfer. It counts against the step of the eight alone.
"""

import argparse

import httpx

from bench.cores import core_list
from bench.frame import Bench, Frame
from bench.report import Outcome
from bench.transfer import duel, exposed
from common.config import PrefillSettings, resolve
from common.transport.ucx_selftest import candidates, self_test
from deploy.local.spec import ClusterSpec

LENGTHS = (512, 2048)


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--cores", type=core_list, default=(0, 1), help="two cores, as taskset writes them")
    parser.add_argument("--part", choices=("ucx", "exposed"), help="only this one")


async def run(frame: Frame, arguments: argparse.Namespace) -> Outcome:
    figures: dict[str, float] = {}
    problems: list[str] = []
    if arguments.part != "exposed":
        try:
            figures |= await _ucx(frame, arguments.cores)
        except duel.DuelFailed as error:
            problems.append(str(error))
    if arguments.part != "ucx":
        try:
            figures |= (await _exposed(frame, arguments.cores)).figures()
        except (httpx.HTTPError, KeyError, RuntimeError) as error:
            problems.append(f"{type(error).__name__}: {error}")
    return Outcome(figures, tuple(problems))


async def _ucx(frame: Frame, cores: tuple[int, ...]) -> dict[str, float]:
    settings = resolve(PrefillSettings, [])
    test = await self_test(candidates(settings.ucx), settings.cache_path)
    if test is None:
        raise duel.DuelFailed("no UCX setting passed the self-test")
    frame.note(f"UCX over {test.transport} with {test.options}")
    with frame.progress("rounds", duel.ROUNDS) as done:
        async for now in duel.fight(test.options, (cores[0], cores[-1])):
            last = now
            done(now)
    return {
        "ucx_gb_s": last.ours / 1e9,
        "perftest_gb_s": last.perftest / 1e9,
        "ucx_over_perftest": last.ratio,
    }


async def _exposed(frame: Frame, cores: tuple[int, ...]) -> exposed.Exposed:
    settings = {"num_blocks": str(exposed.NUM_BLOCKS)}
    spec = ClusterSpec(cores=",".join(map(str, cores)), settings=settings)
    async with frame.target(spec) as target, exposed.open_asker(target.url) as asker:
        with frame.progress("prompts", (exposed.WARM_UP_ROUNDS + exposed.ROUNDS) * len(LENGTHS)) as done:
            return await exposed.measure(asker, LENGTHS, done)


BENCH = Bench("what moving KV costs: UCX beside ucx_perftest, transfers that requests wait for", run, options)
