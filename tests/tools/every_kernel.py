"""A small run of every kernel, for compute-sanitizer; the figures are checked too.

export PYTORCH_NO_CUDA_MEMORY_CACHING=1   # so that memcheck sees the edge of every tensor
compute-sanitizer --tool memcheck --error-exitcode 1 python tests/tools/every_kernel.py
compute-sanitizer --tool racecheck --error-exitcode 1 python tests/tools/every_kernel.py

Compiling takes longest: with the argument 3/8 it runs the third of eight parts, side by side, and
with 1/1 four_bits the functions with such a name.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterator
from functools import partial

import torch
from ops import assert_close, gradients, in_4_bits, in_double, in_fp8, moe, quantised

from moe_patch import fp8, reference
from moe_patch.activation import Activation
from moe_patch.formats.packed import FORMATS
from moe_patch.kernels import glu
from moe_patch.ops import expert_order, fused_experts, grouped_gemm
from moe_patch.ops.routing import select_experts

SIZES = [  # T, H, I, E, K: TMA and pointers, whole and ragged tiles, each tile height, both dw;
    # the last one has products for the kernels in hopper/
    (40, 128, 64, 8, 2),
    (300, 136, 72, 4, 3),
    (21, 97, 41, 5, 2),
    (1100, 128, 64, 2, 1),
    (1100, 128, 64, 4, 2),
    (1100, 384, 256, 2, 1),
]
DEVICE = torch.device("cuda")
FORMS = [Activation(form="interleaved"), Activation("gelu", form="ungated"), Activation()]


def low_rank(arguments, rank):
    """Updates of both weights, as fused_experts takes them."""
    found = {}
    for name in ("gate_up", "down"):
        experts, n, k = (weight := arguments[f"{name}_proj"]).shape
        sizes = (experts, rank, k), (experts, n, rank)
        found[f"{name}_low_rank"] = tuple(
            (torch.randn(size, device=weight.device) * 0.1).to(weight.dtype).requires_grad_()
            for size in sizes
        )
    return found


def like_float64(
    arguments: dict[str, torch.Tensor], dtype: torch.dtype, inference: bool = True, **how
) -> list[torch.Tensor]:
    """Asserts it of the output and the gradients; float64's, gradients in order of arguments."""
    exact = in_double(arguments)
    out, truth = fused_experts(**arguments, **how), reference.fused_experts(**exact, **how)
    d_out = torch.randn_like(out)
    ours = (out, *gradients(out, d_out, *arguments.values()))
    true = [truth, *gradients(truth, d_out.double(), *exact.values())]
    for mine, other in zip(ours, true, strict=True):
        assert_close(mine, other, dtype)
    if inference:
        with torch.no_grad():
            assert_close(fused_experts(**arguments, **how), truth, dtype)
    return true


def whole(size, dtype, transposed) -> None:
    arguments = moe(DEVICE, dtype, *size, transposed=transposed, routing="sentinel")
    weight_on = "input" if transposed else "output"
    like_float64(arguments, dtype, weight_on=weight_on)
    truth = in_double(arguments)
    out = reference.fused_experts(**truth, weight_on=weight_on)
    d_out = torch.randn_like(out)
    for _ in range(2):  # made, then added to
        fused_experts(**arguments, weight_on=weight_on).backward(d_out.to(dtype))
    wanted = gradients(out, d_out.to(dtype), *truth.values())
    for x, other in zip([t for t in arguments.values() if t.requires_grad], wanted, strict=True):
        assert_close(x.grad / 2, other, dtype)
    with_updates(arguments, low_rank(arguments, rank=5), dtype, weight_on=weight_on)


def with_updates(arguments, low, dtype, **how) -> None:
    out = fused_experts(**arguments, **low, **how)
    exact = in_double(arguments) | {n: tuple(t.double() for t in p) for n, p in low.items()}
    assert_close(out, reference.fused_experts(**exact, **how), dtype)
    torch.autograd.grad(out.sum(), [t for pair in low.values() for t in pair])


def tails(transposed) -> None:
    """Experts of 140 and 132 rows, which are one tile each, in 16 bits and in 8."""
    wide = moe(DEVICE, torch.bfloat16, 272, 512, 384, 2, 1, transposed=transposed)
    wide["top_k_index"] = (torch.randperm(272, device=DEVICE) >= 140).long()[:, None]
    like_float64(wide, torch.bfloat16)
    narrow = in_fp8(wide)
    if transposed:
        like_float64(narrow, torch.bfloat16, inference=False)
    else:  # the forward quantises rows
        fused_experts(**narrow).sum().backward()
    for arguments in (wide, narrow):
        with_updates(arguments, low_rank(wide, rank=72), torch.bfloat16)


def products(size, dtype) -> None:
    arguments = moe(DEVICE, dtype, *size, routing="sentinel")
    order = expert_order(arguments["top_k_index"], size[3], dtype)
    x, weight = arguments["hidden_states"], arguments["gate_up_proj"]
    rows = grouped_gemm(x, weight, order, gather=True)
    grouped_gemm(rows.detach(), weight.transpose(1, 2), order, scatter=True).sum().backward()
    rows.sum().backward()
    logits = torch.randn(size[0], size[3], device=DEVICE, dtype=dtype, requires_grad=True)
    for score in ("softmax", "sigmoid"):
        _, weights = select_experts(logits, size[4], score=score, renormalize=True)
        weights.sum().backward()


def grouped_router(tokens, experts, top_k, groups, kept) -> None:
    logits = torch.randn(tokens, experts, device=DEVICE, requires_grad=True)
    for how in (
        {"score": "sigmoid", "bias": torch.randn(experts, device=DEVICE), "eps": 1e-20},
        {"score": "softmax", "group_best": 1, "group_fill": 0.0},
    ):
        how |= {"num_groups": groups, "top_groups": kept, "scale": 2.5, "renormalize": True}
        named = torch.rand(tokens, experts, device=DEVICE).topk(top_k).indices
        named[::3] = -1
        for given in (None, named):
            index, weights = select_experts(logits, top_k, given=given, **how)
            chosen, truth = reference.select_experts(logits, top_k, given=given, **how)
            assert torch.equal(index, chosen)
            assert_close(weights, truth, torch.float32)
            d_weights = torch.randn_like(weights)
            ours, true = (torch.autograd.grad(w, logits, d_weights)[0] for w in (weights, truth))
            assert_close(ours, true, torch.float32)


def other_forms(size, act, transposed) -> None:
    options = {"transposed": transposed, "act": act, "biased": True, "routing": "sentinel"}
    arguments = moe(DEVICE, torch.bfloat16, *size, **options)
    like_float64(arguments, torch.bfloat16, inference=False, activation=act)
    one_token(moe(DEVICE, torch.bfloat16, 1, *size[1:], **options | {"grad": False}), act)


def one_token(arguments, act="silu") -> None:
    with torch.no_grad():
        truth = reference.fused_experts(**in_double(arguments), activation=act)
        assert_close(fused_experts(**arguments, activation=act), truth, torch.bfloat16)


def fp8_training(size, scales, transposed) -> None:
    options = {"transposed": transposed}
    arguments = in_fp8(moe(DEVICE, torch.bfloat16, *size, routing="sentinel", **options), scales)
    like_float64(arguments, torch.bfloat16, inference=False)
    one_token(in_fp8(moe(DEVICE, torch.bfloat16, 1, *size[1:], grad=False, **options), scales))


def four_bits(size, format, act, group=32) -> None:
    how = {"group": group, "zeros": format == "int4" and group == 32}
    options = {"act": act, "biased": True}
    arguments = moe(DEVICE, torch.bfloat16, *size, routing="sentinel", **options)
    like_float64(in_4_bits(arguments, format, **how), torch.bfloat16, activation=act)
    arguments = moe(DEVICE, torch.bfloat16, 1, *size[1:], grad=False, **options)
    one_token(in_4_bits(arguments, format, **how), act)


def four_bits_and_updates(format) -> None:
    arguments = moe(DEVICE, torch.bfloat16, 1100, 256, 384, 4, 1, routing="sentinel")
    low = low_rank(arguments, rank=72)
    with_updates(in_4_bits(arguments, format), low, torch.bfloat16)


def fp8_and_updates(scales) -> None:
    arguments = moe(DEVICE, torch.bfloat16, 1100, 256, 384, 4, 1, routing="sentinel")
    low = low_rank(arguments, rank=72)
    with_updates(in_fp8(arguments, scales), low, torch.bfloat16)


def fp8_products(tokens) -> None:
    arguments = in_fp8(moe(DEVICE, torch.bfloat16, tokens, 256, 128, 8, 2))
    with torch.no_grad():
        out, truth = fused_experts(**arguments), reference.fused_experts(**in_double(arguments))
        assert (out - truth).square().mean() < 0.05**2 * truth.square().mean()
    kept = fused_experts(**arguments)
    kept.sum().backward()
    assert tokens == 1 or torch.equal(kept, out)


def groups(sizes) -> None:
    x = torch.randn(1100, 128, device=DEVICE, dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(4, 72, 128, device=DEVICE, dtype=torch.bfloat16, requires_grad=True)
    rows = grouped_gemm(x, weight, m_sizes=torch.tensor(sizes, device=DEVICE))
    rows.sum().backward()


def fp8_groups(n, k, sizes) -> None:
    weight, scale = quantised(torch.randn(4, n, k, device=DEVICE))
    x = torch.randn(220, k, device=DEVICE, dtype=torch.bfloat16, requires_grad=True)
    by = {"m_sizes": torch.tensor(sizes, device=DEVICE), "weight_scale_inv": scale}
    grouped_gemm(x, weight, **by).sum().backward()
    rows, row_scale = fp8.quantize(x.detach())
    rows, row_scale = rows.view(4, 55, k), row_scale.reshape(4, 55, -1)
    counts = torch.tensor([0, 1, 55, 99], dtype=torch.int32, device=DEVICE)
    given = rows, row_scale, weight, scale, counts
    found = fp8.masked_grouped_gemm(*given)
    truth = reference.fp8_masked_grouped_gemm(*given, dtype=torch.float64)
    for group in (1, 2, 3):
        held = int(counts[group].clamp(max=55))
        assert_close(found[group, :held], truth[group, :held], torch.bfloat16)


def gates(rows, columns, dtype) -> None:
    gate, up = (torch.randn(rows, columns, device=DEVICE, dtype=dtype) for _ in range(2))
    out, d_out = glu.forward(gate, up), torch.randn_like(gate)
    exact = [x.double().requires_grad_() for x in (gate, up)]
    true = torch.nn.functional.silu(exact[0]) * exact[1]
    grads = torch.autograd.grad(true, exact, d_out.double())
    for mine, other in zip((out, *glu.backward(d_out, gate, up)), (true, *grads)):
        assert_close(mine, other, dtype)


def few_tokens(size) -> None:
    one_token(moe(DEVICE, torch.bfloat16, *size, routing="sentinel", grad=False))


def cases() -> Iterator[Callable[[], None]]:
    """All that is run; what compiles alike is together."""
    layouts, dtypes = (False, True), (torch.bfloat16, torch.float32)
    for size, dtype in itertools.product(SIZES, dtypes):
        for transposed in layouts:
            yield partial(whole, size, dtype, transposed)
        yield partial(products, size, dtype)
    for transposed in layouts:  # long reductions, and many row tiles of a gradient
        yield partial(whole, (300, 3584, 1152, 2, 1), torch.bfloat16, transposed)
        yield partial(tails, transposed)
    for router in ((40, 256, 8, 8, 4), (7, 60, 6, 5, 2)):
        yield partial(grouped_router, *router)
    for size, act, transposed in itertools.product(SIZES[:4], FORMS, layouts):
        yield partial(other_forms, size, act, transposed)
    yield partial(other_forms, SIZES[-1], FORMS[1], False)
    for scales in (torch.float32, torch.float8_e8m0fnu):
        for size, transposed in itertools.product(SIZES[:4], layouts):
            yield partial(fp8_training, size, scales, transposed)
        yield partial(fp8_and_updates, scales)
    packed = (40, 160, 192, 8, 2), (300, 160, 96, 4, 3), (1100, 128, 64, 2, 1)
    for size, format, act in itertools.product(packed, FORMATS, FORMS):
        yield partial(four_bits, size, format, act)
    for tokens, format in itertools.product((40, 70), FORMATS):  # looked up in pairs
        group = 32 if format == "mxfp4" else 64
        yield partial(four_bits, (tokens, 256, 128, 8, 2), format, Activation(), group)
    for format in FORMATS:
        yield partial(four_bits_and_updates, format)
    for tokens in (1, 40, 300):  # decoded, and in FP8
        yield partial(fp8_products, tokens)
    for sizes in ([700, 0, 300, 24], [5, 0, 0, 2]):
        yield partial(groups, sizes)
    for n, k, sizes in ((256, 208, [130, 0, 70, 3]), (200, 128, [1, 64, 0, 9])):
        yield partial(fp8_groups, n, k, sizes)
    for size in ((1, 128, 64, 8, 2), (2, 97, 41, 64, 8)):
        yield partial(few_tokens, size)
    for rows, columns in ((300, 136), (1, 8), (64, 2048)):
        yield partial(gates, rows, columns, torch.bfloat16)


def main(part: str = "1/1", only: str = "") -> None:
    number, parts = map(int, part.split("/"))
    mine = [case for case in cases() if only in case.func.__name__][number - 1 :: parts]
    for case in mine:
        torch.manual_seed(0)
        case()
    torch.cuda.synchronize()
    print(f"every kernel of {len(mine)} cases ran, and was right")


if __name__ == "__main__":
    main(*sys.argv[1:])
