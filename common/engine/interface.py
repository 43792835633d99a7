"""What transformers' models call for attention, and what that asks of a step.

A model's forward pass is given `galley_step`, and every layer hands it on to `paged_attention`. All of it
becomes part of compiled graphs. Knows nothing of how a step attends.
"""

from dataclasses import dataclass
from typing import Final, Protocol, cast

from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface

PAGED: Final = "galley_paged"
"""The attention implementation's name."""


@dataclass(frozen=True, slots=True)
class AttentionKind:
    """How a layer attends: score * scaling, softcap * tanh(score / softcap), the last `window` positions."""

    scaling: float
    window: int | None = None
    softcap: float | None = None


class Attends(Protocol):
    """What `paged_attention` needs of a step."""

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, kind: AttentionKind
    ) -> Tensor: ...


class Step(Attends, Protocol):
    """What a model's forward pass needs to know of one step; `order` gives packed rows as rows of the plan.

    `input_ids` and `position_ids` are `[1, tokens]`; a packed row ends before its entry of `ends`.
    """

    @property
    def order(self) -> list[int]: ...

    @property
    def ends(self) -> list[int]: ...

    @property
    def input_ids(self) -> Tensor: ...

    @property
    def position_ids(self) -> Tensor: ...


def register() -> None:
    """Let transformers know PAGED; again does no harm."""
    AttentionInterface.register(PAGED, paged_attention)
    AttentionMaskInterface.register(PAGED, _no_mask)


def paged_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    _mask: object,
    *,
    galley_step: Attends,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **_others: object,
) -> tuple[Tensor, None]:
    """An AttentionInterface function: `[1, heads, tokens, dim]` in, `[1, tokens, heads, dim]` out."""
    kind = AttentionKind(query.shape[-1] ** -0.5 if scaling is None else scaling, sliding_window, softcap)
    out = galley_step.attend(cast(int, module.layer_idx), query[0], key[0], value[0], kind)
    return out[None], None


def _no_mask(**_arguments: object) -> None:
    """An AttentionMaskInterface function: a step makes its masks itself."""
