"""FP8 with block scales: quantise, grouped GEMMs in three layouts, DeepSeek-V3's whole layer.

e4m3 throughout. Activations have a float32 scale for each row and 128 columns (1x128), weights one
for each 128 x 128 block; value = e4m3 * scale. Sums are promoted to float32 every 128 of K.
(DeepSeek-V3, arXiv:2412.19437, section 3.3.) Inference only: nothing here has a gradient.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .. import kernels
from ..activation import Activation, parse
from ..formats.scaled import E4M3, SCALES, blocks, check_scaled
from ..kernels import on_device, op, require
from ..kernels.ahead import compiled_together
from ..order import ExpertOrder
from .grouped import group_order, rows_contiguous, sort
from .routing import select_experts


def _require(device: torch.device) -> None:
    require(device)
    if torch.compiler.is_compiling() or kernels.fp8_gemm.runs(device):
        return
    raise RuntimeError(
        f"{torch.cuda.get_device_name(device)} has no FP8 products (compute capability 8.9 or "
        "later): fused_experts runs FP8 weights there, multiplied in the activations' dtype."
    )


def _rows(name: str, x: Tensor, scale: Tensor, dims: int) -> Tensor:
    """The scales of rows x [..., K], as kernels read them."""
    if x.dtype != E4M3 or x.dim() != dims:
        raise TypeError(f"{name} must be {dims}-dimensional float8_e4m3fn, found {x.dtype} "
                        f"{tuple(x.shape)}.")  # fmt: skip
    if not x.is_contiguous():
        raise ValueError(f"{name} has strides {x.stride()}: call .contiguous() first.")
    if scale.dtype not in SCALES:
        raise TypeError(f"{name}'s scale is {scale.dtype}, use float32 or float8_e8m0fnu.")
    needed = (*x.shape[:-1], blocks(x.shape[-1]))
    if tuple(scale.shape) != needed:
        raise ValueError(
            f"{name} {tuple(x.shape)} needs a scale {needed}, one a block of 128, found "
            f"{tuple(scale.shape)}."
        )
    _together(x, **{f"{name}'s scale": scale})
    return scale.float()


def _together(x: Tensor, **others: Tensor | None) -> None:
    for name, other in others.items():
        if other is not None and other.device != x.device:
            raise ValueError(
                f"{name} is on {other.device}: {x.device} is needed, where the rest is."
            )


def _weight(name: str, weight: Tensor, scale: Tensor, scale_name: str) -> Tensor:
    """Its scales as kernels read them."""
    if weight.dim() != 3:
        raise ValueError(f"{name} must be [groups, N, K], found {tuple(weight.shape)}.")
    check_scaled(name, weight, scale, scale_name)
    if not weight.is_contiguous():
        raise ValueError(f"{name} has strides {weight.stride()}: call .contiguous() first.")
    return _plain(scale)


def quantize(x: Tensor, *, ue8m0: bool = False) -> tuple[Tensor, Tensor]:
    """Quantises rows, each group of 128 columns by its largest magnitude / 448.

    Args:
        x: [R, K], bfloat16, float16 or float32.
        ue8m0: round the scales up to powers of two.

    Returns:
        (float8_e4m3fn [R, K], float32 scales [R, ceil(K / 128)]); a group of zeros has scale 1.
        NaN stays NaN; an inf makes its group's scale inf, and products with it NaN.

    Raises:
        TypeError: another dtype or number of dimensions.
        RuntimeError: the device has no FP8.
    """
    if x.dim() != 2 or x.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        raise TypeError(
            f"quantize takes [rows, K] of bfloat16, float16 or float32, found {x.dtype} "
            f"{tuple(x.shape)}."
        )
    _require(x.device)
    return _quantize(x, ue8m0)


@op(lambda x, ue8m0: (
    x.new_empty(x.shape, dtype=E4M3),
    x.new_empty(blocks(x.shape[1]), x.shape[0], dtype=torch.float32).t(),
))  # fmt: skip
def _quantize(x: Tensor, ue8m0: bool) -> tuple[Tensor, Tensor]:
    with on_device(x.device):
        return kernels.quantize.quantize(rows_contiguous(x), ue8m0=ue8m0)


def grouped_gemm(
    lhs: Tensor, lhs_scale: Tensor, rhs: Tensor, rhs_scale: Tensor, offsets: Tensor
) -> Tensor:
    """Contiguous layout: rows of all groups stacked, out[r] = lhs[r] @ rhs[group of r]^T.

    Args:
        lhs: float8_e4m3fn [M, K].
        lhs_scale: float32 or float8_e8m0fnu [M, ceil(K / 128)], any strides; `quantize`'s are
            read best.
        rhs: float8_e4m3fn [G, N, K].
        rhs_scale: float32 or float8_e8m0fnu [G, ceil(N / 128), ceil(K / 128)].
        offsets: int32 or int64 [G + 1] on the device: rows offsets[g] to offsets[g + 1] - 1 are
            group g's. What passes M counts as M, what decreases as what stands before it.

    Returns:
        bfloat16 [M, N]; rows of no group are zero.

    Raises:
        ValueError, TypeError: shapes, dtypes, strides or devices that do not fit.
        RuntimeError: the device has no FP8.
    """
    lhs_scale, rhs_scale = _operands(lhs, lhs_scale, rhs, rhs_scale, dims=2)
    order = group_order(None, offsets, len(lhs), rhs)
    return _contiguous(lhs, lhs_scale, rhs, rhs_scale, list(order.tensors()), order.block_m)


def _operands(
    lhs: Tensor, lhs_scale: Tensor, rhs: Tensor, rhs_scale: Tensor, dims: int
) -> tuple[Tensor, Tensor]:
    """Both scales, as kernels read them."""
    rhs_scale = _weight("rhs", rhs, rhs_scale, "rhs_scale")
    lhs_scale = _rows("lhs", lhs, lhs_scale, dims)
    if lhs.shape[-1] != rhs.shape[2]:
        raise ValueError(
            f"lhs {tuple(lhs.shape)} does not fit rhs {tuple(rhs.shape)}: both end in K."
        )
    _together(lhs, rhs=rhs)
    _require(lhs.device)
    return lhs_scale, rhs_scale


@op(lambda lhs, _, rhs, *__: lhs.new_empty(lhs.shape[0], rhs.shape[1], dtype=torch.bfloat16))
def _contiguous(
    lhs: Tensor,
    lhs_scale: Tensor,
    rhs: Tensor,
    rhs_scale: Tensor,
    order: list[Tensor],
    block_m: int,
) -> Tensor:
    with on_device(lhs.device):
        order = ExpertOrder(*order, block_m=block_m)
        out, _ = kernels.fp8_gemm.fp8_gemm(lhs, lhs_scale, rhs, rhs_scale, order)
        return kernels.groups.zero_rest(out, order)


def masked_grouped_gemm(
    lhs: Tensor,
    lhs_scale: Tensor,
    rhs: Tensor,
    rhs_scale: Tensor,
    masked_m: Tensor,
    expected_m: int | None = None,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """Masked layout, for decoding in a CUDA graph: out[g, :masked_m[g]] = lhs[g] @ rhs[g]^T.

    Args:
        lhs: float8_e4m3fn [G, m_max, K].
        lhs_scale: float32 or float8_e8m0fnu [G, m_max, ceil(K / 128)].
        rhs: float8_e4m3fn [G, N, K].
        rhs_scale: float32 or float8_e8m0fnu [G, ceil(N / 128), ceil(K / 128)].
        masked_m: int32 [G] on the device: the rows of each group that count, clamped to m_max
            there.
        expected_m: a hint of the mean of masked_m, as other libraries take it. Nothing here
            depends on it.
        out: bfloat16 [G, m_max, N], contiguous, written in place; fresh by default.

    Returns:
        `out`; rows past masked_m are not touched.

    Raises:
        ValueError, TypeError: shapes, dtypes, strides or devices that do not fit.
        RuntimeError: the device has no FP8.
    """
    lhs_scale, rhs_scale = _operands(lhs, lhs_scale, rhs, rhs_scale, dims=3)
    groups, m_max, _ = lhs.shape
    if groups != len(rhs):
        raise ValueError(f"lhs has {groups} groups and rhs {len(rhs)}.")
    if masked_m.shape != (groups,) or masked_m.dtype != torch.int32:
        raise TypeError(
            f"masked_m must be int32 [{groups}], found {masked_m.dtype} {tuple(masked_m.shape)}."
        )
    if expected_m is not None and not 0 <= expected_m <= m_max:
        raise ValueError(f"expected_m is {expected_m}: it must be 0 to m_max = {m_max}.")
    shape = (groups, m_max, rhs.shape[1])
    if out is None:
        out = lhs.new_empty(shape, dtype=torch.bfloat16)
    elif out.shape != shape or out.dtype != torch.bfloat16 or not out.is_contiguous():
        raise ValueError(
            f"out must be contiguous bfloat16 {shape}, found {out.dtype} {tuple(out.shape)}."
        )
    _together(lhs, masked_m=masked_m, out=out)
    _masked(lhs, lhs_scale, rhs, rhs_scale, masked_m, out)
    return out


@op(lambda *_: None, mutates=("out",))
def _masked(
    lhs: Tensor, lhs_scale: Tensor, rhs: Tensor, rhs_scale: Tensor, masked_m: Tensor, out: Tensor
) -> None:
    with on_device(lhs.device):
        kernels.fp8_gemm.fp8_gemm(
            lhs.flatten(0, 1), lhs_scale.flatten(0, 1), rhs, rhs_scale,
            masked_m=masked_m.contiguous(), out=out.flatten(0, 1),
        )  # fmt: skip


def moe(
    hidden_states: Tensor,
    hidden_states_scale: Tensor | None,
    router_logits: Tensor,
    gate_up_proj: Tensor,
    gate_up_scale_inv: Tensor,
    down_proj: Tensor,
    down_scale_inv: Tensor,
    *,
    correction_bias: Tensor | None = None,
    local_expert_offset: int = 0,
    top_k: int = 8,
    num_groups: int = 8,
    top_groups: int = 4,
    routed_scaling_factor: float = 2.5,
    activation: Activation | str = "silu",
) -> Tensor:
    """DeepSeek-V3's routed experts on one rank: routing over all of them, products for the local.

    Args:
        hidden_states: float8_e4m3fn [T, H] with a scale, or bfloat16 [T, H] without.
        hidden_states_scale: float32 or float8_e8m0fnu [T, ceil(H / 128)], any strides; None for
            bfloat16.
        router_logits: [T, E] of all E experts, float32.
        gate_up_proj, gate_up_scale_inv: float8_e4m3fn [L, 2I, H], gates first, of the L local
            experts, with [L, ceil(2I / 128), ceil(H / 128)]; I is a multiple of 128.
        down_proj, down_scale_inv: float8_e4m3fn [L, H, I] with [L, ceil(H / 128), ceil(I / 128)].
        correction_bias: [E], added to the sigmoids for the choice alone.
        local_expert_offset: the first local expert's id; others' slots add nothing.
        top_k, num_groups, top_groups, routed_scaling_factor: of DeepseekV3TopkRouter: the best
            `top_k` of the `top_groups` groups whose two best sum highest, normalised and scaled.
        activation: instead of silu(gate) * up; concatenated ones only.

    Returns:
        bfloat16 [T, H].

    Raises:
        ValueError, TypeError: shapes, dtypes, strides or devices that do not fit.
        RuntimeError: the device has no FP8.
    """
    down_scale_inv = _weight("down_proj", down_proj, down_scale_inv, "down_scale_inv")
    name = "gate_up_scale_inv"
    gate_up_scale_inv = _weight("gate_up_proj", gate_up_proj, gate_up_scale_inv, name)
    (local, hidden, inner), tokens = down_proj.shape, len(router_logits)
    if hidden_states.shape != (tokens, hidden) or gate_up_proj.shape != (local, 2 * inner, hidden):
        raise ValueError(
            f"router_logits {tuple(router_logits.shape)} and down_proj {tuple(down_proj.shape)} "
            f"need hidden_states ({tokens}, {hidden}) and gate_up_proj ({local}, {2 * inner}, "
            f"{hidden}), found {tuple(hidden_states.shape)} and {tuple(gate_up_proj.shape)}."
        )
    if inner % 128:
        raise ValueError(f"the intermediate size is {inner}: a multiple of 128 is needed.")
    if parse(str(activation)).form != "concatenated":
        raise ValueError(f"activation is {str(activation)!r}: only concatenated ones run in FP8.")
    if hidden_states_scale is not None:
        hidden_states_scale = _rows("hidden_states", hidden_states, hidden_states_scale, 2)
    elif hidden_states.dtype != torch.bfloat16:
        raise TypeError(f"hidden_states is {hidden_states.dtype} without a scale, use bfloat16.")
    _together(
        hidden_states, router_logits=router_logits, gate_up_proj=gate_up_proj, down_proj=down_proj,
        correction_bias=correction_bias,
    )  # fmt: skip
    _require(hidden_states.device)
    index, weights = select_experts(
        router_logits, top_k, score="sigmoid", renormalize=True, dtype=torch.float32,
        scale=routed_scaling_factor, eps=1e-20, bias=correction_bias,
        num_groups=num_groups, top_groups=top_groups,
    )  # fmt: skip
    if local_expert_offset:
        index = index - local_expert_offset
    return experts(
        hidden_states, gate_up_proj, down_proj, index, weights, gate_up_scale_inv, down_scale_inv,
        hidden_states_scale, str(activation),
    )  # fmt: skip


def multiplies(
    x: Tensor, gate_up_proj: Tensor, down_proj: Tensor, activation: str = "silu"
) -> bool:
    """Whether `experts` takes these: else FP8 weights are multiplied in the activations' dtype."""
    form = parse(activation).form
    fits = form == "concatenated" and down_proj.shape[2] % 128 == 0
    fits &= gate_up_proj.is_contiguous() and down_proj.is_contiguous()
    return fits and kernels.fp8_gemm.runs(x.device)


@op(lambda x, *_: x.new_empty(x.shape, dtype=torch.bfloat16 if x.dtype == E4M3 else x.dtype))
def experts(
    hidden_states: Tensor,
    gate_up_proj: Tensor,
    down_proj: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
    gate_up_scale_inv: Tensor,
    down_scale_inv: Tensor,
    hidden_states_scale: Tensor | None = None,
    activation: str = "silu",
) -> Tensor:
    """The gathered layout: as `fused_experts`, both products in FP8; checked by its callers.

    The activations are quantised as they are gathered, those between the products in the first
    one's epilogue. A token or so is not quantised: its experts' weights are widened as they pass.
    """
    if not kernels.decode.decodes(top_k_index, gate_up_proj, down_proj):
        return forward(
            hidden_states, gate_up_proj, down_proj, top_k_index, top_k_weights,
            gate_up_scale_inv, down_scale_inv, hidden_states_scale, activation,
        )[0]  # fmt: skip
    with on_device(hidden_states.device):
        return kernels.decode.decode(
            rows_contiguous(hidden_states), gate_up_proj, down_proj,
            top_k_index.contiguous(), top_k_weights.contiguous(),
            weight_on_input=False, activation=activation, gate_up_scale=gate_up_scale_inv,
            down_scale=down_scale_inv, x_scale=hidden_states_scale,
        )  # fmt: skip


@compiled_together
def forward(
    x: Tensor,
    gate_up_proj: Tensor,
    down_proj: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
    gate_up_scale_inv: Tensor,
    down_scale_inv: Tensor,
    x_scale: Tensor | None,
    activation: str,
    save: bool = False,
) -> tuple[Tensor, Tensor | None, ExpertOrder, Tensor]:
    """(out [T, H], pre-activation [S, 2I] if `save`, the order of slots, its buffer)."""
    index, weights = top_k_index.contiguous(), top_k_weights.contiguous()
    slots, count = index.numel(), len(gate_up_proj)
    dtype = torch.bfloat16 if x.dtype == E4M3 else x.dtype
    with on_device(x.device):
        height = kernels.fp8_gemm.height(slots, count, x.device)
        order, buffer = sort(index, count, E4M3, height)
        rows, scale = kernels.quantize.quantize(
            rows_contiguous(x), x_scale, order, gather=index.shape[1]
        )
        pre = x.new_empty(slots, gate_up_proj.shape[1], dtype=dtype) if save else None
        act, act_scale = kernels.fp8_gemm.fp8_gemm(
            rows, scale, gate_up_proj, _plain(gate_up_scale_inv), order,
            activation=activation, pre=pre,
        )  # fmt: skip
        rows = x.new_empty(slots, x.shape[1], dtype=dtype)
        kernels.fp8_gemm.fp8_gemm(
            act, act_scale, down_proj, _plain(down_scale_inv), order, out=rows
        )
        out = kernels.combine.combine(rows, order.slot_to_row, index.shape[1], weights)
    return out, pre, order, buffer


def _plain(scale: Tensor) -> Tensor:
    """As kernels read the scales of weights."""
    return scale.float().contiguous()
