"""One block, three ways: ours, Hugging Face's own, and the float64 truth, on the same inputs.

T tokens, H hidden size, I intermediate size, E experts, K choices a token.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from . import law, reference
from .compare_router import RouterComparison, find_router, routing
from .law import Errors, Row
from .models.decorated import UndecoratedExperts, is_decorated
from .models.fp8 import is_quantised
from .models.parts import gate, normalises
from .patcher import patch
from .shadow import (
    Family,
    exact_weights,
    family_of,
    find_experts,
    hugging_face,
    implementations,
    logical,
    multiplies_fp8,
    plain_arithmetic,
    projections,
    shadow,
    trained,
)


class _Force(TorchFunctionMode):
    """Makes a router choose `index`: torch.topk answers with the values found there."""

    def __init__(self, index: Tensor) -> None:
        super().__init__()
        self.index = index

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func in (torch.topk, Tensor.topk):
            scores = args[0] if args else kwargs["input"]
            return torch.return_types.topk((scores.gather(-1, self.index), self.index))
        return func(*args, **(kwargs or {}))


class _Exact(TorchFunctionMode):
    """Code that computes in float32 stays in float64."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {})) if func is not Tensor.float else args[0].double()


Run = dict[str, Tensor]
"""What one pass gave: output, index, weights, logits, and gradients d_*; ours also *_no_grad."""

_SEED = 0x6D6F65
"""Added to seeds: weights drawn by the same one would begin with the inputs themselves."""

MIN_SLOTS = 128
"""Slots that a verdict needs: a rms over a handful of numbers says nothing."""


@dataclass
class _Inputs:
    x: Tensor  # [T, H]
    d_out: Tensor  # [T, H]
    index: Tensor | None = None  # [T, K]: forced on Hugging Face's router, given to bare experts
    weights: Tensor | None = None  # [T, K]: only for bare experts


def _run(block: nn.Module, family: Family, given: _Inputs, backward: bool) -> Run:
    """One pass of a shadow, with gradients or without."""
    experts, seen = find_experts(block), {}
    x = given.x.detach().requires_grad_(backward)
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.set_grad_enabled(backward))
        if family.router is None:
            weights = given.weights.detach().requires_grad_(backward)
            seen = {"index": given.index, "weights": weights}
            out = experts(x, given.index, weights)
        else:

            def on_experts(_, args):
                if len(args) == 3:  # Llama4's own experts take one argument
                    seen.update(index=args[1], weights=args[2])

            def on_router(_, args, result):
                seen["logits"] = result[family.logits]
                if family.shared_expert:  # Llama4's scores [T, E], should the experts get none
                    seen.setdefault("weights", result[0])

            router = getattr(block, family.router)
            hooks = [
                experts.register_forward_pre_hook(on_experts),
                router.register_forward_hook(on_router),
            ]
            if given.index is not None:
                stack.enter_context(_Force(given.index))
            out = block(x[None])
            for hook in hooks:
                hook.remove()
            out = (out[0] if isinstance(out, tuple) else out).reshape(x.shape)
        leaves = {
            "d_hidden_states": x,
            "d_top_k_weights": seen["weights"],
        } | {f"d_{name}": getattr(experts, name) for name in trained(experts)}
        if family.router:
            leaves["d_router"] = router.weight
        result = {k: v.detach() for k, v in seen.items()} | {"output": out.detach()}
        if backward:
            grads = torch.autograd.grad(out, list(leaves.values()), given.d_out, allow_unused=True)
            for (name, leaf), grad in zip(leaves.items(), grads):
                result[name] = torch.zeros_like(leaf) if grad is None else grad
    index = result.setdefault("index", given.index)
    for name in ("weights", "d_top_k_weights"):
        if name in result and index is not None and result[name].shape != index.shape:
            result[name] = result[name].gather(1, index)  # Llama4's scores over all experts
    return result


@dataclass
class _Measured:
    """Error sums of every tensor, over one or more draws of inputs."""

    counts: list[int]  # tokens of each expert
    tensors: dict[str, list[Errors]]  # one Errors, or one for each expert
    checks: list[Row]  # of single draws: routing

    def __add__(self, other: _Measured) -> _Measured:
        return _Measured(
            [a + b for a, b in zip(self.counts, other.counts)],
            {k: [a + b for a, b in zip(v, other.tensors[k])] for k, v in self.tensors.items()},
            self.checks + other.checks,
        )

    def rows(self, dtype: torch.dtype, x_rms: float, in_fp8: tuple[str, ...]) -> list[Row]:
        """The law's verdict on each; FP8's own on the tensors `in_fp8`."""
        wrong = (check for check in self.checks if not check.passed)
        rows = [next(wrong, check) for check in self.checks[:1]]
        for name in sorted(self.tensors, key=_ORDER.index):
            parts = self.tensors[name]
            alive = x_rms if name.startswith("output") else None
            counts = self.counts if len(parts) > 1 else None
            fp8 = name in in_fp8
            rows.append(law.row(name, parts, dtype, x_rms=alive, counts=counts, fp8=fp8))
        return rows


_ORDER = (
    "top_k_weights",
    "output",
    "output_no_grad",
    "d_hidden_states",
    "d_gate_up_proj",
    "d_up_proj",
    "d_down_proj",
    "d_gate_up_proj_bias",
    "d_up_proj_bias",
    "d_down_proj_bias",
    "d_router",
    "d_router_inputs",
    "d_top_k_weights",
)


def _measure(
    block: nn.Module, family: Family, given: _Inputs, ours: Run, hf: list[Run], dtype: torch.dtype
) -> _Measured:
    """Streams the float64 truth over the experts and measures every tensor against it."""
    backward = "d_hidden_states" in ours
    index, d_out = ours["index"], given.d_out.double()
    x = given.x.double().requires_grad_()
    weights = ours["weights"].double().requires_grad_()
    measured = _Measured([], {}, [])
    if family.router:
        route = getattr(block, family.router).weight.detach().double().requires_grad_()
        logits = x @ route.mT
        weights = family.weights(logits, index)
        measured.checks.append(routing(index, ours["logits"], logits.detach(), dtype))
        # against float64 weights of the logits that each of them had
        own, *theirs = (family.weights(run["logits"].double(), index) for run in (ours, *hf))
        shifted = [run["weights"].double() - their + own for run, their in zip(hf, theirs)]
        measured.tensors["top_k_weights"] = [law.measure(ours["weights"], shifted, own)]

    truth = _experts_truth(block, family, (x, weights, index, d_out), ours, hf, measured)
    if family.shared_expert:
        gate, up, down = (
            getattr(block.shared_expert, name).weight.detach().double()
            for name in ("gate_proj", "up_proj", "down_proj")
        )
        shared = (F.silu(x @ gate.mT) * (x @ up.mT)) @ down.mT
        truth["output"] += shared.detach()
        if backward:
            truth["d_hidden_states"] += torch.autograd.grad(shared, x, d_out)[0]
    if backward and family.router:
        d_weights = truth["d_top_k_weights"]
        d_x, truth["d_router"] = torch.autograd.grad(weights, [x, route], d_weights)
        truth["d_hidden_states"] += d_x
        if family.renormalize and index.shape[1] == 1:
            del truth["d_router"]  # a single weight is always 1: its gradient is rounding noise
    experts = find_experts(block)
    quantised = is_quantised(experts)
    apart = quantised and not multiplies_fp8(experts)  # DEQUANTISED is for those with gradients
    wide, narrow = (hf[:1], hf[1:]) if apart else (hf, hf)
    if backward or quantised:
        output = ours["output_no_grad" if backward else "output"]
        parts = [law.measure(output, [run["output"] for run in narrow], truth["output"])]
        measured.tensors["output_no_grad"] = parts
    if quantised and not backward:
        del truth["output"]
    for name, exact in truth.items():
        measured.tensors[name] = [law.measure(ours[name], [run[name] for run in wide], exact)]
    if backward and not torch.equal(index, ours["index_no_grad"]):
        note = "without gradients other experts are chosen"
        measured.checks.append(Row("routing", False, note=note))
    return measured


def _experts_truth(
    block: nn.Module,
    family: Family,
    given: tuple[Tensor, Tensor, Tensor, Tensor],
    ours: Run,
    hf: list[Run],
    measured: _Measured,
) -> Run:
    """The experts' part of output, d_hidden_states and d_top_k_weights, in float64.

    Goes through one expert at a time, whose weights' gradients are measured on the way, so that
    no whole weight is ever there in float64.
    """
    backward = "d_hidden_states" in ours
    x, weights, index, d_out = given
    experts = find_experts(block)
    names = [f"d_{name}" for name in trained(experts)] if backward else []
    grads = {name: [run[name] for run in (ours, *hf)] for name in names}
    if names:
        both = zip(*(logical(block, *pair) for pair in zip(*map(grads.get, names[:2]))))
        grads |= zip(names, both)
    parts: dict[str, list[Errors]] = {name: [] for name in names}
    truth = {"output": torch.zeros_like(d_out)}
    if backward:
        truth |= {
            "d_hidden_states": torch.zeros_like(d_out),
            "d_top_k_weights": torch.zeros_like(weights),
        }
    for e in range(len(experts.down_proj)):
        token, choice = torch.where(index == e)
        measured.counts.append(len(token))
        if not len(token):
            for name in names:
                parts[name].append(law.measure_unused(grads[name][0][e], e))
            continue
        inputs = (x[token], weights[token, choice, None], *exact_weights(experts, e))
        inputs = [z.detach().double().requires_grad_(backward) for z in inputs]
        with torch.set_grad_enabled(backward):
            rows = _expert(experts, family, *inputs)
        truth["output"].index_add_(0, token, rows.detach())
        if not backward:
            continue
        d_rows, d_weight, *d_projections = torch.autograd.grad(rows, inputs, d_out[token])
        truth["d_hidden_states"].index_add_(0, token, d_rows)
        truth["d_top_k_weights"][token, choice] = d_weight[:, 0]
        for name, exact in zip(names, d_projections):
            our, *their = (grad[e] for grad in grads[name])
            parts[name].append(law.measure(our, their, exact[0], at=(e,)))
    measured.tensors |= parts
    return truth


def _expert(
    experts: nn.Module,
    family: Family,
    x: Tensor,
    weight: Tensor,
    up: Tensor,
    down: Tensor,
    *biases: Tensor,
) -> Tensor:
    """[R, H] of one expert, given with its leading 1, for x [R, H] and weight [R, 1]."""
    if not family.own_gate:
        only = torch.zeros(len(x), 1, dtype=torch.long, device=x.device)
        options = {"weight_on": family.weight_on, "activation": family.activation}
        return reference.fused_experts(x, up, down, only, weight, **options)
    up_bias, down_bias = biases or (0, 0)
    with _Exact():
        rows = gate(experts, x @ up[0].mT + up_bias) @ down[0].mT + down_bias
        return (experts.post_expert_norm(rows) if normalises(experts) else rows) * weight


def _rms(x: Tensor) -> float:
    return float(x.double().square().mean().sqrt())


def _repeat(first: Run, second: Run) -> Row:
    """Two runs of ours on the same inputs: the same bits, everywhere."""
    differ = [k for k in first if not _same_bits(first[k], second[k])]
    note = f"two runs differ in {', '.join(differ)}" if differ else "two runs, the same bits"
    return Row("repeat", not differ, note=note)


def _same_bits(a: Tensor, b: Tensor) -> bool:
    return torch.equal(*(z.contiguous().view(torch.uint8) for z in (a, b)))


class Comparison:
    """A block's shadows, ready to be compared at any number of tokens.

    Args:
        block: patched or not; it is left alone.
        dtype: to run in; that of the experts by default (then no weight is copied), of FP8 experts
            that of their configuration or bfloat16.

    Raises:
        ValueError: the block cannot be fused, or not be compared.
    """

    def __init__(self, block: nn.Module, dtype: torch.dtype | None = None) -> None:
        self.ours = shadow(block, dtype)
        report = patch(self.ours)
        if not report.fused:
            raise ValueError(f"it cannot be fused: {report}")
        self.family, experts = family_of(self.ours), find_experts(self.ours)
        known = is_decorated(experts) or isinstance(experts, UndecoratedExperts)
        if self.family.router is None and not known:
            raise ValueError("it is wrapped by PEFT: check the model before that")
        gate_up, down = logical(self.ours, *(getattr(experts, n) for n in projections(experts)[:2]))
        self.quantised, self.device = is_quantised(experts), gate_up.device
        self.dtype, self.in_fp8 = gate_up.dtype, ()
        if self.quantised:
            self.dtype = dtype or getattr(experts.config, "dtype", None) or torch.bfloat16
            self.in_fp8 = ("output_no_grad",)
            if multiplies_fp8(experts):
                self.in_fp8 += ("output", "d_hidden_states", "d_top_k_weights", "d_router")
        self.num_experts, self.intermediate_size = gate_up.shape[0], down.shape[2]
        self.hidden_size = gate_up.shape[2]
        self.baselines = {way: hugging_face(self.ours, way) for way in implementations(self.ours)}
        self.router = None
        name = find_router(self.ours) if self.family.router is None else None
        if name is not None:
            hf = next(iter(self.baselines.values())).get_submodule(name)
            self.router = RouterComparison(self.ours.get_submodule(name), hf)
        self.refused: dict[str, str] = {}  # Hugging Face's ways that do not run here, and why

    def rows(
        self, tokens: int, *, backward: bool, seed: int, hidden_states: Tensor | None = None
    ) -> tuple[list[Row], str]:
        """Every row of the law, and a remark for the reader.

        Few tokens are drawn again and their errors pooled, until MIN_SLOTS slots are in the sums.
        """
        generator = torch.Generator(self.device).manual_seed(_SEED + seed)
        measured, repeat, slots, draws, scale = None, None, 0, 0, None
        with plain_arithmetic():
            while slots < MIN_SLOTS:
                given = self._inputs(tokens, generator, hidden_states)
                if hidden_states is None:
                    scale = scale or self._scale(given)
                    given.x = given.x * scale
                ours = self._run_ours(given, backward)
                if ours["index"] is None:
                    note = "the patched block ran HF's own forward"
                    return [Row("fused", False, note=note)], ""
                repeat = repeat or _repeat(ours, self._run_ours(given, backward))
                given.index = ours["index"]
                hf = self._run_baselines(given, backward)
                new = _measure(self.ours, self.family, given, ours, hf, self.dtype)
                if self.router:
                    first, again = (
                        self.router.run(given.x, seed + draws, backward) for _ in range(2)
                    )
                    errors, row = self.router.measure(first, self.dtype)
                    new.tensors |= errors
                    new.checks.append(row)
                    repeat = _repeat(first, again) if repeat.passed else repeat
                measured = new if measured is None else measured + new
                slots, draws = slots + given.index.numel(), draws + 1
        remarks = [f"pooled over {draws} draws"] if draws > 1 else []
        remarks += [f"input {scale} * randn"] if scale not in (None, 1) else []
        judged = measured.rows(self.dtype, _rms(given.x), self.in_fp8)
        return [*judged, repeat], ", ".join(remarks)

    def _run_ours(self, given: _Inputs, backward: bool) -> Run:
        run = _run(self.ours, self.family, given, backward)
        if backward:  # without gradients other kernels run
            alone = _run(self.ours, self.family, given, False)
            run |= {"output_no_grad": alone["output"], "index_no_grad": alone["index"]}
        return run

    def _run_baselines(self, given: _Inputs, backward: bool) -> list[Run]:
        runs = []
        for name, block in list(self.baselines.items()):
            try:
                runs.append(_run(block, self.family, given, backward))
            except Exception as error:
                # FP8's kernels are fetched, which fails in many ways
                expected = isinstance(error, RuntimeError) or self.quantised
                memory = isinstance(error, torch.OutOfMemoryError)
                if memory or name != "grouped_mm" or not expected:
                    raise
                self.refused[name] = str(error).splitlines()[0]
                del self.baselines[name]
        return runs

    def _inputs(
        self, tokens: int, generator: torch.Generator, hidden_states: Tensor | None
    ) -> _Inputs:
        hidden, experts = self.hidden_size, self.num_experts

        def randn(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator, device=self.device)

        if hidden_states is None:
            x = randn(tokens, hidden).to(self.dtype)
        else:
            x = hidden_states.detach().reshape(-1, hidden).to(self.device, self.dtype)
        given = _Inputs(x, randn(len(x), hidden).to(self.dtype))
        if self.family.router is None:
            config = getattr(find_experts(self.ours), "config", None)
            top_k = min(getattr(config, "num_experts_per_tok", None) or 2, experts)
            weights, given.index = randn(len(x), experts).softmax(-1).topk(top_k)
            given.weights = (weights / weights.sum(-1, keepdim=True)).to(self.dtype)
        return given

    def _scale(self, given: _Inputs) -> int:
        """The power of two that makes an output of random inputs alive: small weights need it."""
        block = next(iter(self.baselines.values()))
        scale = 1
        while scale < 1 << 10:
            few = slice(0, 64)
            scaled = _Inputs(
                given.x[few] * scale,
                given.d_out[few],
                None if given.index is None else given.index[few],
                None if given.weights is None else given.weights[few],
            )
            if _rms(_run(block, self.family, scaled, False)["output"]) >= 2 * law.ALIVE * scale:
                return scale
            scale *= 2
        return 1
