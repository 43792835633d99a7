"""What prefill and decode agree on before KV moves: a compression both know, and no pair of strangers."""

import asyncio

import pytest
import structlog

from common.config import EngineSettings
from common.engine.runner_fake import FakeModel
from common.messages.generation import SamplingParams
from common.routing import rules
from services.decode.service import DecodeService
from services.prefill.service import PrefillService
from tests.support.kv_codecs import MirrorCodec
from tests.support.sim_cluster import SimCluster, SimWorker
from tests.support.virtual_loop import run_virtual

MODEL = FakeModel()
SAMPLING = SamplingParams(max_tokens=8, seed=5)
PROMPTS = [[(7 * n + i) % MODEL.vocab_size for i in range(n)] for n in (1, 17, 64, 65, 300, 600)]
EXPECTED = [MODEL.expected_tokens(prompt, SAMPLING) for prompt in PROMPTS]
STRANGER = "decode-0"


class Mixed(SimCluster):
    """One of its decodes has other weights."""

    def start(self, tasks: asyncio.TaskGroup, settings: EngineSettings) -> SimWorker:
        ours = self.model
        self.model = FakeModel(weights="another") if settings.instance == STRANGER else ours
        try:
            return super().start(tasks, settings)
        finally:
            self.model = ours


def fingerprint(cluster: SimCluster, name: str) -> str:
    return cluster.workers[name].host.worker.info.fingerprint


@pytest.mark.parametrize(
    ("announced", "offered", "wanted", "encoded"),
    [
        ("int8", "int8", "none", True),
        ("int8", "none", "int8", True),
        ("int8", "none", "none", False),
        ("", "int8", "int8", False),  # a prefill of before there was compression, whatever its settings say
    ],
)
def test_tokens_are_right_whoever_asks_for_compression(
    announced: str, offered: str, wanted: str, encoded: bool
) -> None:
    async def main() -> None:
        async with SimCluster().running() as cluster:
            prefill, decode = (cluster.workers[name].host.duty for name in ("prefill-0", "decode-0"))
            assert isinstance(prefill, PrefillService)
            assert isinstance(decode, DecodeService)
            exporter, importer = prefill._exporter, decode._intake._importer
            encoder, decoder = MirrorCodec(exporter.buffer), MirrorCodec(importer._buffer)
            exporter.codecs = {announced: encoder} if announced else {}
            prefill._compression = offered  # type: ignore[assignment]
            importer._codecs, importer._compression = {"int8": decoder}, wanted
            assert await cluster.ask_all(PROMPTS, SAMPLING) == EXPECTED
            assert bool(encoder.encoded) is encoded
            assert encoder.encoded == decoder.decoded

    run_virtual(main())


def test_a_decode_with_other_weights_is_never_paired() -> None:
    async def main() -> None:
        with structlog.testing.capture_logs() as logs:
            async with Mixed(decode=2).running() as cluster:
                assert await cluster.ask_all(PROMPTS, SAMPLING) == EXPECTED
                told = {fingerprint(cluster, name) for name in ("prefill-0", STRANGER)}
        warned = [log for log in logs if "no pair of these" in log["event"]]
        assert len(told) == 2
        assert any({log["fingerprint"], *log["others"].values()} == told for log in warned)
        assert not [log for log in logs if log["event"] in ("handoff not taken", "fingerprints differ")]

    run_virtual(main())


def test_a_handoff_to_a_decode_with_other_weights_is_refused_and_goes_elsewhere(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A router that takes any two for a pair, as one might of another version."""
    monkeypatch.setattr(rules, "pairable", lambda *_: True)

    async def main() -> None:
        with structlog.testing.capture_logs() as logs:
            async with Mixed(decode=2).running() as cluster:
                assert await cluster.ask_all(PROMPTS, SAMPLING) == EXPECTED
                told = (fingerprint(cluster, STRANGER), fingerprint(cluster, "prefill-0"))
        refused = [log for log in logs if log["event"] == "fingerprints differ"]
        assert refused
        assert {(log["ours"], log["theirs"]) for log in refused} == {told}

    run_virtual(main())
