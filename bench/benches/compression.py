"""What compressing KV on its way costs and changes: speed, bytes, answers.

60 pieces of Python documentation, 32 to 256 tokens, in float32 and greedily: the KV of each prompt is encoded
and decoded once, as on its way from prefill to decode, and 32 more tokens are generated from it. Beside the
same without: how many answers are the same to the last token, and how far the log probabilities of the whole
vocabulary are off at the first of these tokens (mean of absolute differences). Speed is of bfloat16 blocks,
in bytes as they are without compression, in one thread.
"""

import argparse
import os
import random
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import mean, median

import numpy as np

from bench.cores import core_list
from bench.corpus import standard_library_docstrings
from bench.engine.answers import Answer, Answers
from bench.frame import Bench, Frame
from bench.report import Outcome
from common.config import GatewaySettings, resolve
from common.engine.runner import ModelRunner
from common.ids import BlockId
from common.kv.codec import KVCodec
from common.model_files import resolve as model_directory

BLOCK_SIZE = 16
PROMPTS = 60
LENGTHS = (32, 256)
TOKENS = 32
SPEED_BLOCKS = 64
SPEED_ROUNDS = 9


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--cores", type=core_list, default=(0,), help="cores to stay on, as taskset writes them"
    )


async def run(frame: Frame, arguments: argparse.Namespace) -> Outcome:
    os.sched_setaffinity(0, arguments.cores)
    settings = resolve(GatewaySettings, [])
    directory = model_directory(settings.model, settings.cache_path)
    prompts = some_prompts(directory)
    runner = _runner(directory, "float32", blocks_for(prompts), len(arguments.cores))
    answers = Answers(runner, prompts, TOKENS)
    travelled = {name: await answers.encoded(codec) for name, codec in runner.kv_codecs.items()}
    plain = answers.decode()
    figures: dict[str, float] = {}
    for name, codec in runner.kv_codecs.items():
        await answers.received(codec, travelled[name])
        figures |= {f"{what}_{name}": figure for what, figure in compared(plain, answers.decode()).items()}
        frame.note(f"{name}: {len(prompts)} answers compared")
    blocks = _runner(directory, "bfloat16", SPEED_BLOCKS, len(arguments.cores))
    for name, codec in blocks.kv_codecs.items():
        figures |= {f"{what}_{name}": figure for what, figure in (await speed(blocks, codec)).items()}
    return Outcome(figures)


def compared(plain: Sequence[Answer], found: Sequence[Answer]) -> dict[str, float]:
    """Of the same prompts in the same order."""
    pairs = list(zip(plain, found, strict=True))
    return {
        "identical_answers": mean(one.tokens == other.tokens for one, other in pairs),
        "identical_second_tokens": mean(one.tokens[0] == other.tokens[0] for one, other in pairs),
        "logit_error_mean": mean(float(np.abs(one.logprobs - other.logprobs).mean()) for one, other in pairs),
    }


async def speed(runner: ModelRunner, codec: KVCodec) -> dict[str, float]:
    """Medians over a few rounds of all blocks of the pool, one after the other."""
    size = runner.buffer.block_bytes
    blocks = [BlockId(number) for number in range(runner.buffer.num_blocks)]
    encoding, decoding = [], []
    for _ in range(SPEED_ROUNDS):
        began = time.perf_counter()
        encoded = [await codec.encode(block) for block in blocks]
        between = time.perf_counter()
        for data, block in zip(encoded, blocks, strict=True):
            await codec.decode(data, block)
        encoding.append(between - began)
        decoding.append(time.perf_counter() - between)
    return {
        "encode_gb_s": size * len(blocks) / median(encoding) / 1e9,
        "decode_gb_s": size * len(blocks) / median(decoding) / 1e9,
        "bytes_saved": 1 - codec.encoded_bytes / size,
    }


def some_prompts(directory: Path) -> list[list[int]]:
    """The beginnings of docstrings, of lengths drawn evenly between the shortest and the longest."""
    from transformers import AutoTokenizer  # takes seconds

    tokenizer, lengths = AutoTokenizer.from_pretrained(directory), random.Random(0)
    prompts: list[list[int]] = []
    for text in standard_library_docstrings():
        tokens = tokenizer.encode(text, add_special_tokens=False)
        length = lengths.randint(*LENGTHS)
        if len(tokens) >= length:
            prompts.append(tokens[:length])
        if len(prompts) == PROMPTS:
            return prompts
    raise ValueError(f"the standard library has fewer than {PROMPTS} long docstrings")


def blocks_for(prompts: Sequence[Sequence[int]]) -> int:
    return sum(-(-(len(prompt) + 1 + TOKENS) // BLOCK_SIZE) for prompt in prompts)


def _runner(directory: Path, dtype: str, num_blocks: int, threads: int) -> ModelRunner:
    from common.engine.runner_torch import TorchRunner  # torch takes seconds

    return TorchRunner(
        directory,
        dtype=dtype,
        device="cpu",
        block_size=BLOCK_SIZE,
        num_blocks=num_blocks,
        threads=threads,
        compile_model=False,
    )


BENCH = Bench(
    "what compressing KV on its way costs and changes: speed, bytes, answers", run, options, local=True
)
