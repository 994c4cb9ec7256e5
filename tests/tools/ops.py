"""What the op tests share: random MoE operands, the comparison, and the sample CI runs."""

from __future__ import annotations

import random
import zlib
from typing import Any

import pytest
import torch
from torch import Tensor

from moe_patch import reference
from moe_patch.activation import Activation
from moe_patch.formats import packed
from moe_patch.kernels import ahead

SWIGLU = Activation()
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
# rms error over rms truth that honest float32 accumulation stays under; x 0.99 does not
BOUND = {torch.float32: 3e-6, torch.float16: 0.7 * 2**-10, torch.bfloat16: 0.7 * 2**-7}


def sample(cases: list[Any], keep: int) -> list[Any]:
    """All cases; only about `keep` of them, always the same, run without a GPU (no bfloat16)."""

    def name(case: Any) -> str:
        return "-".join(str(part).replace("torch.", "") for part in case)

    def many_experts(case: Any) -> bool:  # the interpreter takes ten seconds for their tiles
        return any(isinstance(part, tuple) and len(part) == 5 and part[3] >= 60 for part in case)

    def mark(case: Any) -> Any:
        drawn = zlib.crc32(name(case).encode()) % len(cases) < keep
        plain = drawn and torch.bfloat16 not in case and not many_experts(case)
        return pytest.param(*case, id=name(case), marks=() if plain else pytest.mark.gpu)

    return [mark(case) for case in cases]


def rehearses() -> bool:
    """Whether the call at work is a first call's rehearsal, with tensors that have no memory."""
    return ahead.THREAD.rehearsed is not None


def moe(
    device: torch.device,
    dtype: torch.dtype,
    tokens: int,
    hidden: int,
    inner: int,
    num_experts: int,
    top_k: int,
    *,
    transposed: bool = False,
    routing: str = "random",
    grad: bool = True,
    act: Activation = SWIGLU,
    biased: bool = False,
) -> dict[str, Tensor]:
    """Arguments of fused_experts; `routing` random, one (expert), repeat or sentinel."""
    draw = torch.Generator().manual_seed(tokens * 31 + hidden)

    def normal(*shape: int, std: float = 1.0) -> Tensor:
        return (torch.randn(*shape, generator=draw) * std).to(device, dtype)

    gate_up = normal(num_experts, act.rows(inner), hidden, std=hidden**-0.5)
    down = normal(num_experts, hidden, inner, std=inner**-0.5)
    if transposed:  # the same logical weights, stored as Llama4 stores them
        gate_up = gate_up.transpose(1, 2).contiguous().transpose(1, 2)
        down = down.transpose(1, 2).contiguous().transpose(1, 2)
    index = torch.rand(tokens, num_experts, generator=draw).argsort(1)[:, :top_k]
    if routing == "one":
        index = torch.full_like(index, num_experts - 1)
    elif routing == "repeat":
        index = index[:, :1].expand(-1, top_k)
    elif routing == "sentinel":
        index = torch.where(torch.rand(index.shape, generator=draw) < 0.4, num_experts, index)
    weights = torch.rand(tokens, top_k, generator=draw).add(0.1).to(device, dtype)
    arguments = {
        "hidden_states": normal(tokens, hidden),
        "gate_up_proj": gate_up,
        "down_proj": down,
        "top_k_index": index.to(device),
        "top_k_weights": weights,
    }
    if biased:
        arguments["gate_up_bias"] = normal(num_experts, act.rows(inner), std=0.5)
        arguments["down_bias"] = normal(num_experts, hidden, std=0.5)
    for tensor in arguments.values():
        tensor.requires_grad_(grad and tensor.is_floating_point())
    return arguments


def quantised(weight: Tensor, scale_dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """(e4m3, scales) of [E, N, K], blocks of 128 x 128 as finegrained FP8 checkpoints have them.

    The blocks' magnitudes differ, so that no scale can stand for another.
    """
    (experts, n, k), draw = weight.shape, torch.Generator().manual_seed(5)
    spread = torch.rand(experts, -(-n // 128), -(-k // 128), generator=draw) + 0.5
    spread = spread.repeat_interleave(128, 1).repeat_interleave(128, 2)[:, :n, :k]
    weight = weight.detach().float() * spread.to(weight.device)
    fp8, scale = reference.quantize_weight(weight, ue8m0=scale_dtype != torch.float32)
    if weight.stride(1) == 1:  # stored [E, K, N]
        fp8 = fp8.transpose(1, 2).contiguous().transpose(1, 2)
    return fp8, scale.to(scale_dtype)


def drawn_bytes(
    draw: random.Random, weight: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
    """A weight [E, N, K], None and itself, or what `in_bytes` makes of it."""
    if draw.random() < 0.5 or any(size % 16 for size in weight.shape[1:]):
        return weight, None, weight
    return in_bytes(draw, weight)


def in_bytes(
    draw: random.Random, weight: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(e4m3 of a weight [E, N, K], its scales, what they stand for), each contiguous in the order
    in which the weight lies."""
    by_columns = weight.stride(2) != 1
    lying = weight.mT if by_columns else weight
    scale = torch.rand(len(lying), *(-(-n // 128) for n in lying.shape[1:]), device=weight.device)
    if draw.random() < 0.3:
        scale = scale.to(torch.float8_e8m0fnu)
    narrow = lying.to(torch.float8_e4m3fn)
    wide = reference.dequantize(narrow, scale, weight.dtype)
    return tuple(each.mT if by_columns else each for each in (narrow, scale, wide))


def in_fp8(
    arguments: dict[str, Tensor], scale_dtype: torch.dtype = torch.float32
) -> dict[str, Tensor]:
    """Arguments of fused_experts with their weights quantised."""
    gate_up, gate_up_scale = quantised(arguments["gate_up_proj"], scale_dtype)
    down, down_scale = quantised(arguments["down_proj"], scale_dtype)
    return arguments | {
        "gate_up_proj": gate_up, "gate_up_scale_inv": gate_up_scale,
        "down_proj": down, "down_scale_inv": down_scale,
    }  # fmt: skip


def in_4_bits(arguments: dict[str, Any], format: str, **how: Any) -> dict[str, Any]:
    """Arguments of fused_experts with weights in 4 bits; `how` as `packed.quantize` has it."""
    names = "gate_up_proj", "down_proj"
    return arguments | {n: packed.quantize(arguments[n], format, **how) for n in names}


def in_double(arguments: dict[str, Any]) -> dict[str, Any]:
    """The same arguments for the float64 truth."""
    return {
        name: value.detach().double().requires_grad_(value.requires_grad)
        if isinstance(value, Tensor)
        and value.is_floating_point()
        and value.dtype.itemsize > 1  # FP8 is dequantised there, and weights in 4 bits
        else value
        for name, value in arguments.items()
    }


def gradients(out: Tensor, d_out: Tensor, *inputs: Any) -> tuple[Tensor, ...]:
    """torch.autograd.grad of the inputs that require it."""
    wanted = [x for x in inputs if isinstance(x, Tensor) and x.requires_grad]
    return torch.autograd.grad(out, wanted, d_out.to(out.dtype))


def assert_close(ours: Tensor, truth: Tensor, dtype: torch.dtype, what: str = "tensor") -> None:
    """Finite, the truth's shape, and within BOUND of it in rms and 8 times that at the worst."""
    assert ours.shape == truth.shape, (what, ours.shape, truth.shape)
    if not truth.numel():
        return
    error, truth = ours.double() - truth.double(), truth.double()
    assert bool(torch.isfinite(ours).all()), f"{what} is not finite"
    rms, scale = error.square().mean().sqrt(), truth.square().mean().sqrt()
    bound = BOUND[dtype] * (1 if truth.numel() >= 64 else 4)  # a few elements have no statistics
    assert rms <= bound * scale, f"{what}: rms error {rms / scale:.2e} of {bound:.1e}"
    limit = 8 * bound * max(scale, truth.abs().max() / 4)
    assert error.abs().max() <= limit, f"{what}: largest error {error.abs().max():.2e}"
