"""The table of mutants: every stage of the pipeline (pipeline.py) with faults (faults.py) that are
really different functions, always or under a condition (mutant.py)."""

from __future__ import annotations

from collections.abc import Iterator

import faults as f
from faults import Change, lost, of_expert, times
from mutant import (
    ADDED,
    ALWAYS,
    AUTOCAST,
    AUTOCAST_ALONE,
    BESIDE,
    DROPPED,
    DROPPED_ALONE,
    FEW,
    FROZEN,
    FROZEN_DOWN,
    FROZEN_UP,
    INFERENCE,
    MORE,
    ODD,
    ONE,
    RECOMPUTED,
    SECOND,
    STRIDED,
    STRIDED_ALONE,
    TRAINING,
    Mutant,
    When,
    question_for,
)

ROUNDINGS = (
    f.rounded_to_bfloat16,
    f.truncated_to_float16,
    f.adds_rounded_down,
    f.summed_in_bfloat16,
)


def _cross(
    stages: str, changes: tuple[Change, ...], *conditions: When, on: str = "qwen3"
) -> Iterator[Mutant]:
    for stage in stages.split(" | "):
        for change in changes:
            for when in conditions or (ALWAYS,):
                question = question_for(stage, when, on)
                small = change in ROUNDINGS or (change, stage[-3:]) == (f.one_element_off, "pre")
                yield Mutant(stage, change, when, question, small)


def _forward() -> Iterator[Mutant]:
    """Sort, both products, the gate and the combination."""
    yield from _cross(
        "expert_offsets",
        (f.boundaries_late, f.boundaries_early, f.one_boundary_late, f.last_row_left_out,
         f.first_row_left_out, f.last_expert_left_out, f.first_expert_left_out),
    )  # fmt: skip
    yield from _cross(
        "row_to_slot", (f.rolled, f.two_rows_swapped, f.ends_swapped, f.unsorted, f.unstable)
    )
    yield from _cross(
        "slot_to_row",
        (f.two_rows_swapped, f.one_dropped, f.last_dropped, f.unsorted, f.choices_flipped),
    )
    yield from _cross(
        "token of row",
        (f.counted_as_choices_of_tokens, f.slots_taken_for_tokens, f.one_choice_too_many,
         f.last_tokens_are_the_lasts_neighbour),
    )  # fmt: skip
    yield from _cross(
        "x rows",
        (lost(8), lost(-8), f.columns_rolled, f.one_row_repeated, f.one_element_off,
         f.last_element_off, f.one_NaN, f.rounded_to_bfloat16),
    )  # fmt: skip
    yield from _cross(
        "gate_up weights | down weights",
        (f.of_the_neighbour, f.last_experts_are_the_firsts, f.rounded_to_bfloat16,
         f.one_element_off, f.last_row_of_each_matrix_zero),
    )  # fmt: skip
    yield from _cross("gate_up weights", (f.one_expert_zero,))
    yield from _cross("down weights", (f.transposed,), on="square down_proj")
    yield from _cross("gate_up weights", (f.transposed,), on="square gate_up_proj")
    yield from _cross(
        "pre",
        (times(0.98), times(1.02), f.negated, lost(8), f.halves_swapped, f.interleaved,
         f.first_half_twice, f.one_element_off, f.rounded_to_bfloat16, f.truncated_to_float16,
         f.last_row_of_each_expert_zero, f.second_tile_of_each_expert_zero, of_expert(0, 0.98),
         of_expert(-1, 1.02)),
    )  # fmt: skip
    yield from _cross(
        "act",
        (f.gelu, f.relu, f.sigmoid_alone, f.quick_gelu, f.without_up, f.ungated, f.up_plus_one,
         f.clamped, f.silu_of_both, lost(-8), f.one_element_off, f.rounded_to_bfloat16,
         f.columns_rolled, f.last_tile_zero, f.first_row_of_each_expert_zero),
    )  # fmt: skip
    yield from _cross(
        "rows",
        (f.one_element_off, f.rolled, f.rounded_to_bfloat16, of_expert(0, 0.98),
         of_expert(-1, 1.02), f.one_row_zero),
    )  # fmt: skip
    yield from _cross(
        "out weights",
        (f.ones, f.squared, f.rolled, f.even, f.in_row_order, f.of_the_first_choice,
         f.small_ones_zero, f.normalised_again, f.rounded_to_bfloat16, f.one_row_repeated,
         f.two_rows_swapped),
    )  # fmt: skip
    yield from _cross(
        "out slots",
        (f.first_choice_alone, f.last_choice_alone, f.choices_alternate, f.rounded_to_bfloat16),
    )
    yield from _cross(
        "out",
        (f.zeros, times(0.98), times(1.02), f.negated, f.doubled, f.averaged, lost(8),
         f.columns_rolled, f.rolled, f.one_element_off, f.last_element_off, f.one_NaN, f.one_inf,
         f.one_row_zero, f.first_row_zero, f.last_row_zero, f.one_row_repeated,
         f.two_rows_swapped, f.ends_swapped, f.odd_tokens_zero, f.tokens_from_64_zero,
         f.input_added, f.rounded_to_bfloat16, f.truncated_to_float16),
    )  # fmt: skip
    yield from _cross(
        "out", (f.zeros, times(1.02), f.one_element_off),
        TRAINING, ONE, FEW, FROZEN, FROZEN_UP, FROZEN_DOWN, STRIDED, STRIDED_ALONE, AUTOCAST_ALONE,
    )  # fmt: skip
    yield from _cross("out", (f.rolled, f.last_row_zero), ODD, TRAINING, DROPPED, DROPPED_ALONE)
    yield from _cross("out", (f.last_element_off,), SECOND, MORE)
    yield from _cross("out | decode out", (times(0.98), f.last_element_off, lost(8)), BESIDE)
    yield from _cross("out slots", (f.dropped_rows_counted,), DROPPED, DROPPED_ALONE)
    yield from _cross("slot_to_row", (f.dropped_are_counted,), DROPPED, DROPPED_ALONE)


def _decode() -> Iterator[Mutant]:
    """A token without gradients."""
    yield from _cross("decode x", (lost(8), f.columns_rolled, f.one_NaN))
    yield from _cross("decode index", (f.next_expert, f.flipped, f.first_choice_twice))
    yield from _cross("decode weights", (f.ones, f.squared, f.even, f.normalised_again))
    yield from _cross(
        "decode pre",
        (times(0.98), lost(8), f.halves_swapped, f.interleaved, f.first_half_twice,
         f.one_element_off, f.rounded_to_bfloat16),
    )  # fmt: skip
    yield from _cross(
        "decode act",
        (f.gelu, f.relu, f.sigmoid_alone, f.without_up, f.ungated, f.up_plus_one, lost(-8),
         f.rounded_to_bfloat16),
    )  # fmt: skip
    yield from _cross(
        "decode out",
        (times(0.98), times(1.02), f.negated, f.averaged, f.one_element_off, f.last_element_off,
         f.one_NaN, lost(8), lost(1), f.columns_rolled, f.input_added, f.rounded_to_bfloat16),
    )  # fmt: skip
    yield from _cross("decode out", (times(0.98), f.last_element_off), AUTOCAST_ALONE)
    yield from _cross("decode out", (f.last_element_off,), SECOND)
    yield from _cross("decode index", (f.dropped_count,), DROPPED_ALONE)
    yield from _cross("decode rows", (f.last_choice_alone, f.one_element_off))
    yield from _cross("decode weights", (f.ones, f.squared), on="llama4")
    yield from _cross("decode out", (times(0.98), f.columns_rolled), on="llama4")


def _backward() -> Iterator[Mutant]:
    """Every gradient of the experts."""
    yield from _cross(
        "d_out rows",
        (times(0.98), f.negated, f.ones, f.other_order, f.one_row_repeated, lost(8), f.one_NaN,
         f.rounded_to_bfloat16, f.last_row_of_each_expert_zero),
    )  # fmt: skip
    yield from _cross(
        "dgate weights", (f.of_the_neighbour, f.last_experts_are_the_firsts, f.one_expert_zero)
    )
    yield from _cross("dgate weights", (f.transposed,), on="square down_proj")
    yield from _cross(
        "dgate pre", (f.halves_swapped, f.rolled, f.interleaved, f.rounded_to_bfloat16)
    )
    yield from _cross("dgate scale", (f.ones, f.squared, f.rolled, f.flipped))
    yield from _cross(
        "d_act",
        (times(0.98), f.negated, f.one_element_off, lost(8), f.second_tile_of_each_expert_zero,
         of_expert(-1, 1.02), f.rounded_to_bfloat16),
    )  # fmt: skip
    yield from _cross(
        "silu'",
        (f.wrong_sign, f.missing_sigmoid, f.sigmoid_itself, f.sigmoids_derivative, f.silu_itself,
         f.missing_complement, f.of_up, f.ones),
    )  # fmt: skip
    yield from _cross("silu", (f.sigmoid_itself, f.gate_itself, f.ones))
    yield from _cross(
        "d_gate | d_up", (f.zeros, f.negated, times(0.98), lost(8), f.weight_left_out)
    )
    yield from _cross(
        "d_pre",
        (f.halves_swapped, f.weight_left_out, f.weight_twice, f.rounded_to_bfloat16,
         f.last_row_of_each_expert_zero, f.last_tile_zero, f.one_element_off, f.rolled),
    )  # fmt: skip
    yield from _cross(
        "d_scale",
        (f.zeros, times(0.98), f.negated, f.first_column_alone, f.last_column_zero, f.weight_twice,
         f.weight_left_out, f.rolled, f.rounded_to_bfloat16, f.last_row_of_each_expert_zero),
    )  # fmt: skip
    yield from _cross(
        "d_weights",
        (f.flipped, f.one_element_off, f.one_NaN, f.first_choice_alone, f.last_row_zero, f.rolled,
         f.even),
    )  # fmt: skip
    yield from _cross("dw_down left", (f.other_order, f.one_row_repeated))
    yield from _cross(
        "dw_down right",
        (f.unweighted, f.weight_twice, f.without_activation, f.last_row_of_each_expert_zero,
         f.second_tile_of_each_expert_zero, f.rolled),
    )  # fmt: skip
    yield from _cross(
        "dw_gate_up right",
        (f.x_in_slot_order, f.weight_twice, f.rolled, lost(8), f.one_row_repeated),
    )
    yield from _cross(
        "dw_gate_up left", (f.last_row_of_each_expert_zero, f.second_tile_of_each_expert_zero)
    )
    yield from _cross(
        "d_down_proj | d_gate_up_proj",
        (f.zeros, times(0.98), times(1.02), f.negated, f.doubled, f.one_element_off, f.one_NaN,
         f.last_element_off, of_expert(-1, 0.0), of_expert(0, 0.9), of_expert(3, 1.02),
         f.of_the_neighbour, f.last_experts_are_the_firsts, f.rounded_to_bfloat16,
         f.truncated_to_float16, f.last_row_of_each_matrix_zero),
    )  # fmt: skip
    yield from _cross("d_gate_up_proj", (f.row_halves_swapped, f.gate_rows_zero, f.up_rows_zero))
    yield from _cross("d_down_proj", (f.transposed,), on="square down_proj")
    yield from _cross("d_gate_up_proj", (f.transposed,), on="square gate_up_proj")
    yield from _cross(
        "d_down_proj | d_gate_up_proj", (f.unused_tiny, f.unused_nan, f.unused_stale), ONE
    )
    yield from _cross(
        "d_down_proj", (f.overwrites_down, f.adds_twice_down, f.adds_rounded_down), ADDED
    )
    yield from _cross(
        "d_gate_up_proj", (f.overwrites_up, f.adds_twice_up, f.adds_neighbour_up), ADDED
    )
    yield from _cross("d_gate_up_proj", (f.overwrites_up,), ADDED, on="llama4")
    yield from _cross("dx weights", (f.of_the_neighbour, f.one_expert_zero))
    yield from _cross("dx left", (f.first_half_zero, f.second_half_zero, f.halves_swapped))
    yield from _cross(
        "dx rows",
        (f.last_row_of_each_expert_zero, f.two_rows_swapped, of_expert(-1, 0.98), f.rolled,
         f.second_tile_of_each_expert_zero),
    )  # fmt: skip
    yield from _cross(
        "d_hidden slots", (f.first_choice_alone, f.last_choice_alone, f.weighted_twice)
    )
    yield from _cross(
        "d_hidden",
        (f.zeros, times(0.98), times(1.02), f.negated, f.averaged, f.one_element_off, f.one_NaN,
         f.one_row_zero, f.last_row_zero, f.two_rows_swapped, f.rolled, f.columns_rolled, lost(8),
         f.rounded_to_bfloat16, f.truncated_to_float16, f.input_added),
    )  # fmt: skip
    # under conditions
    yield from _cross("d_hidden", (times(0.98), f.one_element_off), ONE, FROZEN, AUTOCAST, STRIDED)
    yield from _cross("d_hidden", (f.zeros,), FROZEN_UP, FEW, MORE, ODD)
    yield from _cross("d_weights", (times(0.98), f.flipped), ONE, FROZEN, AUTOCAST, STRIDED)
    yield from _cross("d_weights", (f.dropped_slots_one, f.dropped_slots_stale), DROPPED)
    yield from _cross("d_down_proj", (times(0.98), f.one_element_off), ONE, FROZEN_UP, AUTOCAST)
    yield from _cross(
        "d_gate_up_proj", (times(0.98), f.one_element_off), ONE, FROZEN_DOWN, AUTOCAST
    )
    yield from _cross("d_gate_up_proj | d_down_proj", (f.one_expert_zero,), FEW, STRIDED, DROPPED)
    yield from _cross("d_hidden slots", (f.dropped_rows_counted,), DROPPED)
    yield from _cross("saved pre", (times(0.98),), RECOMPUTED)
    yield from _cross(
        "saved pre", (times(0.98), f.halves_swapped, f.rounded_to_bfloat16), RECOMPUTED,
        on="mixtral",
    )  # fmt: skip
    yield from _cross("slot_to_row", (f.choices_flipped,), RECOMPUTED, on="mixtral")
    yield from _cross("saved pre", (f.zeros, f.one_element_off))
    yield from _cross("d_hidden | d_down_proj | d_gate_up_proj", (f.last_element_off,), SECOND)


def _weight_on_input() -> Iterator[Mutant]:
    """Llama4, whose weight multiplies the input of an expert."""
    yield from _cross(
        "row weights", (f.ones, f.squared, f.rolled, f.rounded_to_bfloat16), on="llama4"
    )
    yield from _cross(
        "act",
        (f.weighted_behind_the_gate, f.weighted_before_the_gate_alone),
        on="llama4",
    )
    yield from _cross("out", (times(0.98), f.one_element_off, f.rolled), on="llama4")
    yield from _cross("saved pre", (f.already_weighted, f.rounded_to_bfloat16), on="llama4")
    yield from _cross("dgate scale", (f.ones, f.squared, f.rolled), on="llama4")
    yield from _cross("d_pre", (f.weight_left_out, f.weight_twice), on="llama4")
    yield from _cross("d_gate | d_up", (f.weight_left_out, f.zeros), on="llama4")
    yield from _cross(
        "d_scale",
        (f.weight_twice, f.kept_by_gate_alone, f.zeros, f.last_column_zero, times(0.98)),
        on="llama4",
    )
    yield from _cross("dw_gate_up right", (f.weight_twice,), on="llama4")
    yield from _cross("dw_down right", (f.weight_twice,), on="llama4")
    yield from _cross(
        "d_hidden | d_down_proj | d_gate_up_proj", (times(0.98), f.one_element_off), on="llama4"
    )
    yield from _cross("d_hidden | d_weights", (f.zeros, times(0.95)), ONE, on="llama4")


def _routing() -> Iterator[Mutant]:
    """Scores, groups, choice and weights of routers, and their gradients."""
    yield from _cross(
        "choice",
        (f.best_left_out, f.last_expert_never, f.first_expert_favoured, f.negated, f.rolled,
         f.columns_rolled, f.one_token_by_the_firsts),
    )  # fmt: skip
    yield from _cross("index", (f.one_token_astray,))
    yield from _cross("choice", (f.best_left_out, f.columns_rolled), INFERENCE, ONE, MORE)
    yield from _cross("choice", (f.best_left_out,), BESIDE)
    yield from _cross("scores", (f.sigmoid_instead, f.rounded_to_bfloat16))
    yield from _cross("total", (f.not_renormalised,))
    yield from _cross(
        "weights",
        (times(0.98), times(1.02), f.flipped, f.even, f.squared, f.rolled, f.one_element_off,
         f.one_NaN, f.one_row_zero, f.last_row_zero, f.one_row_repeated, f.rounded_to_bfloat16,
         f.of_last_expert_zero),
    )  # fmt: skip
    yield from _cross("weights", (times(0.98), f.flipped), INFERENCE, TRAINING, ONE, MORE, AUTOCAST)
    yield from _cross("d_shares", (f.flipped, f.first_choice_alone, f.ones), on="qwen3")
    yield from _cross("inner", (f.zeros, f.doubled, f.averaged_over_choices))
    yield from _cross(
        "d_logits",
        (f.zeros, times(0.98), times(1.02), f.one_element_off, f.one_NaN, f.one_row_zero,
         f.last_row_zero, f.rolled, f.two_rows_swapped, f.columns_rolled, f.last_expert_zero,
         f.not_chosen_get_some, f.rounded_to_bfloat16),
    )  # fmt: skip
    yield from _cross("d_logits", (f.zeros, times(0.98)), ONE, MORE, AUTOCAST)
    # sigmoid, bias, groups and scale
    on = {"on": "deepseek_v3"}
    yield from _cross("scores", (f.softmax_instead,), **on)
    yield from _cross("bias", (f.bias_ignored, f.negated, f.doubled, f.columns_rolled), **on)
    yield from _cross("chosen", (f.leaks_bias,), **on)
    yield from _cross(
        "group mask",
        (f.groups_ignored, f.groups_inverted, f.groups_interleaved, f.one_group_more),
        **on,
    )
    yield from _cross("groups", (f.without_bias, f.columns_rolled), **on)
    yield from _cross("total", (f.not_renormalised, f.of_all_experts), **on)
    yield from _cross(
        "weights", (f.not_scaled, f.scaled_twice, times(0.98), f.flipped, f.one_element_off), **on
    )
    yield from _cross("d_shares", (f.not_scaled, f.flipped), **on)
    yield from _cross("inner", (f.zeros, f.doubled), **on)
    yield from _cross(
        "sigmoid'", (f.score_itself, f.complement_alone, f.ones, f.score_squared), **on
    )
    yield from _cross("d_logits", (f.zeros, times(0.98), f.one_element_off, f.rolled), **on)
    yield from _cross("weights | d_logits", (times(0.98),), ONE, **on)
    yield from _cross("weights", (times(0.98),), BESIDE, **on)
    yield from _cross("group mask", (f.groups_ignored,), BESIDE, **on)
    yield from _cross("returned logits", (f.detached, times(1.01)), TRAINING, **on)
    # softmax, groups by their best, scale, no renormalisation
    on = {"on": "deepseek_v2"}
    yield from _cross("scores", (f.sigmoid_instead,), **on)
    yield from _cross("group mask", (f.groups_ignored, f.groups_inverted), **on)
    yield from _cross("groups", (f.by_their_sum,), **on)
    yield from _cross("shares", (f.renormalised,), **on)
    yield from _cross("weights", (f.not_scaled, f.scaled_twice), **on)
    yield from _cross("mean", (f.zeros, f.doubled, f.negated), **on)
    yield from _cross("d_shares", (f.not_scaled,), **on)
    # softmax of all, renormalised
    yield from _cross("weights", (times(0.98), f.flipped), on="mixtral")
    yield from _cross("weights", (times(0.98), f.one_NaN), BESIDE, on="mixtral")
    yield from _cross("choice", (f.best_left_out,), BESIDE, on="mixtral")
    yield from _cross("returned logits", (f.detached, f.plus_one), TRAINING, on="mixtral")
    yield from _cross("returned index", (f.narrowed,), TRAINING, on="mixtral")
    yield from _cross("d_logits", (times(0.98), f.zeros), on="mixtral")
    # sigmoid, no renormalisation
    on = {"on": "llama4"}
    yield from _cross("choice", (f.best_left_out, f.rolled), **on)
    yield from _cross("scores", (f.softmax_instead,), **on)
    yield from _cross("weights", (times(0.98), f.rolled, f.one_element_off), **on)
    yield from _cross(
        "dense scores", (f.all_experts_shown, f.in_wrong_columns, f.zeros, times(0.9)), **on
    )
    yield from _cross("dense scores", (f.zeros,), BESIDE, **on)
    yield from _cross("weights", (times(0.98),), BESIDE, **on)
    yield from _cross("sigmoid'", (f.score_itself, f.complement_alone, f.ones), **on)
    yield from _cross("d_logits", (times(0.98), f.zeros, f.rolled, f.one_element_off), **on)


def mutants() -> list[Mutant]:
    """All of them."""
    return [
        *_forward(),
        *_decode(),
        *_backward(),
        *_weight_on_input(),
        *_routing(),
    ]
