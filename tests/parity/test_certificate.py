"""check_parity judges the object that will run, in every way in which people run it.

Each fault here shows in one of those ways alone. The kernels are replaced by plain PyTorch with the
fault, where they need not run.
"""

from __future__ import annotations

import pytest
import torch
from plain import honest
from small import block as small_block
from tiny import Spoil
from torch import nn
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3MLP

import moe_patch
from moe_patch import kernels
from moe_patch.models import deepseek_v3, llama4, qwen3_moe
from moe_patch.shapes import build, build_model

DTYPES = [torch.float32, torch.float16]
BLOCKS = ["tiny_qwen3", "tiny_llama4"]


def certify(block: nn.Module, **options) -> moe_patch.parity.ParityReport:
    """The report on a block after it was patched."""
    moe_patch.patch(block)
    return moe_patch.check_parity(block, **options)


def failed(report) -> set[str]:
    return {row.tensor for row in report.rows if not row.passed}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", BLOCKS)
def test_honest_code_passes_in_every_way(use, name, dtype):
    report = certify(build(name, dtype=dtype))
    assert report.passed, report
    names = {row.tensor for row in report.rows}
    assert {"frozen experts", "accumulated .grad", "autocast", "train()", "strided input"} <= names
    assert [section.tokens for section in report.sections] == [1, 7, 80]


# Faults of the experts: (x, gate_up, down, index, weights, weight_on=...) -> out


def when(condition, fault):
    """Honest code but where the condition on the arguments holds."""

    def experts(*args, **on):
        return fault(*args, **on) if condition(*args) else honest(*args, **on)

    return experts


def times(factor):
    return lambda *args, **on: honest(*args, **on) * factor


def training_at_one_token(x, *_):
    return len(x) == 1 and torch.is_grad_enabled()


def many_tokens(x, *_):
    return len(x) > 64


def under_autocast(*_):
    return torch.is_autocast_enabled("cpu")


def strided(x, *_):
    return not x.is_contiguous()


def in_float32(*args, **on):
    return honest(*args, **on).float()


def without_gradient_of(position):
    """The gradient of an argument is zero."""

    def experts(*args, **on):
        args = list(args)
        args[position] = Spoil.apply(args[position], lambda grad: grad * 0)
        return honest(*args, **on)

    return experts


def frozen(*positions):
    return lambda *args: all(not args[p].requires_grad for p in positions) and args[0].requires_grad


def nothing_added(*args, **on):
    """The second backward adds nothing to a `.grad` that is there."""
    args = list(args)
    for position in (1, 2):
        leaf = args[position] if args[position].is_leaf else args[position]._base
        if leaf is not None and leaf.grad is not None:
            args[position] = Spoil.apply(args[position], lambda grad: grad * 0)
    return honest(*args, **on)


def recomputed_wrong(x, *rest, **on):
    """Wrong where a checkpoint computes again, in the backward."""
    again = torch._C._current_graph_task_id() != -1
    return honest(x * (1.1 if again else 1), *rest, **on)


EXPERTS = {
    "training at one token": (when(training_at_one_token, times(1.05)), "output"),
    "many tokens": (when(many_tokens, times(1.05)), "output"),
    "autocast": (when(under_autocast, times(1.05)), "autocast"),
    "strided input": (when(strided, times(2)), "strided input"),
    "float32 output": (in_float32, "return value"),
    "gradient of x without the experts'": (
        when(frozen(1, 2), without_gradient_of(0)), "frozen experts",
    ),
    "gradient of the weights without the experts'": (
        when(frozen(1, 2), without_gradient_of(4)), "frozen experts",
    ),
    "gate_up without down": (
        when(lambda x, up, down, *_: up.requires_grad and not down.requires_grad,
             without_gradient_of(1)), "frozen second projection",
    ),
    "down without gate_up": (
        when(lambda x, up, down, *_: down.requires_grad and not up.requires_grad,
             without_gradient_of(2)), "frozen first projection",
    ),
    "nothing added": (nothing_added, "accumulated .grad"),
    "checkpointing": (recomputed_wrong, "gradient checkpointing"),
}  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", BLOCKS)
@pytest.mark.parametrize("fault", EXPERTS)
def test_fault_of_the_experts_fails(use, name, dtype, fault):
    experts, row = EXPERTS[fault]
    if fault == "float32 output" and (name, dtype) != ("tiny_qwen3", torch.float16):
        pytest.skip("no fault in float32; Llama4's block casts it back")
    use(experts)
    tokens = 1 if experts is EXPERTS["training at one token"][0] else 80
    report = certify(build(name, dtype=dtype), tokens=tokens)
    assert row in failed(report)
    notes = [row.note for row in report.rows if not row.passed]
    assert not any(note.startswith("raises") for note in notes), notes


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_sentinels_that_are_not_dropped_fail(use, dtype):
    def clamped(x, up, down, index, *rest, **on):
        return honest(x, up, down, index.clamp(max=len(up) - 1), *rest, **on)

    use(clamped)
    assert failed(certify(build("tiny_qwen3", dtype=dtype), tokens=80)) == {
        "sentinels", "sentinels, no gradients",
    }  # fmt: skip


# Faults of decoding, whose kernels run


def first_choice(decode):
    def only(x, up, down, index, weights, **more):
        return decode(x, up, down, index[:, :1].contiguous(), weights[:, :1].contiguous(), **more)

    return only


DECODE = {
    "zeros": lambda decode: lambda *args, **more: decode(*args, **more) * 0,
    "five percent": lambda decode: lambda *args, **more: decode(*args, **more) * 1.05,
    "one percent": lambda decode: lambda *args, **more: decode(*args, **more) * 1.01,
    "first choice": first_choice,
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("fault", DECODE)
def test_fault_of_decode_fails(monkeypatch, device, fault, dtype):
    monkeypatch.setattr(kernels.decode, "decode", DECODE[fault](kernels.decode.decode))
    report = certify(build("tiny_qwen3", dtype=dtype, device=device), tokens=1, backward=False)
    assert "output" in failed(report) and report.paths == ["decode"]


# Faults of what stands around the experts


def patch_forward(monkeypatch, cls, change):
    forward = cls.forward
    monkeypatch.setattr(cls, "forward", lambda self, *args: change(self, forward(self, *args)))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_fault_in_train_mode_fails(use, monkeypatch, dtype):
    def in_training(self, found):
        logits, scores, index = found
        return logits, scores * (1.05 if self.training else 1), index

    patch_forward(monkeypatch, qwen3_moe.Qwen3MoeTopKRouter, in_training)
    assert failed(certify(build("tiny_qwen3", dtype=dtype), tokens=80)) == {"train()"}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_detached_router_logits_fail(use, monkeypatch, dtype):
    patch_forward(
        monkeypatch, qwen3_moe.Qwen3MoeTopKRouter, lambda _, found: (found[0].detach(), *found[1:])
    )
    report = certify(build("tiny_qwen3", dtype=dtype), tokens=80)
    assert failed(report) == {"return value", "autocast"}
    assert "requires grad" in next(row.note for row in report.rows if not row.passed)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "change",
    [torch.zeros_like, torch.detach, lambda logits: logits[None], lambda logits: logits.float()],
    ids=["zeros", "detached", "another shape", "float32"],
)
def test_other_router_logits_of_llama4_fail(use, monkeypatch, dtype, change):
    if dtype == torch.float32 and change(torch.ones(1, dtype=torch.float16)).dtype == dtype:
        pytest.skip("no fault in float32")
    patch_forward(monkeypatch, llama4.Llama4TextMoe, lambda _, out: (out[0], change(out[1])))
    assert "return value" in failed(certify(build("tiny_llama4", dtype=dtype), tokens=80))


def test_logits_that_are_detached_in_train_mode_alone_fail(use, monkeypatch):
    """No bit of what is computed tells."""

    def in_training(self, out):
        return out[0], out[1].detach() if self.training else out[1]

    patch_forward(monkeypatch, llama4.Llama4TextMoe, in_training)
    report = certify(build("tiny_llama4"), tokens=80)
    assert failed(report) == {"train()"}
    (row,) = (row for row in report.rows if not row.passed)
    assert row.note == "block: (float32 [80, 64], requires grad; float32 [80, 4])"


def test_block_that_raises_fails_where_hugging_faces_runs(use, monkeypatch):
    def broken(*_):
        raise LookupError("no such\nexpert")

    monkeypatch.setattr(deepseek_v3.DeepseekV3MoE, "forward", broken)
    report = certify(small_block("deepseek_v3"), tokens=64)
    assert failed(report) == {"block output"}
    (row,) = (row for row in report.rows if not row.passed)
    assert row.note == "the patched block raises: no such"
    assert not any("block output" in line for line in report.skipped)


def test_block_that_is_half_precision_s_alone_without_gradients_passes(use, monkeypatch):
    """The truth takes the way of training. Kolibri's router is such code on a GPU."""

    def narrow(_, out):
        if not torch.is_grad_enabled() and out.dtype == torch.float64:
            raise RuntimeError("out_dtype must be the same as input dtype")
        return out

    patch_forward(monkeypatch, DeepseekV3MLP, narrow)
    report = certify(small_block("deepseek_v3"), tokens=64)
    assert report.passed, report
    assert any(row.tensor == "block output, no gradients" for row in report.rows)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("factor", [3, 1.02])
def test_block_whose_experts_are_right_fails(use, monkeypatch, dtype, factor):
    patch_forward(monkeypatch, deepseek_v3.DeepseekV3MoE, lambda _, out: out * factor)
    found = failed(certify(small_block("deepseek_v3", dtype), tokens=[1, 64]))
    assert {"block output", "block output, no gradients", "block d_hidden_states"} == found


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", BLOCKS)
def test_override_on_the_live_object_fails(use, name, dtype):
    model = build_model(name, layers=1, dtype=dtype)
    model.patch()
    (experts,) = (m for m in model.modules() if type(m).__name__.endswith("Experts"))
    forward = experts.forward
    experts.forward = lambda *args: forward(*args) * 0.97
    assert "output" in failed(moe_patch.check_parity(model, tokens=64))
    del experts.forward
    assert moe_patch.check_parity(model, tokens=64).passed


def test_hook_on_the_live_object_counts(use):
    block = build("tiny_qwen3")
    moe_patch.patch(block)
    hook = block.register_forward_hook(lambda *args: args[2] * 1.01)
    assert "output" in failed(moe_patch.check_parity(block, tokens=64))
    hook.remove()
    seen = []
    block.experts.register_forward_hook(lambda *_: seen.append(1))
    assert moe_patch.check_parity(block, tokens=64).passed and seen


def test_forward_that_is_not_ours_fails(use, monkeypatch):
    block = build("tiny_qwen3")
    moe_patch.patch(block)
    block.experts.config = block.experts.config.original
    report = moe_patch.check_parity(block, tokens=64)
    assert failed(report) == {"fused"} and "HF's own forward" in report.rows[0].note


# What it does not touch, and what it refuses


def test_live_model_is_left_as_found(use):
    block = build("tiny_qwen3").train()
    moe_patch.patch(block)
    block.experts.gate_up_proj.requires_grad_(False)
    block.experts.down_proj.grad = torch.ones_like(block.experts.down_proj)
    block.gate.eval()
    steps = []
    block.experts.down_proj.register_post_accumulate_grad_hook(lambda _: steps.append(1))
    before = (
        [(m.training, dict(m._forward_hooks), dict(m._forward_pre_hooks)) for m in block.modules()],
        [(id(p), p._version, p.requires_grad, id(p.grad)) for p in block.parameters()],
        block.experts.down_proj.grad._version,
        torch.get_rng_state().tolist(),
        [sorted(vars(m)) for m in block.modules()],
    )
    assert moe_patch.check_parity(block).passed
    after = (
        [(m.training, dict(m._forward_hooks), dict(m._forward_pre_hooks)) for m in block.modules()],
        [(id(p), p._version, p.requires_grad, id(p.grad)) for p in block.parameters()],
        block.experts.down_proj.grad._version,
        torch.get_rng_state().tolist(),
        [sorted(vars(m)) for m in block.modules()],
    )
    assert after == before and not steps


@pytest.mark.parametrize(
    "hidden, reason",
    [
        (torch.zeros(4, 64), "all zeros"),
        (torch.full((4, 64), torch.nan), "inf or NaN"),
        (torch.full((4, 64), torch.inf), "inf or NaN"),
        (torch.randn(0, 64), "no element"),
        (torch.cat([torch.randn(3, 64), torch.zeros(1, 64)]), "all zeros"),
    ],
)
def test_input_that_proves_nothing_is_refused(use, hidden, reason):
    with pytest.raises(ValueError, match=reason):
        moe_patch.check_parity(build("tiny_qwen3"), hidden_states=hidden)


@pytest.mark.parametrize("tokens", [True, "7", 7.0, [7, True], [[7]]])
def test_tokens_are_whole_numbers(use, tokens):
    with pytest.raises(TypeError, match="whole number"):
        moe_patch.check_parity(build("tiny_qwen3"), tokens=tokens)


def test_only_modules_are_checked():
    with pytest.raises(TypeError, match=r"takes a torch.nn.Module, found str"):
        moe_patch.check_parity("x")


def test_draws_of_given_rows_differ(use):
    """Pooled draws of one row would be one draw, many times over."""
    seen = []

    def watch(x, *rest, **on):
        seen.append(x.detach().clone())
        return honest(x, *rest, **on)

    use(watch)
    given = torch.randn(1, 64)
    assert certify(build("tiny_qwen3"), hidden_states=given).passed
    assert torch.equal(seen[0], given)
    distinct = {tuple(x.flatten().tolist()) for x in seen if not torch.is_autocast_enabled("cpu")}
    assert len(distinct) >= 16 and all(
        torch.equal(x.abs(), given.abs()) for x in seen if x.dtype == given.dtype
    )


@pytest.mark.parametrize("thorough, draws", [(False, 16), (True, 64)])
def test_how_many_draws_of_one_token_are_pooled(use, thorough, draws):
    """Two slots each: 32 slots, or 128."""
    options = {"tokens": 1, "backward": False, "thorough": thorough}
    (section,) = certify(build("tiny_qwen3"), **options).sections
    assert section.remark == f"pooled over {draws} draws"


def test_every_kind_is_certified_once_and_thorough_all(use):
    model = build_model("tiny_qwen3", layers=2)
    sections = moe_patch.check_parity(model).sections
    rows = [len(section.rows) for section in sections]
    assert [section.tokens for section in sections] == [1, 7, 80, 80]
    assert rows[2] > rows[0] > rows[1] == rows[3]
    thorough = moe_patch.check_parity(model, blocks=1, thorough=True)
    assert thorough.passed
    assert [len(section.rows) for section in thorough.sections] == [rows[2]] * 3


def test_what_ctrl_c_leaves_is_on_the_exception(use):
    """The command shows it."""
    calls = []

    def stopped(x, *rest, **on):
        calls.append(len(x))
        if len(x) == 80:
            raise KeyboardInterrupt
        return honest(x, *rest, **on)

    use(stopped)
    with pytest.raises(KeyboardInterrupt) as stop:
        moe_patch.check_parity(build("tiny_qwen3"))
    assert [section.tokens for section in stop.value.report.sections] == [1, 7]
