"""A model without arithmetic whose KV matters all the same: for tests, and for the planner's simulator.

Every token's KV is a hash over (the KV before it, token, position), every sampled token a hash over all KV
bytes of its sequence as they lie in the pool. One wrong, missing, stale or misplaced byte of KV changes the
tokens, which FakeModel.expected_tokens foretells without any pool. Knows nothing of torch.
"""

import hashlib
import struct
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Protocol

from common.engine.runner import BatchPlan, PlanRow, SampledToken, StepResult
from common.errors import StepFailed
from common.ids import BlockId
from common.kv.codec import NO_CODECS
from common.kv.layout import KVLayout
from common.messages.generation import SamplingParams
from common.messages.stream import TokenLogprobs

TINY_LAYOUT = KVLayout(kv_heads=1, num_layers=1, block_size=16, head_dim=2, dtype="float32")
"""16 bytes per token, 256 per block."""


class _Hash(Protocol):
    def digest(self) -> bytes: ...


@dataclass(frozen=True, slots=True)
class FakeModel:
    """The pure part. `weights` names the model: another name, other KV and other tokens.

    All arithmetic is hashing, so one mebibyte of context costs a sampled token about a millisecond.
    """

    layout: KVLayout = TINY_LAYOUT
    vocab_size: int = 1000
    eos_token_ids: tuple[int, ...] = ()
    max_model_len: int = 4096
    weights: str = "fake"

    @property
    def slot_bytes(self) -> int:
        """Bytes of KV per token. Slot i of a block is its bytes [i * slot_bytes, (i + 1) * slot_bytes)."""
        return self.layout.block_bytes // self.layout.block_size

    def kv(self, before: bytes, token: int, position: int) -> bytes:
        """The KV of one token, `slot_bytes` long; `before` is the slot of position - 1, empty at 0."""
        data = before + struct.pack("<qq", token, position)
        digest = hashlib.blake2b(data, key=self.weights.encode()[:64], digest_size=16).digest()
        return (digest * -(-self.slot_bytes // 16))[: self.slot_bytes]

    def sample(
        self, context: _Hash, position: int, num_output: int, sampling: SamplingParams, choice: int
    ) -> SampledToken:
        """The token at `position`, given the hash over all KV before it and the output tokens so far.

        Honours seed and choice (at temperature 0 neither matters), min_tokens (no EOS or stop id earlier)
        and logprobs (made up); penalties, bias and nucleus parameters it ignores.
        """
        salt = (sampling.seed, choice) if sampling.temperature > 0 else (0, 0)
        data = context.digest() + struct.pack("<qqq", *salt, position)
        token = int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little") % self.vocab_size
        if num_output < sampling.min_tokens:
            banned = {*self.eos_token_ids, *sampling.stop_token_ids}
            token = next(
                t % self.vocab_size
                for t in range(token, token + self.vocab_size)
                if t % self.vocab_size not in banned
            )
        return SampledToken(token, self._logprobs(token, sampling.logprobs))

    def expected_tokens(self, prompt: Seq[int], sampling: SamplingParams, choice: int = 0) -> list[int]:
        """The whole output for `prompt`, up to and with the EOS, stop id or last token that ends it."""
        context, slot = hashlib.blake2b(), b""
        output: list[int] = []
        for position in range(self.max_model_len - 1):
            slot = self.kv(slot, prompt[position] if position < len(prompt) else output[-1], position)
            context.update(slot)
            if position + 1 < len(prompt):
                continue
            token = self.sample(context, position + 1, len(output), sampling, choice).token
            output.append(token)
            stopped = token in sampling.stop_token_ids or (
                token in self.eos_token_ids and not sampling.ignore_eos
            )
            if len(output) >= sampling.max_tokens or (stopped and len(output) >= sampling.min_tokens):
                break
        return output

    def score(self, tokens: Seq[int], positions: range, count: int) -> tuple[TokenLogprobs, ...]:
        """Made-up log probabilities of prompt tokens, each a function of its token and position."""
        scores = []
        for position in positions:
            token = tokens[position]
            top = tuple(((token + rank) % self.vocab_size, -0.5 - rank) for rank in range(count))
            scores.append(TokenLogprobs(-float(token + position), top))
        return tuple(scores)

    def _logprobs(self, token: int, count: int | None) -> TokenLogprobs | None:
        if count is None:
            return None
        top = tuple(((token + rank) % self.vocab_size, -0.5 - rank) for rank in range(count))
        return TokenLogprobs(-0.5, top)


class FakeBuffer:
    """A KV pool in one bytearray."""

    def __init__(self, num_blocks: int, block_bytes: int) -> None:
        self.num_blocks = num_blocks
        self.block_bytes = block_bytes
        self._memory = memoryview(bytearray(num_blocks * block_bytes))

    def block(self, block: BlockId) -> memoryview:
        """The writable memory of one block, `block_bytes` bytes, no copy."""
        return self._memory[block * self.block_bytes : (block + 1) * self.block_bytes]


class FakeRunner:
    """A ModelRunner that runs FakeModel over a pool of `num_blocks` blocks.

    `fail_when` may pick plans that shall raise StepFailed, before anything of them is written.
    """

    def __init__(
        self, model: FakeModel, num_blocks: int, fail_when: Callable[[BatchPlan], bool] | None = None
    ) -> None:
        self.model = model
        self.layout = model.layout
        self.buffer = FakeBuffer(num_blocks, model.layout.block_bytes)
        self.kv_codecs = NO_CODECS
        self.max_model_len = model.max_model_len
        self.eos_token_ids = model.eos_token_ids
        self.vocab_size = model.vocab_size
        self.weights_fingerprint = hashlib.blake2b(model.weights.encode(), digest_size=16).hexdigest()
        self._fail_when = fail_when

    def execute(self, plan: BatchPlan) -> StepResult:
        """Raises StepFailed for rows beyond max_model_len or their block table, and as `fail_when` says."""
        if self._fail_when is not None and self._fail_when(plan):
            raise StepFailed(f"step {plan.step} was to fail")
        for row in plan.rows:
            self._write(row)
        tokens = {row.seq: self._sample(row) for row in plan.rows if row.sample}
        scored = {
            row.seq: self.model.score(row.tokens, row.scored, row.sampling.prompt_logprobs or 0)
            for row in plan.rows
            if row.scored
        }
        return StepResult(plan.step, tokens, scored=scored)

    def _write(self, row: PlanRow) -> None:
        end = row.start + row.count
        if end > min(self.max_model_len, len(row.blocks) * self.layout.block_size):
            raise StepFailed(f"sequence {row.seq} has no room for {end} tokens")
        slot = bytes(self._slot(row, row.start - 1)) if row.start else b""
        for position in range(row.start, end):
            slot = self.model.kv(slot, row.tokens[position], position)
            self._slot(row, position)[:] = slot

    def _sample(self, row: PlanRow) -> SampledToken:
        end = row.start + row.count
        context = hashlib.blake2b()
        full, rest = divmod(end, self.layout.block_size)
        for block in row.blocks[:full]:
            context.update(self.buffer.block(block))
        if rest:
            context.update(self.buffer.block(row.blocks[full])[: rest * self.model.slot_bytes])
        return self.model.sample(context, end, end - row.num_prompt, row.sampling, row.choice)

    def _slot(self, row: PlanRow, position: int) -> memoryview:
        index, offset = divmod(position, self.layout.block_size)
        size = self.model.slot_bytes
        return self.buffer.block(row.blocks[index])[offset * size : (offset + 1) * size]
