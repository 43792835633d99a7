"""From logits to tokens, as a pure function of (logits, tokens so far, sampling parameters).

token = argmax over allowed tokens of logit / temperature + Gumbel noise, the noise a counter hash of
(seed, choice, position, token id): no generator state exists, so a request can move between workers and
batches and keep its stream (the Gumbel-max trick, Gumbel 1954; design.md 4.5). Knows nothing of models.
"""

import math
from collections.abc import Sequence as Seq
from typing import Final

import numpy as np
import torch
from torch import Tensor

from common.engine.matchers import TokenMasks
from common.engine.runner import PlanRow, SampledToken
from common.errors import StepFailed
from common.messages.generation import SamplingParams
from common.messages.stream import TokenLogprobs

GREEDY_BELOW: Final = 1e-5
"""Temperatures under this are greedy: dividing by them would leave float32's range."""

LOWEST: Final = -9999.0
"""What is said for the logarithm of zero, which JSON cannot say."""

_MASK64: Final = 0xFFFFFFFFFFFFFFFF
_MANY: Final = 1024
_CHUNK: Final = 128
_NO_TOKEN: Final = -1


def sample(
    logits: Tensor,
    rows: Seq[PlanRow],
    eos_token_ids: Seq[int],
    masks: TokenMasks | None = None,
    *,
    kernels: bool = False,
) -> list[SampledToken]:
    """One token for each row of float32 `logits` `[rows, vocab]`, which stay as they are.

    `masks` say which tokens the grammars of some rows allow; a ban on ending too early gives way to them.
    With `kernels`, which must be loaded, our operator draws: the same tokens, but for scores that tie within
    float rounding, in a fraction of the time.

    Ties go to the lowest id. Log probabilities are those of the model's own distribution, before bias,
    penalties, temperature and cuts. Raises StepFailed when a row's logits are not numbers,
    or all of its tokens forbidden.
    """
    scores = logits
    if masks is not None or any(_is_adjusted(row, eos_token_ids) for row in rows):
        scores = logits.clone()
        for index, row in enumerate(rows):
            _adjust(scores[index], row, eos_token_ids)
    if masks is not None:
        _mask(scores, logits, rows, masks)
    tokens = _drawn_by_kernel(scores, rows) if kernels else _drawn_by_torch(scores, rows)
    if min(tokens, default=0) == _NO_TOKEN:
        raise StepFailed("the model's logits are not numbers, or every token is forbidden")
    logprobs = _logprobs(logits, rows, tokens)
    return [SampledToken(token, logprobs.get(index)) for index, token in enumerate(tokens)]


def noise_key(seed: int, choice: int, position: int) -> int:
    """64 bits that name one draw: SplitMix64 (Steele 2014) chained over the three counters."""
    key = 0
    for part in (seed, choice, position):
        key = _splitmix64(key ^ (part & _MASK64))
    return key


# --- what the request wants of the logits ----------------------------------------------------------


def _bans_end(row: PlanRow) -> bool:
    return row.start + row.count - row.num_prompt < row.sampling.min_tokens


def _is_adjusted(row: PlanRow, eos_token_ids: Seq[int]) -> bool:
    s = row.sampling
    penalised = s.presence_penalty or s.frequency_penalty or s.repetition_penalty != 1.0
    return bool(s.logit_bias or penalised or (_bans_end(row) and (eos_token_ids or s.stop_token_ids)))


def _adjust(scores: Tensor, row: PlanRow, eos_token_ids: Seq[int]) -> None:
    """Penalties, bias and the ban on ending too early, in place on `[vocab]`.

    Presence and frequency as OpenAI documents them: over the output, score -= frequency * count + presence.
    Repetition as in CTRL (Keskar 2019) and transformers: over prompt and output, a positive score is
    divided, a negative one multiplied.
    """
    s, end, vocab = row.sampling, row.start + row.count, len(scores)
    if s.repetition_penalty != 1.0:
        seen, _ = _counts(row.tokens[:end], scores)
        said = scores[seen]
        scores[seen] = torch.where(said > 0, said / s.repetition_penalty, said * s.repetition_penalty)
    if s.presence_penalty or s.frequency_penalty:
        seen, counts = _counts(row.tokens[row.num_prompt : end], scores)
        scores[seen] -= counts * s.frequency_penalty + s.presence_penalty
    if biased := [pair for pair in s.logit_bias if pair[0] < vocab]:
        ids, biases = zip(*biased, strict=True)
        added = torch.tensor(biases, dtype=scores.dtype, device=scores.device)
        scores.index_add_(0, torch.tensor(ids, device=scores.device), added)
    if _bans_end(row):
        ends = [token for token in (*eos_token_ids, *s.stop_token_ids) if token < vocab]
        scores[ends] = -math.inf


def _mask(scores: Tensor, logits: Tensor, rows: Seq[PlanRow], masks: TokenMasks) -> None:
    """Set tokens that a row's grammar forbids to -inf, in place.

    By a table of what each byte of a mask adds to eight scores: torch's masked_fill takes four times as long.
    """
    octets = torch.from_numpy(masks.bits.view("uint8")).to(scores.device, torch.int32)
    forbidden = torch.nn.functional.embedding(octets, _octet_table(scores.device))
    forbidden = forbidden.flatten(1)[:, : scores.shape[-1]]
    scores.index_add_(0, torch.tensor(masks.rows, device=scores.device), forbidden)
    for line, index in enumerate(masks.rows):
        if _bans_end(rows[index]) and bool(scores[index].isneginf().all()):
            scores[index] = logits[index] + forbidden[line]


def _octet_table(device: torch.device) -> Tensor:
    """`[256, 8]`: 0 where bit i of a byte is set, else -inf."""
    bits = torch.arange(256)[:, None] >> torch.arange(8) & 1
    return torch.zeros(256, 8).masked_fill_(bits == 0, -math.inf).to(device)


def _counts(tokens: Seq[int], like: Tensor) -> tuple[Tensor, Tensor]:
    """The token ids that occur, of those that `like` `[vocab]` has, and how often each does."""
    ids, counts = np.unique(np.array(tokens, np.int64), return_counts=True)
    known = np.searchsorted(ids, len(like))
    return torch.from_numpy(ids[:known]).to(like.device), torch.from_numpy(counts[:known]).to(like.device)


# --- drawing ---------------------------------------------------------------------------------------


def _is_greedy(row: PlanRow) -> bool:
    return row.sampling.temperature < GREEDY_BELOW


def _key(row: PlanRow) -> int:
    return noise_key(row.sampling.seed, row.choice, row.start + row.count)


def _drawn_by_kernel(scores: Tensor, rows: Seq[PlanRow]) -> list[int]:
    """A token for each row, _NO_TOKEN for one with a NaN or nothing above -inf."""
    tokens: list[int] = torch.ops.galley.draw(
        scores,
        [0.0 if _is_greedy(row) else row.sampling.temperature for row in rows],
        [_signed(_key(row), 64) for row in rows],
        [row.sampling.top_k for row in rows],
        [row.sampling.top_p for row in rows],
        [row.sampling.min_p for row in rows],
    )
    return tokens


def _drawn_by_torch(scores: Tensor, rows: Seq[PlanRow]) -> list[int]:
    """A token for each row, _NO_TOKEN for one with a NaN or nothing above -inf."""
    drawn = [i for i, row in enumerate(rows) if not _is_greedy(row)]
    if drawn:
        noisy = _with_noise(scores[drawn], [rows[i] for i in drawn])
        scores = scores.index_copy(0, torch.tensor(drawn, device=scores.device), noisy)
    best = scores.argmax(-1, keepdim=True)
    # argmax takes a NaN for the largest number, so looking at what it chose is enough.
    best.masked_fill_(~(scores.gather(-1, best) > -math.inf), _NO_TOKEN)
    return best.flatten().tolist()


def _with_noise(scores: Tensor, rows: Seq[PlanRow]) -> Tensor:
    """Scores over temperature, cut to the allowed tokens, plus noise: `[rows, vocab]`, a new tensor."""
    temperatures = torch.tensor([row.sampling.temperature for row in rows], device=scores.device)
    scaled = scores / temperatures[:, None]
    for index, row in enumerate(rows):
        restrict(scaled[index], row.sampling)
    return scaled + gumbel_noise([_key(row) for row in rows], scores.shape[-1], scores.device)


def restrict(scores: Tensor, sampling: SamplingParams) -> None:
    """Set the tokens of `[vocab]` that top_k, then top_p, then min_p forbid to -inf, in place.

    Each works on what the one before has left, as in transformers. Tokens that tie with the last one
    allowed are allowed, so the outcome does not depend on the order of a sort.
    """
    if 0 < sampling.top_k < len(scores):
        least = scores.topk(sampling.top_k).values[-1]
        scores.masked_fill_(scores < least, -math.inf)
    if sampling.top_p < 1.0:
        scores.masked_fill_(scores < _nucleus_edge(scores, sampling.top_p), -math.inf)
    if sampling.min_p > 0.0:
        scores.masked_fill_(scores < scores.max() + math.log(sampling.min_p), -math.inf)


def _nucleus_edge(scores: Tensor, top_p: float) -> Tensor:
    """The lowest score in the smallest set of best tokens whose probability reaches `top_p`.

    Holtzman 2020. The best thousand nearly always suffice, and finding them is ten times as fast as a sort.
    """
    total = scores.logsumexp(-1)
    for count in (min(_MANY, len(scores)), len(scores)):
        best = scores.topk(count).values
        mass = (best - total).exp().cumsum(-1)
        if bool(mass[-1] >= top_p):
            break
    last = int((mass < top_p).sum())
    return best[min(last, count - 1)]


def _splitmix64(x: int) -> int:
    x = (x + 0x9E3779B97F4A7C15) & _MASK64
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK64
    return x ^ (x >> 31)


def gumbel_noise(keys: Seq[int], vocab: int, device: torch.device) -> Tensor:
    """Standard Gumbel noise `[len(keys), vocab]`, float32, a function of (key, token id) alone.

    Written as -log(-log1p(-u)): the largest noise, which decides, comes from the smallest u, where
    floating point is finest.
    """
    low = torch.tensor([_signed(key, 32) for key in keys], dtype=torch.int32, device=device)[:, None]
    high = torch.tensor([_signed(key >> 32, 32) for key in keys], dtype=torch.int32, device=device)[:, None]
    ids = torch.arange(vocab, dtype=torch.int32, device=device) * 0x1E3779B1
    noise = torch.empty(len(keys), vocab, device=device)
    # On a CPU one row at a time, so that its numbers stay in the core's cache.
    rows = 1 if device.type == "cpu" else len(keys)
    for begin in range(0, len(keys), rows):
        span = slice(begin, begin + rows)
        bits = ids + low[span]
        scratch = torch.empty_like(bits)
        _mix32_(bits, scratch)
        bits ^= high[span]
        _mix32_(bits, scratch)
        into = noise[span]
        # 31 bits, not signed ones: near zero the conversion to float32 must be exact.
        bits &= 0x7FFFFFFF
        into.copy_(bits).add_(0.5).mul_(2.0**-31).clamp_(max=1.0 - 2.0**-24)
        into.neg_().log1p_().neg_().log_().neg_()
    return noise


def _mix32_(x: Tensor, scratch: Tensor) -> None:
    """Mix the 32 bits of each int32 in place, a bijection (Wellons' low-bias hash); products wrap."""
    _xor_shifted_(x, 16, scratch)
    x *= 0x21F0AAAD
    _xor_shifted_(x, 15, scratch)
    x *= _signed(0xD35A2D97, 32)
    _xor_shifted_(x, 15, scratch)


def _xor_shifted_(x: Tensor, places: int, scratch: Tensor) -> None:
    """x ^= x >> places, as if unsigned."""
    torch.bitwise_right_shift(x, places, out=scratch)
    scratch &= (1 << (32 - places)) - 1
    x ^= scratch


def _signed(x: int, bits: int) -> int:
    """The signed integer with the low `bits` bits of `x`."""
    half = 1 << (bits - 1)
    return ((x + half) & (2 * half - 1)) - half


# --- log probabilities -----------------------------------------------------------------------------


def _logprobs(logits: Tensor, rows: Seq[PlanRow], tokens: Seq[int]) -> dict[int, TokenLogprobs]:
    wanted = [i for i, row in enumerate(rows) if row.sampling.logprobs is not None]
    if not wanted:
        return {}
    counts = [rows[index].sampling.logprobs or 0 for index in wanted]
    asked = logits if len(wanted) == len(rows) else logits[wanted]
    found = score(asked, [tokens[index] for index in wanted], max(counts))
    return {
        index: TokenLogprobs(one.logprob, one.top[:count])
        for index, count, one in zip(wanted, counts, found, strict=True)
    }


def score(logits: Tensor, tokens: Seq[int], count: int) -> list[TokenLogprobs]:
    """Log probabilities of one token for each row of float32 `logits` `[rows, vocab]`, and the `count` best.

    Equal ones are in the order of their ids. Raises StepFailed where the logits are not numbers.
    """
    if not bool(logits.amax(-1).isfinite().all()):
        raise StepFailed("the model's logits are not numbers")
    table = logits.log_softmax(-1)  # half the time of logsumexp, which makes a table too
    own = table.gather(-1, torch.tensor(tokens, device=logits.device)[:, None])
    values, ids = _best(table, count)
    return [
        TokenLogprobs(value, tuple(sorted(zip(line, line_values, strict=True), key=lambda p: (-p[1], p[0]))))
        for value, line, line_values in zip(
            own[:, 0].clamp(min=LOWEST).tolist(), ids.tolist(), values.clamp(min=LOWEST).tolist(), strict=True
        )
    ]


def _best(table: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The `count` highest of each row of `[rows, vocab]`, or all if there are fewer, and their ids.

    They lie in the `count` chunks with the highest maxima. To look only there takes a fifth of topk's time.
    """
    rows, vocab = table.shape
    chunks = vocab // _CHUNK
    if count == 0 or count >= chunks:
        found = table.topk(min(count, vocab))
        return found.values, found.indices
    rest = chunks * _CHUNK
    maxima = table[:, :rest].view(rows, chunks, _CHUNK).amax(-1)
    first = maxima.topk(count).indices[:, :, None] * _CHUNK
    ids = (first + torch.arange(_CHUNK, device=table.device)).flatten(1)
    ids = torch.cat((ids, torch.arange(rest, vocab, device=table.device).expand(rows, -1)), -1)
    found = table.gather(-1, ids).topk(count)
    return found.values, ids.gather(-1, found.indices)
