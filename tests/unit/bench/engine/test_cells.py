"""Bounds and figures of the engine bench, against values worked out by hand for the default model."""

import pytest

from bench.engine.cells import FULL, QUICK, Ceilings, Decode, Measured, ModelShape, Prefill

SMOLLM2 = ModelShape(
    parameters=134_515_008,
    body_parameters=106_203_456,
    layers=30,
    heads=9,
    kv_heads=3,
    head_dim=64,
    hidden=576,
    vocab=49_152,
)
"""SmolLM2-135M as its model card and field-notes.md section 1 describe it."""
MACHINE = Ceilings(read=10e9, matrix=1e12)


def test_the_kv_of_a_token_is_as_large_as_the_field_notes_say() -> None:
    assert SMOLLM2.kv_bytes_per_token == 23_040


def test_a_step_reads_the_weights_once_and_the_kv_of_every_sequence() -> None:
    assert Decode(1, 256).bytes(SMOLLM2) == 269_030_016 + 5_898_240
    assert Decode(8, 256).bytes(SMOLLM2) == 269_030_016 + 47_185_920
    assert Decode(8, 256).bound_s(SMOLLM2, MACHINE) == pytest.approx(0.0316215936)


def test_a_prompt_multiplies_each_token_with_the_body_and_one_row_with_the_vocabulary() -> None:
    shape = ModelShape(
        parameters=1100, body_parameters=1000, layers=2, heads=4, kv_heads=2, head_dim=8, hidden=10, vocab=7
    )
    # 3 tokens meet 1 + 2 + 3 keys; each pair costs 4 heads x 8 x 2 in the scores and as much in the sum.
    assert Prefill(3).flops(shape) == 2 * 1000 * 3 + 2 * (6 * 4 * 8 * 2 * 2) + 2 * 10 * 7


def test_causal_attention_is_a_small_part_of_512_tokens() -> None:
    assert Prefill(512).flops(SMOLLM2) == pytest.approx(2 * 106.2e6 * 512, rel=0.1)


def test_the_higher_ceiling_counts_of_each_kind() -> None:
    assert Ceilings(1.0, 4.0).better(Ceilings(2.0, 3.0)) == Ceilings(2.0, 4.0)


def test_figures_of_a_step_have_the_agreed_names() -> None:
    measured = Measured(Decode(8, 256), ours_s=0.040, plain_s=0.1, ceilings=MACHINE, shape=SMOLLM2)
    figures = measured.figures()
    assert figures["decode_ms_b8_c256"] == pytest.approx(40)
    assert figures["decode_over_bound_b8_c256"] == pytest.approx(0.040 / 0.0316215936)
    assert figures["decode_speedup_over_transformers_b8_c256"] == pytest.approx(2.5)


def test_figures_of_a_prompt_have_the_agreed_names() -> None:
    measured = Measured(Prefill(512), ours_s=0.25, plain_s=0.5, ceilings=MACHINE, shape=SMOLLM2)
    figures = measured.figures()
    assert figures["prefill_tok_s_512"] == pytest.approx(2048)
    assert figures["prefill_share_of_peak_512"] == pytest.approx(Prefill(512).flops(SMOLLM2) / 1e12 / 0.25)
    assert figures["prefill_speedup_over_transformers_512"] == pytest.approx(2)


def test_the_quick_run_is_a_part_of_the_whole_one() -> None:
    assert set(QUICK) < set(FULL)
    assert len(FULL) == 3 + 2 * 5
