"""What is measured of an engine, what the machine allows at best, and how the figures are named.

Pure arithmetic over times, bandwidths and rates. Knows nothing of torch and of how times are taken.
"""

from dataclasses import dataclass

BF16 = 2
"""Bytes of one number, in weights and KV alike, whatever the engine stores."""


@dataclass(frozen=True, slots=True)
class ModelShape:
    """What the bounds need to know of a model. `parameters` counts a tied embedding once.

    `body_parameters` are those outside the embedding and the vocabulary projection.
    """

    parameters: int
    body_parameters: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    hidden: int
    vocab: int

    @property
    def kv_bytes_per_token(self) -> int:
        return self.layers * 2 * self.kv_heads * self.head_dim * BF16


@dataclass(frozen=True, slots=True)
class Ceilings:
    """What the cores of the bench can do: bytes/s read from memory, FLOP/s of a large bfloat16 product."""

    read: float
    matrix: float

    def better(self, other: "Ceilings") -> "Ceilings":
        """The higher one of each: a ceiling taken while somebody else was busy is none."""
        return Ceilings(max(self.read, other.read), max(self.matrix, other.matrix))


@dataclass(frozen=True, slots=True)
class Prefill:
    """One prompt of `tokens`, nothing cached, one token sampled."""

    tokens: int

    def __str__(self) -> str:
        return f"prefill {self.tokens}"

    def flops(self, shape: ModelShape) -> float:
        """Products with every weight for every token, causal attention, the vocabulary for one row.

        A multiplication and an addition are two. The i-th query meets i keys, once for its scores and once
        for their weighted sum.
        """
        weights = 2 * shape.body_parameters * self.tokens
        pairs = self.tokens * (self.tokens + 1) / 2
        attention = shape.layers * 2 * (2 * shape.heads * shape.head_dim * pairs)
        return weights + attention + 2 * shape.hidden * shape.vocab

    def bound_s(self, shape: ModelShape, ceilings: Ceilings) -> float:
        return self.flops(shape) / ceilings.matrix


@dataclass(frozen=True, slots=True)
class Decode:
    """One step of `batch` sequences that have `context` tokens each."""

    batch: int
    context: int

    def __str__(self) -> str:
        return f"decode b{self.batch} c{self.context}"

    def bytes(self, shape: ModelShape) -> int:
        """All weights once, and the KV of the batch once."""
        return shape.parameters * BF16 + self.batch * self.context * shape.kv_bytes_per_token

    def bound_s(self, shape: ModelShape, ceilings: Ceilings) -> float:
        return self.bytes(shape) / ceilings.read


Cell = Prefill | Decode

QUICK: tuple[Cell, ...] = (Prefill(512), Decode(1, 256), Decode(8, 256))
FULL: tuple[Cell, ...] = (
    *(Prefill(tokens) for tokens in (128, 512, 2048)),
    *(Decode(batch, context) for context in (256, 2048) for batch in (1, 4, 8, 16, 32)),
)


@dataclass(frozen=True, slots=True)
class Measured:
    """Median seconds of one prefill or one decode step in a cell: ours and plain transformers'."""

    cell: Cell
    ours_s: float
    plain_s: float
    ceilings: Ceilings
    shape: ModelShape

    @property
    def bound_s(self) -> float:
        return self.cell.bound_s(self.shape, self.ceilings)

    @property
    def speedup(self) -> float:
        return self.plain_s / self.ours_s

    def figures(self) -> dict[str, float]:
        """Under the names by which others look them up: `decode_ms_b8_c256`, `prefill_tok_s_512` ..."""
        if isinstance(self.cell, Prefill):
            return self._prefill_figures(self.cell)
        name = f"b{self.cell.batch}_c{self.cell.context}"
        return {
            f"decode_ms_{name}": 1e3 * self.ours_s,
            f"decode_bound_ms_{name}": 1e3 * self.bound_s,
            f"decode_over_bound_{name}": self.ours_s / self.bound_s,
            f"decode_transformers_ms_{name}": 1e3 * self.plain_s,
            f"decode_speedup_over_transformers_{name}": self.speedup,
            f"read_gb_s_{name}": self.ceilings.read / 1e9,
        }

    def _prefill_figures(self, cell: Prefill) -> dict[str, float]:
        return {
            f"prefill_tok_s_{cell.tokens}": cell.tokens / self.ours_s,
            f"prefill_bound_tok_s_{cell.tokens}": cell.tokens / self.bound_s,
            f"prefill_share_of_peak_{cell.tokens}": self.bound_s / self.ours_s,
            f"prefill_transformers_tok_s_{cell.tokens}": cell.tokens / self.plain_s,
            f"prefill_speedup_over_transformers_{cell.tokens}": self.speedup,
            f"matrix_gflop_s_{cell.tokens}": self.ceilings.matrix / 1e9,
        }
