"""Shapes that nobody named: drawn at random, judged by float64, repeated to the bit.

A geometry (sizes, dtype, how the weights are stored, the activation) is compiled once and run with
several numbers of tokens and routings. MOE_PATCH_GEOMETRIES says how many each test draws on a GPU:
`MOE_PATCH_GEOMETRIES=40 pytest -m gpu tests/ops/test_any_shape.py` runs 20,480 cases.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import ptx_on_cpu
import pytest
import torch
from gluon_on_cpu import on_cpu
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from ops import gradients, in_4_bits, in_double, in_fp8, moe
from torch import Tensor

from moe_patch import reference
from moe_patch.activation import Activation
from moe_patch.kernels import chips, packed_products, tiles
from moe_patch.ops.experts import fused_experts
from moe_patch.parity import law

ACTS = (
    Activation(),
    Activation(),
    Activation("gelu_tanh"),
    Activation("silu", 7.0, 1.702, 1.0, "interleaved"),
    Activation("relu2", form="ungated"),
)
STORED = ("as they are", "transposed", "with slack", "off by one")
EXTRAS = ((), (), ("bias",), ("fp8",), ("low rank",), ("on input",))
PACKED = (("nf4",), ("mxfp4", "bias"), ("int4", "low rank"), ("int4 with zeros", "on input"))
DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.bfloat16)
INTERPRETED = DTYPES[:2]
"""The interpreter rounds to bfloat16 by cutting off."""
ROUTINGS = ("random", "one", "repeat", "sentinel", "skewed")
SEEDS = 32
DRAWS = 8
"""Of a run whose first one breaks the law."""


@dataclass(frozen=True)
class Geometry:
    """Sizes and options that kernels are compiled for, besides the height of their tiles."""

    dtype: torch.dtype
    hidden: int
    inner: int
    experts: int
    top_k: int
    act: Activation
    stored: tuple[str, str]
    extras: tuple[str, ...]
    """Among bias, fp8, low rank, weight on input, and formats of 4 bits."""
    runs: tuple[tuple[int, str], ...]
    """(tokens, routing)."""


@st.composite
def geometries(
    draw: Any,
    most: int,
    experts: int,
    tokens: int,
    runs: int,
    *,
    packed: bool = False,
    dtypes: tuple[torch.dtype, ...] = DTYPES,
) -> Geometry:
    """Sizes up to `most`: odd ones as often as multiples of 8 and their neighbours, and, above 64,
    as multiples of 64, which kernels for Hopper want; `packed`: multiples of 32."""

    def size() -> int:
        if packed:
            return 32 * draw(st.integers(1, most // 32))
        eighths = st.integers(1, most // 8).map(lambda n: 8 * n)
        near = st.tuples(eighths, st.sampled_from((-1, 0, 0, 1))).map(sum)
        found = st.integers(1, most) | near
        if most >= 64:
            found |= st.integers(1, most // 64).map(lambda n: 64 * n)
        return draw(found)

    num = draw(st.integers(1, experts))
    act = draw(st.sampled_from(ACTS))
    extras = draw(st.sampled_from(PACKED if packed else EXTRAS))
    counts = st.integers(1, 9) | st.integers(1, tokens)
    return Geometry(
        draw(st.sampled_from(dtypes)),
        size(),
        size(),
        num,
        draw(st.integers(1, min(num, 6))),
        act,
        (draw(st.sampled_from(STORED)), draw(st.sampled_from(STORED))),
        extras,
        tuple(draw(st.tuples(counts, st.sampled_from(ROUTINGS))) for _ in range(runs)),
    )


def stored(weight: Tensor, how: str) -> Tensor:
    """The same logical weight with other strides, or at another address."""
    weight, grad = weight.detach(), weight.requires_grad
    experts, n, k = weight.shape
    if how == "transposed":
        weight = weight.mT.contiguous().mT
    elif how == "with slack":
        slack = weight.new_full((experts, n + 1, k + 3), float("nan"))
        slack[:, :n, :k] = weight
        weight = slack[:, :n, :k]
    elif how == "off by one":
        flat = weight.new_empty(weight.numel() + 1)
        flat[1:] = weight.flatten()
        weight = flat[1:].view(experts, n, k)
    return weight.requires_grad_(grad)


def operands(found: Geometry, tokens: int, routing: str, device: torch.device) -> dict[str, Any]:
    """Arguments of fused_experts."""
    if "on input" in found.extras and routing in ("one", "repeat"):
        # Products of equal rows have equal errors in a kernel, which weighs them afterwards. The
        # plain loop rounds each weighed row anew: its errors partly cancel in a token's sum.
        routing = "random"
    arguments = moe(
        device, found.dtype, tokens, found.hidden, found.inner, found.experts, found.top_k,
        routing="random" if routing == "skewed" else routing, act=found.act,
        biased="bias" in found.extras,
    )  # fmt: skip
    if routing == "skewed":  # most slots go to few experts, some experts get none
        drawn = torch.rand(tokens, found.top_k, device=device) ** 4 * found.experts
        arguments["top_k_index"] = drawn.long()
    if found.extras in PACKED:
        format, _, zeros = found.extras[0].partition(" with ")
        arguments = in_4_bits(arguments, format, group=32, zeros=bool(zeros))
    elif "fp8" in found.extras and found.inner % 128:  # else activations are rounded to FP8, too
        arguments = in_fp8(arguments)
        if "transposed" in found.stored:
            for name in ("gate_up_proj", "down_proj"):
                arguments[name] = arguments[name].mT.contiguous().mT
    else:
        for name, how in zip(("gate_up_proj", "down_proj"), found.stored):
            arguments[name] = stored(arguments[name], how)
    if "on input" in found.extras:
        arguments["weight_on"] = "input"
    if "low rank" in found.extras:
        for name in ("gate_up", "down"):
            experts, n, k = arguments[f"{name}_proj"].shape
            pair = torch.randn(experts, 3, k), torch.randn(experts, n, 3)
            arguments[f"{name}_low_rank"] = tuple(
                (0.05 * factor).to(device, found.dtype).requires_grad_() for factor in pair
            )
    arguments["activation"] = found.act
    return arguments


def tensors(arguments: dict[str, Any]) -> list[Tensor]:
    """Tensors among the arguments, with the factors of low-rank updates."""
    every = [v if isinstance(v, tuple) else (v,) for v in arguments.values()]
    return [tensor for pair in every for tensor in pair if isinstance(tensor, Tensor)]


def exactly(arguments: dict[str, Any]) -> dict[str, Any]:
    """The same in float64."""
    exact = in_double({n: v for n, v in arguments.items() if isinstance(v, Tensor)})
    for name, value in arguments.items():
        if isinstance(value, tuple):
            exact[name] = tuple(f.detach().double().requires_grad_() for f in value)
        elif not isinstance(value, Tensor):
            exact[name] = value
    return exact


def independent(truth: Tensor, slots: bool) -> float:
    """How many numbers the errors of a result hang on, at most.

    Each element of a row's activations, or of their gradients, has one error, and a gradient of a
    weight has it in all elements of a row or a column. Equal choices of a token (`slots`: the
    result is of routing weights) have equal errors.
    """
    if slots:
        return law.effective(truth.square().sum(1).sqrt())
    if truth.dim() < 3:
        return truth.numel()
    return min(law.effective(truth.square().sum(axis).sqrt()) for axis in (1, 2))


def measured(
    found: Geometry, tokens: int, routing: str, device: torch.device
) -> list[tuple[law.Errors, float]]:
    """Errors of every result of inference and training, and the numbers that they hang on.

    In the place of Hugging Face's own result stands the plain loop over experts, in the same dtype.
    Asserts that a second time gives the same bits.
    """
    arguments = operands(found, tokens, routing, device)
    exact = exactly(arguments)
    truth = reference.fused_experts(**exact)
    d_out, weights = torch.randn_like(truth), arguments["top_k_weights"]

    def step(function, arguments=arguments):
        with torch.no_grad():
            inferred = function(**arguments)
        out = function(**arguments)
        return inferred, out, *gradients(out, d_out, *tensors(arguments))

    ours, plain = step(fused_experts), step(reference.fused_experts)
    truths = step(reference.fused_experts, exact)
    for first, second in zip(ours, step(fused_experts)):
        assert torch.equal(first, second), f"{tokens} tokens, {routing}: other bits"
    wanted = [x is weights for x in tensors(arguments) if x.requires_grad]
    return [
        (law.measure(mine.detach(), [other.detach()], true), independent(true.detach(), slots))
        for mine, other, true, slots in zip(ours, plain, truths, (False, False, *wanted))
    ]


def check(found: Geometry, device: torch.device) -> None:
    """The parity law on every result of every run.

    Where it is broken, errors of more draws are added: a ratio of few numbers may be large by luck.
    """
    for tokens, routing in found.runs:
        every = measured(found, tokens, routing, device)
        if any(broken(each, found.dtype) for each in every):
            for _ in range(DRAWS - 1):
                more = measured(found, tokens, routing, device)
                every = [(a + b, n + m) for (a, n), (b, m) in zip(every, more)]
        for at, each in enumerate(every):
            why = broken(each, found.dtype)
            assert not why, f"{tokens} tokens, {routing}: result {at}: {why[0]}"


def broken(result: tuple[law.Errors, float], dtype: torch.dtype) -> list[str]:
    errors, numbers = result
    numbers = min(numbers, law.MIN_NUMBERS)
    return law.why_not(errors, dtype, guards=False, numbers=numbers)


def drawn(number: int, count: int, **limits: Any):
    """Decorator: calls the function with `count` geometries, the same for each number, and with the
    simplest of all, which hypothesis draws first whatever the seed."""

    def decorate(function):
        quiet = settings(
            max_examples=1 + count, phases=[Phase.generate], suppress_health_check=list(HealthCheck)
        )
        return seed(number)(quiet(given(geometries(**limits))(function)))

    return decorate


@pytest.mark.parametrize("number", range(4))
def test_small_ones(number, device):
    limits = {"most": 40, "experts": 5, "tokens": 40, "runs": 2, "dtypes": INTERPRETED}
    drawn(number, 4, **limits)(lambda found: check(found, device))()


@pytest.mark.parametrize("number", range(2))
def test_small_ones_in_4_bits(number, device):
    limits = {"most": 96, "experts": 4, "tokens": 40, "runs": 2, "dtypes": INTERPRETED}
    drawn(number, 3, packed=True, **limits)(lambda found: check(found, device))()


CARDS = {
    "Hopper": chips.nvidia(90, 232_448),
    "A100": chips.nvidia(80, 166_912),
    "RTX 4090": chips.nvidia(89, 101_376),
    "MI300": chips.amd("gfx942"),
}


@pytest.fixture
def as_on(monkeypatch):
    """A function that gives a CPU the tiles and kernels that a card of CARDS has: those in Gluon
    run in Python, the others in Triton's interpreter."""
    if not tiles.INTERPRET:
        pytest.skip("is for machines without a GPU")

    def card(name):
        found = CARDS[name]._replace(tma=False, ptx=False)
        monkeypatch.setattr(chips, "chip", lambda device: found)
        tiles.forget()

    monkeypatch.setattr(chips, "multiprocessors", lambda device: 3)
    for module in (tiles, packed_products):
        monkeypatch.setattr(module, "INTERPRET", False)
    ptx_on_cpu.known()
    with on_cpu():
        yield card
    tiles.forget()


@pytest.mark.parametrize("packed", (False, True))
@pytest.mark.parametrize("number", range(3))
@pytest.mark.parametrize("card", CARDS)
def test_as_on_a_card(card, number, packed, device, as_on):
    """Kernels and tiles that a card chooses, whose seams nothing else shows without one."""
    as_on(card)
    count = int(os.environ.get("MOE_PATCH_GEOMETRIES", "1"))
    sizes = {"most": 320, "tokens": 200} if packed else {"most": 640, "tokens": 400}
    limits = {**sizes, "experts": 2, "runs": 1, "dtypes": (torch.float16,)}
    drawn(number, count, packed=packed, **limits)(lambda found: check(found, device))()


@pytest.mark.gpu
@pytest.mark.parametrize("packed", (False, True))
@pytest.mark.parametrize("number", range(SEEDS))
def test_any(number, packed, device):
    count = int(os.environ.get("MOE_PATCH_GEOMETRIES", "2"))
    limits = {"most": 900, "experts": 40, "tokens": 1500, "runs": 8, "packed": packed}
    drawn(number, count, **limits)(lambda found: check(found, device))()
