"""check_parity(): does a patched model compute what Hugging Face's does? (docs/parity.md)"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from .. import kernels
from ..patcher import patch, unpatch
from ..paths import PATHS
from ..recognise.quantised import is_quantised
from ..recognise.wrapped import is_dtensor
from ..switch import ENABLED
from .compare import MIN_SLOTS, MIN_SLOTS_BRIEFLY, Comparison
from .law import Row
from .loss import TOKENS, divergence, losses
from .passes import FEW, MANY, Pass
from .report import ParityReport, Section, environment
from .shadow import plain_arithmetic, shadow


def check_parity(
    model_or_block: nn.Module,
    *,
    tokens: int | Sequence[int] | None = None,
    dtype: torch.dtype | None = None,
    backward: bool = True,
    seed: int = 0,
    blocks: str | int | Sequence[str] | None = None,
    hidden_states: Tensor | None = None,
    model_level: bool = False,
    thorough: bool = False,
    original: nn.Module | None = None,
) -> ParityReport:
    """Compares MoE blocks with Hugging Face's own code and a float64 truth, by the parity law.

    A patched block is run itself, with its hooks, overrides and wrappers, and judged beside copies
    that run Hugging Face's code on the same weights. A block that is not patched, or that is to run
    in another dtype, is judged as a patched copy. Either way it is left exactly as it was found.

    Each block runs with few and with many tokens, past every switch between code paths; the first
    of every kind also with frozen experts, a `.grad` to add to, autocast, checkpointing, in train
    mode, on strided input and with dropped slots (docs/parity.md).

    Args:
        model_or_block: a model, a MoE block or an experts module.
        tokens: how many, or several numbers, instead of those that reach every code path.
        dtype: bfloat16, float16 or float32; the model's own by default.
        backward: judge every gradient too.
        seed: of the random inputs and of the random gradient that comes in.
        blocks: names, or how many, or "all"; by default the first, the middle and the last one,
            and one of every other size.
        hidden_states: [..., H], the block's input, instead of random numbers.
        model_level: also compare whole-model logits: the median KL(HF float32 || patched) against
            KL(HF float32 || HF) over 512 random tokens. Needs the memory of a float32 copy.
        thorough: run every block in every way, at every number of tokens.
        original: the model before `quantize_experts`. The report's `losses` say what quantisation
            lost: of each weight, and of the logits. The law judges experts in 4 bits by the weights
            that they have.

    Raises:
        ValueError: no MoE block that can be patched, an unknown block, a wrong width or dtype,
            weights that are spread over ranks, an input that proves nothing, an original without
            the weights that were quantised.
        TypeError: no module, or tokens that are no whole numbers.
        RuntimeError: the kernels cannot run on the model's device.
    """
    counts = _check(model_or_block, tokens, dtype, hidden_states)
    lost = [] if original is None else losses(model_or_block, original, seed)
    patched = shadow(model_or_block)
    found = patch(patched)
    skipped = [f"{name} ({cls}): {reason}" for name, cls, reason in found.skipped]
    chosen = _choose(patched, list(found.fused), blocks)
    devices = [parameter.device for parameter in patched.parameters()]
    del patched
    report = ParityReport([], environment(devices[0]), skipped, losses=lost)
    kinds: set[str] = set()
    try:
        for name in chosen:
            try:
                comparison = Comparison(model_or_block.get_submodule(name), dtype)
            except ValueError as error:
                skipped.append(f"{name}: {error}")
                continue
            _require(comparison, hidden_states)
            plan = _plan(comparison, counts, hidden_states, kinds, thorough)
            for count, ways in plan:
                rows, remark = comparison.rows(
                    count,
                    backward=backward,
                    seed=seed,
                    hidden_states=hidden_states,
                    ways=[way for way in ways if backward or not way.backward],
                )
                described, kind = _describe(name, comparison), str(comparison.dtype)[6:]
                report.sections.append(Section(described, kind, count, rows, remark))
            report.paths[:] = [p for p in PATHS if p in {*report.paths, *comparison.paths}]
            where = f"{name}, " if name else ""
            skipped += [f"{where}{way}: {why}" for way, why in comparison.refused.items()]
    except KeyboardInterrupt as stop:
        vars(stop)["report"] = report  # what is done
        raise
    if model_level:
        answer = _model_level(model_or_block, dtype, seed, set(devices))
        if isinstance(answer, str):
            skipped.append(f"model level: {answer}")
        else:
            report.sections.append(answer)
    return report


def _plan(
    comparison: Comparison,
    counts: Sequence[int] | None,
    hidden_states: Tensor | None,
    kinds: set[str],
    thorough: bool,
) -> list[tuple[int, Sequence[Pass]]]:
    """(number of tokens, other ways of running the block) of each comparison.

    The first block of every kind runs in every way at one number of tokens, a later one at that
    number alone. `kinds` grows by this block's.
    """
    comparison.min_slots = MIN_SLOTS if thorough else MIN_SLOTS_BRIEFLY
    numbers = _tokens(counts, hidden_states, comparison)
    enough = [n for n in numbers if n * comparison.top_k >= MIN_SLOTS]
    main = min(enough) if enough else max(numbers)
    kind = _describe("", comparison)
    if thorough:
        return [(n, MANY) for n in numbers]
    if kind in kinds:
        return [(n, ()) for n in numbers if n == main or counts is not None]
    kinds.add(kind)
    return [(n, MANY if n == main else FEW if n == 1 else ()) for n in numbers]


def _check(
    model: nn.Module, tokens: Any, dtype: torch.dtype | None, hidden_states: Tensor | None
) -> list[int] | None:
    """The numbers of tokens that were asked for; raises as `check_parity` does."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"check_parity takes a torch.nn.Module, found {type(model).__name__}")
    if dtype not in (None, torch.bfloat16, torch.float16, torch.float32):
        raise ValueError(f"dtype is {dtype}: parity is defined for bfloat16, float16 and float32")
    if any(map(is_dtensor, model.parameters())):
        raise ValueError(
            f"{type(model).__name__} has weights spread over ranks (DTensors), and parity "
            "is checked on one: check the same model, or a block of it, as it loads without a plan"
        )
    if hidden_states is not None:
        _check_input(hidden_states)
    if tokens is None:
        return None
    counts = list(tokens) if isinstance(tokens, Sequence) else [tokens]
    for count in counts:
        if isinstance(count, bool) or not isinstance(count, int):
            raise TypeError(f"tokens is {tokens!r}: a whole number is needed, or several")
    if not counts or min(counts) < 1:
        raise ValueError(f"tokens is {tokens}: at least 1 token is needed")
    return counts


def _check_input(hidden_states: Tensor) -> None:
    """Refuses what proves nothing: any code gives Hugging Face's zeros for zeros."""
    if not isinstance(hidden_states, Tensor) or not hidden_states.is_floating_point():
        found = getattr(hidden_states, "dtype", type(hidden_states).__name__)
        raise TypeError(f"hidden_states is {found}: a floating-point tensor is needed")
    reason = None
    if not hidden_states.numel():
        reason = "has no element"
    elif not bool(hidden_states.isfinite().all()):
        reason = "holds inf or NaN"
    elif not bool(hidden_states.flatten(0, -2).any(-1).all()):
        reason = "has a token that is all zeros"
    if reason:
        raise ValueError(f"hidden_states {list(hidden_states.shape)} {reason}: it proves nothing")


def _choose(
    model: nn.Module, fused: list[str], blocks: str | int | Sequence[str] | None
) -> list[str]:
    if blocks == "all" or not fused:
        return fused
    if isinstance(blocks, int):
        count, last = min(blocks, len(fused)), len(fused) - 1
        return [fused[i * last // max(count - 1, 1)] for i in range(count)]
    if blocks is not None:
        names = [blocks] if isinstance(blocks, str) else list(blocks)
        unknown = [name for name in names if name not in fused]
        if unknown:
            raise ValueError(
                f"no fused block is called {unknown[0]!r}: the model has {', '.join(fused[:4])}"
                f"{' ...' if len(fused) > 4 else ''}"
            )
        return names
    picked = {0, len(fused) // 2, len(fused) - 1}
    sizes = [[p.shape for p in model.get_submodule(name).parameters()] for name in fused]
    for i, size in enumerate(sizes):
        if all(size != sizes[j] for j in picked):
            picked.add(i)
    return [fused[i] for i in sorted(picked)]


def _require(comparison: Comparison, hidden_states: Tensor | None) -> None:
    reason = kernels.why_not(comparison.device)
    if reason:
        raise RuntimeError(
            f"{reason}; on a CPU, set TRITON_INTERPRET=1 before transformers is imported"
        )
    if not ENABLED:
        raise RuntimeError("MOE_PATCH=0 is set, so patched blocks run HF's own forward: unset it")
    if comparison.device.type == "cpu" and comparison.dtype == torch.bfloat16:
        raise ValueError(
            "Triton's interpreter does not round to bfloat16: on a CPU, pass dtype=torch.float32 "
            "or torch.float16"
        )
    hidden = comparison.hidden_size
    if hidden_states is not None and hidden_states.shape[-1] != hidden:
        raise ValueError(f"hidden_states is {hidden_states.shape[-1]} wide, the block {hidden}")


def _tokens(
    tokens: Sequence[int] | None, hidden_states: Tensor | None, comparison: Comparison
) -> Sequence[int]:
    if hidden_states is not None:
        return [hidden_states.numel() // hidden_states.shape[-1]]
    return tokens or comparison.token_counts()


def _describe(name: str, comparison: Comparison) -> str:
    cls = type(comparison.ours).__name__
    sizes = (
        f"{comparison.num_experts} experts, H {comparison.hidden_size}, "
        f"I {comparison.intermediate_size}"
    )
    return f"{name} ({cls}, {sizes})" if name else f"{cls} ({sizes})"


def _model_level(
    model: nn.Module, dtype: torch.dtype | None, seed: int, devices: set[torch.device]
) -> Section | str:
    """KL to Hugging Face's float32 logits, of the patched model and of Hugging Face's own.

    The median over the tokens: a mean is that of the token or two whose routing is a near-tie.
    """
    vocabulary = getattr(getattr(model, "config", None), "vocab_size", None)
    if vocabulary is None:
        return "the model has no vocabulary"
    if any(map(is_quantised, model.modules())):
        return "it would need Hugging Face's FP8 kernels from the hub"
    dtype = dtype or next(p.dtype for p in model.parameters() if p.is_floating_point())
    if dtype == torch.float32:
        return "in float32 Hugging Face's own logits are the truth"
    if len(devices) > 1:
        return "the model is spread over several devices"
    device = next(iter(devices))
    need = 6 * sum(p.numel() for p in model.parameters()) + 12 * 512 * vocabulary
    if device.type == "cuda" and need > torch.cuda.mem_get_info(device)[0]:
        return f"a float32 copy needs {need / 2**30:.0f} GiB of free memory"
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(vocabulary, TOKENS, generator=generator).to(device)

    def logits(dtype: torch.dtype | None, patched: bool) -> Tensor:
        copy = shadow(model, dtype)
        (patch if patched else unpatch)(copy)
        return copy(input_ids=ids, use_cache=False).logits.flatten(0, 1)

    with plain_arithmetic(), torch.no_grad():
        truth = logits(torch.float32, False)
        each = [divergence(truth, logits(dtype, patched)) for patched in (True, False)]
    ours, hf = (float(kl.median()) for kl in each)
    mean = "mean {:.2e} beside {:.2e}".format(*(float(kl.mean()) for kl in each))
    row = Row(
        "KL of logits", ours <= 1.1 * hf, ours, hf, ratio=ours / hf if hf else None, note=mean
    )
    return Section("whole model", str(dtype)[6:], ids.numel(), [row])
