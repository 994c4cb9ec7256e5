"""Functions replaced on Hugging Face's classes, forwards kept over unpatch, derived classes."""

from __future__ import annotations

import copy
import os
import subprocess
import sys

import pytest
import torch
from tiny import assert_close, says_once, tiny_block
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.utils import parametrizations, parametrize
from transformers import MixtralConfig
from transformers.models.deepseek_v3 import modeling_deepseek_v3 as hf_deepseek
from transformers.models.llama4 import modeling_llama4 as hf_llama4
from transformers.models.mixtral import modeling_mixtral as hf_mixtral
from transformers.models.qwen3_moe import modeling_qwen3_moe as hf_qwen3
from transformers.models.step3p7 import modeling_step3p7 as hf_step3p7

import moe_patch
from moe_patch.models import decorated, qwen3_moe
from moe_patch.recognise import original, routers
from moe_patch.recognise.wrapped import plain_class

pytestmark = [
    pytest.mark.filterwarnings("error:moe_patch runs Hugging Face"),
    pytest.mark.usefixtures("use"),
]
HIDDEN = 64


def mixtral():
    torch.manual_seed(0)
    config = MixtralConfig(
        hidden_size=HIDDEN, intermediate_size=32, num_local_experts=8, num_experts_per_tok=2
    )
    block = hf_mixtral.MixtralSparseMoeBlock(config)
    for parameter in block.parameters():
        nn.init.normal_(parameter, std=0.1)
    return block.eval()


def block_of(family):
    return mixtral() if family == "mixtral" else tiny_block(family)


def run(block):
    with torch.no_grad():
        out = block(torch.randn(1, 5, HIDDEN, generator=torch.manual_seed(3)))
    return out[0] if isinstance(out, tuple) else out


ROUTERS = {
    "qwen3_moe": ("gate", hf_qwen3.Qwen3MoeTopKRouter, qwen3_moe),
    "mixtral": ("gate", hf_mixtral.MixtralTopKRouter, routers),
    "llama4": ("router", hf_llama4.Llama4Router, None),
}
every_router = pytest.mark.parametrize("family", ROUTERS)


def ones(weights):
    return torch.ones_like(weights) if weights.is_floating_point() else weights


def replacement(cls):
    """A forward whose weights are another router's."""
    theirs = cls.forward
    assert not issubclass(cls, original.Fused)

    def replaced(self, hidden_states):
        first, *others = theirs(self, hidden_states)
        if cls is hf_llama4.Llama4Router:  # more experts than top_k
            return others[0].sigmoid(), *others
        return first, others[0] * 0.5, *others[1:]

    return replaced


# Item 4: functions replaced on the class


@every_router
def test_router_replaced_on_the_class_after_patch_runs(family, monkeypatch):
    _, cls, _ = ROUTERS[family]
    block, plain = block_of(family), block_of(family)
    before = run(block)
    moe_patch.patch(block)
    monkeypatch.setattr(cls, "forward", replacement(cls))
    expected = run(plain)
    assert not torch.allclose(expected, before, rtol=1e-3, atol=1e-4)
    with says_once(f"{cls.__name__}.forward was replaced on the class"):
        assert_close(run(block), expected)
        run(block)
    monkeypatch.undo()


@every_router
def test_router_replaced_on_the_class_before_patch_is_left(family, monkeypatch):
    name, cls, _ = ROUTERS[family]
    asked = block_of(family)
    assert not moe_patch.patch(asked).skipped  # of an earlier question nothing may be left
    moe_patch.unpatch(asked)
    with monkeypatch.context() as changed:
        changed.setattr(cls, "forward", replacement(cls))
        model = nn.ModuleDict({"a": block_of(family), "b": block_of(family)})
        expected = run(block_of(family))
        report = moe_patch.patch(model)
        at = "" if family == "llama4" else f".{name}"
        assert [skip[0] for skip in report.skipped] == [f"a{at}", f"b{at}"]
        for *_, reason in report.skipped:
            assert f"{cls.__name__}.forward was replaced on the class ({__file__}:" in reason
        assert report.fused == ([] if family == "llama4" else ["a", "b"])
        assert f"fused {len(report.fused)} of 2 MoE blocks" in str(report)
        for block in model.values():
            assert type(getattr(block, name)) is cls
            assert_close(run(block), expected)
    assert not moe_patch.patch(model).skipped  # put back, it is fused
    assert all(issubclass(type(getattr(block, name)), original.Fused) for block in model.values())
    for block in model.values():
        assert_close(run(block), run(block_of(family)))


@pytest.mark.parametrize("cls", [hf_llama4.Llama4TextMoe, hf_llama4.Llama4TextExperts])
@pytest.mark.parametrize("when", ["before", "after"])
def test_llama4_block_and_experts_replaced(cls, when, monkeypatch):
    block, plain = tiny_block("llama4"), tiny_block("llama4")
    original_forward = cls.forward

    def doubled(self, hidden_states):
        out = original_forward(self, hidden_states)
        return (out[0] * 2, out[1]) if isinstance(out, tuple) else out * 2

    if when == "after":
        moe_patch.patch(block)
    monkeypatch.setattr(cls, "forward", doubled)
    expected = run(plain)
    if when == "before":
        report = moe_patch.patch(block, strict=False)
        assert not report.fused and f"{cls.__name__}.forward was" in report.skipped[0][2]
        assert_close(run(block), expected)
        assert plain_class(block) is hf_llama4.Llama4TextMoe
    else:
        with says_once(f"{cls.__name__}.forward was replaced on the class"):
            assert_close(run(block), expected)


@pytest.mark.parametrize("when", ["before", "after"])
def test_undecorated_experts_replaced(when, monkeypatch):
    from types import SimpleNamespace

    cls = hf_step3p7.Step3p7Experts
    config = SimpleNamespace(
        num_local_experts=8, hidden_size=HIDDEN, moe_intermediate_size=32, hidden_act="silu"
    )
    experts = cls(config)
    for parameter in experts.parameters():
        nn.init.normal_(parameter, std=0.1)
    weights, index = torch.rand(5, 8).topk(2)
    arguments = torch.randn(5, HIDDEN), index, weights
    if when == "after":
        moe_patch.patch(experts)
    monkeypatch.setattr(cls, "forward", lambda self, hidden, *_: hidden * 3)
    if when == "before":
        report = moe_patch.patch(experts, strict=False)
        assert "Step3p7Experts.forward was replaced" in report.skipped[0][2]
        assert torch.equal(experts(*arguments), arguments[0] * 3)
    else:
        with says_once("Step3p7Experts.forward was replaced"):
            assert torch.equal(experts(*arguments), arguments[0] * 3)


def test_block_that_only_overlaps_is_reported(monkeypatch):
    original_forward = hf_deepseek.DeepseekV3MoE.forward
    monkeypatch.setattr(
        hf_deepseek.DeepseekV3MoE, "forward", lambda self, x: original_forward(self, x) * 2
    )
    config = hf_deepseek.DeepseekV3Config(
        hidden_size=HIDDEN, moe_intermediate_size=32, n_routed_experts=8, num_experts_per_tok=2,
        n_group=2, topk_group=1,
    )  # fmt: skip
    block = hf_deepseek.DeepseekV3MoE(config).eval()
    for parameter in block.parameters():
        nn.init.normal_(parameter, std=0.1)
    expected = run(block)
    report = moe_patch.patch(block)
    assert report.fused == [""] and "fused 1 of 1" in str(report)
    ((name, cls, reason),) = report.skipped
    assert (name, cls) == ("", "DeepseekV3MoE") and "DeepseekV3MoE.forward was" in reason
    assert type(block) is hf_deepseek.DeepseekV3MoE
    assert_close(run(block), expected)


@pytest.mark.parametrize("name", ["forward", "_apply_gate"])
@pytest.mark.parametrize("when", ["before", "after"])
def test_experts_class_replaced(name, when, monkeypatch):
    block, plain = tiny_block("qwen3_moe"), tiny_block("qwen3_moe")
    cls = hf_qwen3.Qwen3MoeExperts
    original_function = getattr(cls, name)
    for one in (block, plain):  # the eager loop does not call the gate
        one.experts.config._experts_implementation = "grouped_mm"
    if when == "after":
        moe_patch.patch(block)
        run(block)
    monkeypatch.setattr(cls, name, lambda self, *args: original_function(self, *args) * 2)
    expected = run(plain)
    if when == "before":
        report = moe_patch.patch(block, strict=False)
        if name == "forward":
            reason = f"Qwen3MoeExperts.forward was replaced on the class ({__file__}:"
            assert not report.fused and reason in report.skipped[0][2]
    assert_close(run(block), expected)


def test_gate_of_the_class_that_does_what_silu_does_is_called(monkeypatch):
    """It could do anything besides, tomorrow: who replaces it wants it called."""
    calls = []
    cls = hf_qwen3.Qwen3MoeExperts
    original_gate = cls._apply_gate
    monkeypatch.setattr(cls, "_apply_gate", lambda *args: calls.append(1) or original_gate(*args))
    block = tiny_block("qwen3_moe")
    expected = run(block)
    moe_patch.patch(block)
    calls.clear()
    assert_close(run(block), expected)
    assert calls


SCRIPT = """
import torch
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter as router
theirs = router.forward
def mine(self, x):
    logits, weights, index = theirs(self, x)
    return logits, weights * 2, index
if {wrapped}:
    import functools
    mine = functools.wraps(theirs)(mine)
router.forward = mine
import moe_patch
from tiny import tiny_block
block = tiny_block("qwen3_moe")
print(moe_patch.patch(block))
assert type(block.gate) is router
"""


@pytest.mark.parametrize("wrapped", [True, False])
def test_replaced_before_moe_patch_was_imported(wrapped):
    command = [sys.executable, "-c", SCRIPT.format(wrapped=wrapped)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(os.path.abspath, sys.path))}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    assert "gate (Qwen3MoeTopKRouter): Qwen3MoeTopKRouter.forward was replaced" in done.stdout


def test_decorators_of_transformers_replace_nothing():
    """A wrapper is from another module than the class: what it wraps counts."""
    cls = hf_qwen3.Qwen3MoeExperts
    assert cls.forward.__globals__["__name__"] != cls.__module__
    assert not [*original.replaced(cls, ["forward"])]


def test_keywords_of_a_class_reach_hugging_face_s():
    class Titled(nn.Module):
        def __init_subclass__(cls, title, **options):
            super().__init_subclass__(**options)
            cls.title = title

    class FusedTitled(original.Fused, Titled, title="fused"):
        pass

    assert FusedTitled.title == "fused" and FusedTitled.stands_for is Titled


def test_helper_of_the_instance(monkeypatch):
    """A router of several methods: one of them replaced on the instance, or on the class."""

    class Router(hf_mixtral.MixtralTopKRouter):
        def forward(self, hidden_states):
            return super().forward(hidden_states)

        def helper(self, x):
            return x

    functions = tuple(original.methods(Router).items())
    rule = routers.rule_of(hf_mixtral.MixtralTopKRouter)
    fused = type("Router", (routers.FusedRouter, Router), {"rule": rule, "functions": functions})
    router = mixtral().gate
    router.__class__ = fused
    assert original.intact(router)
    router.helper = lambda x: x
    assert not original.intact(router)
    del router.helper
    monkeypatch.setattr(Router, "helper", lambda self, x: x * 2)
    with says_once("Router.helper was replaced on the class"):
        assert not original.intact(router)


@every_router
def test_router_replaced_on_the_instance_is_reported(family):
    name, cls, _ = ROUTERS[family]
    block = block_of(family)
    router = getattr(block, name)
    theirs = router.forward
    router.forward = lambda x: theirs(x)
    expected = run(block)
    report = moe_patch.patch(block, strict=False)
    ((at, found, reason),) = report.skipped
    assert "forward was replaced on the instance" in reason and type(router) is cls
    if family == "llama4":  # whose block computes what the router says that it chose
        assert not report.fused and (at, found) == ("", "Llama4TextMoe")
    else:
        assert report.fused == [""] and (at, found) == (name, cls.__name__)
    assert_close(run(block), expected)


# Item 8: a forward that somebody kept, and classes that somebody derived


def kept(module):
    forward = module.forward
    module.forward = lambda *args: forward(*args)


@pytest.mark.parametrize("family", ROUTERS)
def test_kept_forward_is_hugging_face_s_after_unpatch(family, monkeypatch):
    block = block_of(family)
    expected = run(block)
    moe_patch.patch(block)
    for module in (block, getattr(block, ROUTERS[family][0]), block.experts):
        kept(module)
    assert_close(run(block), expected)
    moe_patch.unpatch(block)

    def called(*args, **kwargs):
        raise AssertionError("fused code ran")

    for module in (decorated, routers, qwen3_moe, moe_patch.models.llama4):
        for function in ("fused_experts", "select_experts", "sigmoid_scores"):
            monkeypatch.setattr(module, function, called, raising=False)
    assert torch.equal(run(block), expected)


PARAMETRIZED = [
    ("qwen3_moe", "gate", "weight"),
    ("mixtral", "gate", "weight"),
    ("llama4", "router", "weight"),
    ("llama4", "experts", "gate_up_proj"),
    ("qwen3_moe", "experts", "down_proj"),
]


@pytest.mark.parametrize("order", ["patch, norm", "norm, patch"])
@pytest.mark.parametrize("family, name, weight", PARAMETRIZED)
def test_parametrized(family, name, weight, order):
    block, plain = block_of(family), block_of(family)
    parametrizations.weight_norm(getattr(plain, name), weight)
    expected = run(plain)
    module = getattr(block, name)
    for step in order.split(", "):
        if step == "patch":
            report = moe_patch.patch(block)
            assert report.fused == [""] and not report.skipped
        else:
            parametrizations.weight_norm(module, weight)
    assert_close(run(block), expected)
    assert isinstance(module, original.Fused) is ((family, name) != ("qwen3_moe", "experts"))
    assert type(module).__name__ == type(getattr(plain, name)).__name__
    twin = copy.deepcopy(block)
    moe_patch.unpatch(block)
    for module in block.modules():
        assert original.fused_within(type(module)) is None
    assert torch.equal(run(block), expected)
    assert_close(run(twin), expected)  # the copy is patched still
    assert original.fused_within(type(getattr(twin, name))) or name == "experts"
    parametrize.remove_parametrizations(getattr(block, name), weight)
    assert type(getattr(block, name)) is type(getattr(block_of(family), name))
    moe_patch.patch(block)
    assert_close(run(block), expected)


def test_classes_that_fully_shard_derives():
    """One for all modules of a kind."""
    blocks, cls = nn.ModuleList([mixtral(), mixtral()]), hf_mixtral.MixtralTopKRouter
    expected = run(blocks[0])
    derived = type(f"FSDP{cls.__name__}", (FSDPModule, cls), {})
    for block in blocks:
        block.gate.__class__ = derived
    report = moe_patch.patch(blocks)
    assert report.routers == ["0.gate", "1.gate"] and not report.left
    assert type(blocks[0].gate) is type(blocks[1].gate)
    assert isinstance(blocks[0].gate, FSDPModule) and isinstance(blocks[0].gate, original.Fused)
    assert_close(run(blocks[0]), expected)
    moe_patch.unpatch(blocks)
    for block in blocks:
        assert type(block.gate).__bases__ == (FSDPModule, cls)
    assert torch.equal(run(blocks[0]), expected)


def test_class_of_somebody_s_own_is_named_and_nothing_is_done():
    model = nn.ModuleDict({"a": tiny_block("qwen3_moe"), "b": tiny_block("qwen3_moe")})
    moe_patch.patch(model)
    former = type(model["b"].gate)
    model["b"].gate.__class__ = type("Mine", (former,), {})
    classes = [(type(m), vars(m).get("config")) for m in model.modules()]
    with pytest.raises(RuntimeError, match="cannot unpatch b.gate, whose class Mine was derived"):
        moe_patch.unpatch(model)
    assert classes == [(type(m), vars(m).get("config")) for m in model.modules()]
    model["b"].gate.__class__ = former
    moe_patch.unpatch(model)
    assert type(model["b"].gate) is hf_qwen3.Qwen3MoeTopKRouter


@pytest.mark.parametrize("what", [None, "a model", 3])
def test_unpatch_takes_a_module(what):
    with pytest.raises(
        TypeError, match=f"unpatch takes a torch.nn.Module, found {type(what).__name__}"
    ):
        moe_patch.unpatch(what)


def test_class_that_swaps_forgot_is_unpatched(monkeypatch):
    """The original is known to the fused class itself, whichever thread made it."""
    block, cls = mixtral(), hf_mixtral.MixtralTopKRouter
    functions = tuple(original.methods(cls).items())
    other = routers._new_class(cls, functions)
    block.gate.__class__ = other
    assert other not in moe_patch.models.SWAPS.values()
    moe_patch.unpatch(block)
    assert type(block.gate) is cls
