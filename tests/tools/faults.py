"""Faults of one stage of the pipeline: (a copy of what the stage gives, all seen so far) -> wrong.

The names of functions are words of test names. T tokens, H hidden size, I intermediate size,
E experts, K choices a token, S = T*K slots, rows in expert order.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

Change = Callable[[Any, SimpleNamespace], Any]
TILE = 16
"""Rows of a tile of these faults; an expert of 80 tokens with two choices has about 20 rows."""


def named(name: str) -> Callable[[Change], Change]:
    """Gives a fault the words that it has in the names of tests."""

    def name_it(change: Change) -> Change:
        change.__name__ = name
        return change

    return name_it


def times(factor: float) -> Change:
    """All of it times a number."""
    return named(f"times {factor}")(lambda t, c: t * factor)


def of_expert(which: int, factor: float) -> Change:
    """One expert's rows, or its part of a gradient, times a number."""

    def change(t: Tensor, c: SimpleNamespace) -> Tensor:
        t[expert_rows(which, t, c)] *= factor
        return t

    return named(f"expert {which} times {factor}")(change)


def expert_rows(which: int, t: Tensor, c: SimpleNamespace) -> slice:
    """Where an expert is in [S, N] or [E, M, N]."""
    which %= c.experts
    if t.dim() == 3:
        return slice(which, which + 1)
    return slice(int(c.offsets[which]), int(c.offsets[which + 1]))


def lost(count: int) -> Change:
    """The last columns, or the first, are zero: a reduction or a store that ends early."""

    def change(t: Tensor, c: SimpleNamespace) -> Tensor:
        t[..., slice(-count, None) if count > 0 else slice(-count)] = 0
        return t

    where = "last" if count > 0 else "first"
    return named(f"{where} {abs(count)} columns lost")(change)


def zeros(t, c):
    return t * 0


def ones(t, c):
    return torch.ones_like(t)


def negated(t, c):
    return -t


def squared(t, c):
    return t * t


def doubled(t, c):
    return 2 * t


def flipped(t, c):
    """The order of a token's choices, or of columns."""
    return t.flip(-1)


def rolled(t, c):
    """Stale: each row, token or expert has what its neighbour has."""
    return t.roll(1, 0)


def columns_rolled(t, c):
    return t.roll(1, -1)


def rounded_to_bfloat16(t, c):
    return t.bfloat16().to(t.dtype)


def truncated_to_float16(t, c):
    """Toward zero, as no cast does."""
    return ((t.float().view(torch.int32) & ~0x1FFF).view(torch.float32)).to(t.dtype)


def one_element_off(t, c):
    t.view(-1)[t.numel() // 2 + 1] += t.float().square().mean().sqrt()
    return t


def last_element_off(t, c):
    t.view(-1)[-1] += t.float().square().mean().sqrt()
    return t


def one_NaN(t, c):
    t.view(-1)[t.numel() // 2 + 1] = torch.nan
    return t


def one_inf(t, c):
    t.view(-1)[t.numel() // 2 + 1] = torch.inf
    return t


def one_row_zero(t, c):
    t[len(t) // 2] = 0
    return t


def first_row_zero(t, c):
    t[0] = 0
    return t


def last_row_zero(t, c):
    t[-1] = 0
    return t


def one_row_repeated(t, c):
    t[len(t) // 2] = t[len(t) // 2 + 1]
    return t


def two_rows_swapped(t, c):
    middle = len(t) // 2
    t[[middle, middle + 1]] = t[[middle + 1, middle]]
    return t


def ends_swapped(t, c):
    t[[0, -1]] = t[[-1, 0]]
    return t


def last_row_of_each_expert_zero(t, c):
    for begin, end in zip(c.offsets[:-1], c.offsets[1:]):
        if end > begin:
            t[end - 1] = 0
    return t


def first_row_of_each_expert_zero(t, c):
    for begin, end in zip(c.offsets[:-1], c.offsets[1:]):
        if end > begin:
            t[begin] = 0
    return t


def second_tile_of_each_expert_zero(t, c):
    for begin, end in zip(c.offsets[:-1], c.offsets[1:]):
        t[begin + TILE : max(begin + TILE, end)] = 0
    return t


def last_tile_zero(t, c):
    t[int(c.offsets[-1]) // TILE * TILE - TILE :] = 0
    return t


def halves_swapped(t, c):
    return torch.cat(t.chunk(2, -1)[::-1], -1)


def interleaved(t, c):
    """Concatenated halves read as pairs."""
    return torch.cat([t[..., ::2], t[..., 1::2]], -1)


def first_half_twice(t, c):
    return torch.cat([t.chunk(2, -1)[0]] * 2, -1)


def first_half_zero(t, c):
    t[..., : t.shape[-1] // 2] = 0
    return t


def second_half_zero(t, c):
    t[..., t.shape[-1] // 2 :] = 0
    return t


# of weights and their gradients [E, N, K]


def of_the_neighbour(t, c):
    return t.roll(1, 0)


def last_experts_are_the_firsts(t, c):
    t[-1] = t[0]
    return t


def one_expert_zero(t, c):
    t[len(t) // 2] = 0
    return t


def transposed(t, c):
    return t.mT.contiguous()


def row_halves_swapped(t, c):
    """Gate and up of [E, 2I, H]."""
    return torch.cat(t.chunk(2, 1)[::-1], 1)


def gate_rows_zero(t, c):
    t[:, : t.shape[1] // 2] = 0
    return t


def up_rows_zero(t, c):
    t[:, t.shape[1] // 2 :] = 0
    return t


def last_row_of_each_matrix_zero(t, c):
    t[:, -1] = 0
    return t


def _unused(t: Tensor, c: SimpleNamespace, value: float) -> Tensor:
    t[c.counts == 0] = value
    return t


@named("of experts without tokens tiny")
def unused_tiny(t, c):
    return _unused(t, c, 1e-6)


@named("of experts without tokens NaN")
def unused_nan(t, c):
    return _unused(t, c, torch.nan)


@named("of experts without tokens another's")
def unused_stale(t, c):
    t[c.counts == 0] = t[c.counts > 0][0]
    return t


@named("instead of .grad's sum")
def overwrites_up(t, c):
    return t - _grad(c, "up")


@named("instead of .grad's sum")
def overwrites_down(t, c):
    return t - _grad(c, "down")


@named("and .grad again")
def adds_twice_up(t, c):
    return t + _grad(c, "up")


@named("and .grad again")
def adds_twice_down(t, c):
    return t + _grad(c, "down")


@named("and .grad of a neighbour")
def adds_neighbour_up(t, c):
    grad = _grad(c, "up")
    return t - grad + grad.roll(1, 0)


@named("and .grad rounded to bfloat16")
def adds_rounded_down(t, c):
    grad = _grad(c, "down")
    return (t + grad).bfloat16().float() - grad


def _grad(c: SimpleNamespace, which: str) -> Tensor:
    leaf = c.leaves[which]
    return leaf.grad.float() if leaf.is_leaf else leaf._base.grad.mT.float()


# of the order


def boundaries_late(t, c):
    t[1:-1] += 1
    return t


def boundaries_early(t, c):
    t[1:-1] = (t[1:-1] - 1).clamp(min=0)
    return t


def one_boundary_late(t, c):
    t[len(t) // 2] += 1
    return t


def last_row_left_out(t, c):
    t[-1] -= 1
    return t


def first_row_left_out(t, c):
    t[0] = 1
    return t


def last_expert_left_out(t, c):
    t[-1] = t[-2]
    return t


def first_expert_left_out(t, c):
    t[0] = t[1]
    return t


def unsorted(t, c):
    return torch.arange(len(t))


def unstable(t, c):
    """Each expert's slots in reverse."""
    for begin, end in zip(c.offsets[:-1], c.offsets[1:]):
        t[begin:end] = t[begin:end].flip(0)
    return t


def one_dropped(t, c):
    t[len(t) // 2] = -1
    return t


def last_dropped(t, c):
    t[-1] = -1
    return t


def choices_flipped(t, c):
    return t.view(-1, c.top_k).flip(1).reshape(-1)


def counted_as_choices_of_tokens(t, c):
    """slot % T instead of slot // K."""
    return c.row_to_slot % c.tokens


def slots_taken_for_tokens(t, c):
    return c.row_to_slot.clamp(max=c.tokens - 1)


def one_choice_too_many(t, c):
    return c.row_to_slot // (c.top_k + 1)


def last_tokens_are_the_lasts_neighbour(t, c):
    return t.clamp(max=c.tokens - 2)


# of the activation [S, I] or [T, K, I]


def gelu(t, c):
    return F.gelu(c.gate) * c.up


def relu(t, c):
    return F.relu(c.gate) * c.up


def sigmoid_alone(t, c):
    return c.gate.sigmoid() * c.up


def quick_gelu(t, c):
    return c.gate * (1.702 * c.gate).sigmoid() * c.up


def without_up(t, c):
    return F.silu(c.gate)


def ungated(t, c):
    return c.gate * c.up


def up_plus_one(t, c):
    return F.silu(c.gate) * (c.up + 1)


def clamped(t, c):
    return F.silu(c.gate.clamp(max=1)) * c.up


def silu_of_both(t, c):
    return F.silu(c.gate * c.up)


def weighted_behind_the_gate(t, c):
    return F.silu(c.gate / c.scale) * c.up


def weighted_before_the_gate_alone(t, c):
    return F.silu(c.gate) * c.up / c.scale


# of the combination: weights [T, K], slots [T, K, H]


def even(t, c):
    return torch.full_like(t, 1 / t.shape[-1])


def in_row_order(t, c):
    return t.reshape(-1)[c.row_to_slot].view_as(t)


def of_the_first_choice(t, c):
    return t[:, :1].expand_as(t)


def small_ones_zero(t, c):
    return t.where(t > 0.25, 0)


def normalised_again(t, c):
    return t / t.square().sum(-1, keepdim=True).sqrt()


def first_choice_alone(t, c):
    t[:, 1:] = 0
    return t


def last_choice_alone(t, c):
    t[:, :-1] = 0
    return t


def choices_alternate(t, c):
    """The second choice of every other token is lost."""
    t[::2, -1] = 0
    return t


def weighted_twice(t, c):
    return t * c.weights.view(c.tokens, c.top_k, 1)


def averaged(t, c):
    return t / c.top_k


def odd_tokens_zero(t, c):
    t[1::2] = 0
    return t


def tokens_from_64_zero(t, c):
    t[64:] = 0
    return t


def input_added(t, c):
    """A residual that is not the block's."""
    return t + c.x


def summed_in_bfloat16(t, c):
    return t.bfloat16().to(t.dtype)


# of decoding


def next_expert(t, c):
    return (t + 1) % c.experts


def first_choice_twice(t, c):
    return t[:, :1].expand_as(t)


def dropped_count(t, c):
    c.valid = torch.ones_like(c.valid)
    return t


# of gradients


def weight_left_out(t, c):
    return t / c.scale


def weight_twice(t, c):
    return t * c.scale


def wrong_sign(t, c):
    return c.sig * (1 - c.gate * (1 - c.sig))


def missing_sigmoid(t, c):
    return 1 + c.gate * (1 - c.sig)


def sigmoid_itself(t, c):
    return c.sig


def sigmoids_derivative(t, c):
    return c.sig * (1 - c.sig)


def silu_itself(t, c):
    return c.gate * c.sig


def missing_complement(t, c):
    return c.sig * (1 + c.gate)


def of_up(t, c):
    sig = c.up.sigmoid()
    return sig * (1 + c.up * (1 - sig))


def gate_itself(t, c):
    return c.gate


def unweighted(t, c):
    return c.unweighted


def without_activation(t, c):
    return c.gate * c.scale


def other_order(t, c):
    """Tokens in slot order where rows are wanted."""
    return c.d_out.repeat_interleave(c.top_k, 0)


def x_in_slot_order(t, c):
    return c.x.repeat_interleave(c.top_k, 0)


def first_column_alone(t, c):
    t[:, 1:] = 0
    return t


def last_column_zero(t, c):
    t[:, -1] = 0
    return t


def dropped_slots_one(t, c):
    return t.where(c.slot_to_row.view_as(t) >= 0, 1e-6)


def dropped_slots_stale(t, c):
    return t.where(c.slot_to_row.view_as(t) >= 0, t.max())


def dropped_rows_counted(t, c):
    """Slots that were dropped read row 0."""
    return t + (c.slot_to_row < 0).view(c.tokens, c.top_k, 1) * t[c.slot_to_row.argmax() // c.top_k]


def dropped_are_counted(t, c):
    return t.clamp(min=0)


def kept_by_gate_alone(t, c):
    """Only the gate's half of the sum over both."""
    one = c.d_pre.chunk(2, -1)[0] / c.scale * c.pre.chunk(2, -1)[0]
    return one.unflatten(1, (-1, 16)).sum(-1)


def already_weighted(t, c):
    return t * c.scale if hasattr(c, "scale") else t * c.weights.reshape(-1)[c.row_to_slot][:, None]


# of routers: [T, E] or [T, K]


def softmax_instead(t, c):
    return c.logits.softmax(-1)


def sigmoid_instead(t, c):
    return c.logits.sigmoid()


def best_left_out(t, c):
    return t.scatter(1, t.argmax(-1, keepdim=True), -torch.inf)


def last_expert_never(t, c):
    t[:, -1] = -torch.inf
    return t


def first_expert_favoured(t, c):
    t[:, 0] += 0.5
    return t


def one_token_astray(t, c):
    worst = c.logits[len(t) // 2].argmin()
    t[len(t) // 2, -1] = worst
    return t


def one_token_by_the_firsts(t, c):
    t[len(t) // 2] = t[0]
    return t


def renormalised(t, c):
    return t / t.sum(-1, keepdim=True)


def averaged_over_choices(t, c):
    return t / c.top_k


def not_renormalised(t, c):
    return torch.ones_like(t)


def of_all_experts(t, c):
    return c.scores.sum(-1, keepdim=True)


def leaks_bias(t, c):
    return t + c.bias.float()[c.index]


def bias_ignored(t, c):
    return t * 0


def groups_ignored(t, c):
    return torch.zeros_like(t)


def groups_inverted(t, c):
    return ~t


def groups_interleaved(t, c):
    return t.view(len(t), c.num_groups, -1).mT.reshape(len(t), -1)


def one_group_more(t, c):
    t[:, : t.shape[1] // c.num_groups] = False
    return t


def by_their_sum(t, c):
    choice = c.scores + (0 if c.bias is None else c.bias)
    return choice.unflatten(1, (c.num_groups, -1)).sum(-1)


def without_bias(t, c):
    return c.scores.unflatten(1, (c.num_groups, -1)).sum(-1)


def not_scaled(t, c):
    return t / c.scale


def scaled_twice(t, c):
    return t * c.scale


def score_itself(t, c):
    return c.scores


def complement_alone(t, c):
    return 1 - c.scores


def score_squared(t, c):
    return c.scores**2


def last_expert_zero(t, c):
    t[:, -1] = 0
    return t


def of_last_expert_zero(t, c):
    return t.where(c.index < c.index.max(), 0)


def not_chosen_get_some(t, c):
    return t + 0.02 * t.square().mean().sqrt()


def all_experts_shown(t, c):
    return t + (t == 0) * 0.1


def in_wrong_columns(t, c):
    return t.roll(1, 1)


# of what a router returns


def detached(t, c):
    return t.detach()


def plus_one(t, c):
    """The softmax of it is the same, and the auxiliary loss."""
    return t + 1


def narrowed(t, c):
    return t.int()
