"""Routers of other families: recognised by what they compute, and computed."""

from __future__ import annotations

import contextlib
import copy
import importlib
import inspect
import io
import pickle
import re
from pathlib import Path
from types import ModuleType

import pytest
import torch
import transformers
from families import CONFIGS, build
from small import SMALL, shrink
from tiny import assert_close, assert_same_scores, says_once, tokens
from torch import nn
from transformers import AutoModelForCausalLM
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter
from transformers.models.mistral4.modeling_mistral4 import Mistral4TopkRouter

import moe_patch
from moe_patch import environment, switch
from moe_patch.models import SWAPS
from moe_patch.recognise import routers

pytestmark = pytest.mark.filterwarnings("error:moe_patch runs Hugging Face")

DEEPSEEK_V3 = {  # the families of transformers 5.17 whose routers are DeepSeek-V3's
    "axk1", "deepseek_v3", "deepseek_v32", "dots1", "exaone_moe", "glm4_moe", "glm4_moe_lite",
    "glm4v_moe", "glm5_next", "glm_moe_dsa", "hy_v4", "kimi_linear", "mimo_v2_flash", "nemotron_h",
    "solar_open",
}  # fmt: skip
OTHERS = {
    "axk2", "cohere2_moe", "deepseek_ocr2", "deepseek_v2", "flex_olmo", "gpt_oss", "granitemoe",
    "granitemoe_swa", "granitemoehybrid", "granitemoeshared", "hy_v3", "lfm2_moe", "mellum",
    "minimax", "minimax_m2", "minimax_m3_vl", "mistral4", "mixtral", "olmoe",
    "openai_privacy_filter", "qwen2_moe", "qwen3_5_moe", "qwen3_moe", "qwen3_next",
    "qwen3_omni_moe", "qwen3_vl_moe", "qwen4_exp", "step3p7",
}  # fmt: skip
LATER = {  # of transformers after 5.17
    "aria", "bailing_hybrid", "beam", "dots3_note", "hy_v4_vl", "jamba", "lara_mini",
    "mistral_large4", "unlimited_ocr",
}  # fmt: skip


def recognised() -> dict[str, tuple[type[nn.Module], routers.Rule]]:
    """{family and class: the class and its rule} of the installed transformers."""
    found = {}
    for path in sorted(Path(transformers.__file__).parent.glob("models/*/modeling_*.py")):
        if not re.search(r"topk\(.*(\n.*)*Experts", path.read_text(encoding="utf-8")):
            continue
        try:
            name = f"transformers.models.{path.parent.name}.{path.stem}"
            module = importlib.import_module(name)
        except ImportError:
            continue
        for cls in vars(module).values():
            if isinstance(cls, type) and cls.__module__ == name and (rule := routers.rule_of(cls)):
                found[f"{path.parent.name}-{cls.__name__}"] = cls, rule
    return found


ROUTERS = recognised()


def make(cls):
    """The family's router for 8 experts, 2 of them chosen, with random parameters and buffers."""
    module = inspect.getmodule(cls)
    configs = [
        c for config in environment._configs(module) for c in (config, *environment._parts(config))
    ]
    built = []
    for config in configs:
        with contextlib.suppress(Exception):  # the configuration of another part
            config.allow_global_per_layer_attribute_access = True  # not in transformers 5.17
            built.append(cls(shrink(config, {})))
    router = next(router for router in built if router.top_k == 2)
    for tensor in (*router.parameters(), *router.buffers()):
        nn.init.normal_(tensor, std=0.4)
    return router.eval()


def bias_of(router, rule, device):
    return (torch.randn(router.num_experts, device=device) - 1,) if rule.given else ()


def swap(router):
    twin = copy.deepcopy(router)
    twin.__class__ = SWAPS.get(type(router)) or routers.fused_class(type(router))
    return twin


@pytest.fixture
def selected(monkeypatch) -> list:
    """Grows with every router that runs fused."""
    original, calls = routers.select_experts, []
    monkeypatch.setattr(
        routers, "select_experts", lambda *a, **k: calls.append(a) or original(*a, **k)
    )
    return calls


# Who is recognised


def test_families_that_are_recognised():
    found = {name.split("-")[0] for name in ROUTERS}
    assert DEEPSEEK_V3 | OTHERS <= found <= DEEPSEEK_V3 | OTHERS | LATER
    like = {name.split("-")[0] for name, (_, rule) in ROUTERS.items() if rule is routers.RULES[0]}
    assert DEEPSEEK_V3 <= like <= DEEPSEEK_V3 | LATER


def mutant(*changes, name="transformers.models.mutant", cls=DeepseekV3TopkRouter):
    """The class with other code, old and new in turns, in a module of that name."""
    source = inspect.getsource(cls)
    for old, new in zip(changes[::2], changes[1::2], strict=True):
        assert old in source
        source = source.replace(old, new)
    module = ModuleType(name)
    exec("import torch, torch.nn as nn, torch.nn.functional as F", vars(module))
    exec(compile(source, "mutant", "exec"), vars(module))
    return getattr(module, cls.__name__)


@pytest.mark.parametrize(
    "old, new",
    [
        ("1e-20", "1e-15"),
        ("1e-20", "0"),
        ("topk(2, dim=-1)", "topk(1, dim=-1)"),
        ('float("-inf")', "-1.0"),
        ("k=self.topk_group", "k=1"),
        ("k=self.top_k", "k=self.top_k - 1"),
        ("+ self.e_score_correction_bias", "- self.e_score_correction_bias"),
        ("scores.gather", "scores_for_choice.gather"),
        ("* self.routed_scaling_factor", "* self.routed_scaling_factor**2"),
        ("if self.norm_topk_prob", "if not self.norm_topk_prob"),
        ("if self.norm_topk_prob", "if True"),
        ("* self.routed_scaling_factor", "* self.routed_scaling_factor * 1.001"),
        (".sigmoid()", ".softmax(-1)"),
        (
            "hidden_states.type(torch.float32), self.weight.type(torch.float32))",
            "hidden_states, self.weight).float()",
        ),
        ("return router_logits, topk_weights", "return router_logits.sigmoid(), topk_weights"),
        ("return router_logits, topk_weights", "return router_logits, topk_weights.float()"),
        ("return router_logits, topk_weights,", "return topk_weights, topk_weights,"),
        ("scores = router_logits", "self.seen = scores = router_logits"),
        ("scores = router_logits", "scores = router_logits.detach()"),
        ("if self.norm_topk_prob", "if self.training or self.norm_topk_prob"),
        ("if self.norm_topk_prob", "if hidden_states.is_cuda or self.norm_topk_prob"),
    ],
)
def test_other_code_is_another_router(old, new):
    rule = routers.rule_of(DeepseekV3TopkRouter)
    assert routers.rule_of(mutant("1e-20", "1e-20")) is rule is routers.RULES[0]
    assert routers.rule_of(mutant(old, new)) is not rule


@pytest.mark.parametrize("norm, rule", [("if True", 9), ("if False", None)])
def test_mistral_large_4_is_mistral_4_in_float32_with_its_norm(norm, rule):
    """Mistral 4's class with two changes stands in: the real one is a later transformers'."""
    product = "F.linear(hidden_states, self.weight)"
    wide = "F.linear(hidden_states.float(), self.weight.float())"
    cls = mutant(product, wide, "if self.norm_topk_prob", norm, cls=Mistral4TopkRouter)
    assert routers.rule_of(cls) is (None if rule is None else routers.RULES[rule])


def test_names_that_no_rule_covers_are_counted_past_the_third():
    """Or the fourth, if it is the last."""
    several = (("abc", "a, b, c, which"), ("abcd", "a, b, c, d, which"))
    for names, said in (*several, ("abcde", "a, b, c and 2 more names, which")):
        read = "".join(f"self.{name} * " for name in names)
        cls = mutant("scores = router_logits", f"scores = {read}router_logits")
        assert routers.why_unknown(cls).startswith(f"its code uses {said}")


def test_code_from_elsewhere_and_subclasses_are_left_alone(device):
    class Silent(DeepseekV3TopkRouter):
        pass

    class Loud(DeepseekV3TopkRouter):
        def forward(self, hidden_states):
            return super().forward(hidden_states)

    for cls in (mutant("1e-20", "1e-20", name="transformers_modules.mine"), Silent, Loud):
        model = AutoModelForCausalLM.from_config(CONFIGS["deepseek_v3"]())
        block = model.model.layers[1].mlp
        block.gate.__class__ = cls
        assert moe_patch.patch(model).fused == ["model.layers.1.mlp"]
        assert type(block.gate) is cls


# What they compute


@pytest.mark.parametrize("name", ROUTERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_outputs_and_gradients(name, dtype, device, selected):
    cls, rule = ROUTERS[name]
    router = make(cls).to(device, dtype)
    fused = swap(router)
    hidden = torch.randn(24, 64, device=device, dtype=dtype, requires_grad=True)
    given = bias_of(router, rule, device)
    with routers._Definite():
        expected = router(hidden, *given)
    actual = fused(hidden, *given)
    if cls.__name__ != "Qwen3MoeTopKRouter":  # it has a file of its own
        assert len(selected) == 1
    for ours, theirs in zip(actual, expected):
        assert (ours.shape, ours.dtype) == (theirs.shape, theirs.dtype)
    at = (2, 1, 0) if rule.index_first else (0, 1, 2)
    (logits, weights, index), (others, their_weights, their_index) = (
        [one[i] for i in at] for one in (actual, expected)
    )
    assert torch.equal(logits, others)
    if logits.dtype == torch.float32:
        assert torch.equal(index, their_index)
    same = (index == their_index).all(1)
    assert same.float().mean() > 0.8  # HF rounds scores before it chooses by them
    inputs = (hidden, router.weight)
    if dtype == torch.float32:
        grad = torch.randn_like(weights)
        ours = torch.autograd.grad(weights, (hidden, fused.weight), grad)
        for mine, other in zip(ours, torch.autograd.grad(their_weights, inputs, grad)):
            assert_close(mine, other)
    eps = torch.finfo(dtype).eps  # HF rounds scores, sum and quotient
    torch.testing.assert_close(weights[same], their_weights[same], rtol=4 * eps, atol=2 * eps)


@pytest.mark.parametrize("groups, kept", [(4, 2), (3, 1), (6, 5), (1, 1)])
@pytest.mark.parametrize("family", ["deepseek_v3-DeepseekV3TopkRouter", "axk2-AXK2TopkRouter"])
def test_equals_of_experts_and_of_groups(family, groups, kept, device, selected):
    """As HF has them, if its torch.topk takes the lowest of equals."""
    router = make(ROUTERS[family][0]).to(device)
    router.top_k, router.num_experts = 4, 12
    router.num_group, router.topk_group = groups, kept
    router.weight = nn.Parameter(torch.eye(12, 64, device=device))
    router.e_score_correction_bias = torch.randint(-2, 1, (12,), device=device) / 2
    hidden = torch.randint(-1, 2, (200, 64), device=device).float()
    with routers._Definite():
        expected = router(hidden)
    actual = swap(router)(hidden)
    assert selected and torch.equal(actual[2], expected[2])
    assert_same_scores(actual[1], expected[1], ())


def test_gradients_against_float64(device):
    router = make(DeepseekV3TopkRouter).to(device)
    exact = copy.deepcopy(router).double()
    hidden = torch.randn(40, 64, device=device, requires_grad=True)
    _, weights, index = swap(router)(hidden)
    x = hidden.detach().double().requires_grad_()
    scores = (x @ exact.weight.T).sigmoid().gather(1, index)
    truth = scores / scores.sum(-1, keepdim=True) * router.routed_scaling_factor
    grad = torch.randn_like(weights)
    (ours,) = torch.autograd.grad(weights, hidden, grad)
    (other,) = torch.autograd.grad(truth, x, grad.double())
    assert_close(weights, truth.float())
    assert_close(ours, other.float())


# In models


@pytest.fixture
def model(device):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIGS["deepseek_v3"]()).to(device).eval()
    nn.init.normal_(model.model.layers[1].mlp.gate.e_score_correction_bias, std=0.3)
    return model


def test_state_hooks_and_unpatch(model, device, selected):
    gate = model.model.layers[1].mlp.gate
    before = {name: value.clone() for name, value in model.state_dict().items()}
    seen, tensors = [], dict(gate.named_parameters()) | dict(gate.named_buffers())
    gate.register_forward_hook(lambda module, args, out: seen.append(out[0]))
    expected = model(tokens(device)).logits
    moe_patch.patch(model)
    assert isinstance(gate, DeepseekV3TopkRouter) and type(gate) is not DeepseekV3TopkRouter
    assert type(gate).__name__ == "DeepseekV3TopkRouter"
    assert_close(model(tokens(device)).logits, expected)
    assert len(seen) == 2 and torch.equal(*seen) and len(selected) == 1
    for name, value in (dict(gate.named_parameters()) | dict(gate.named_buffers())).items():
        assert value is tensors[name]
    after = model.state_dict()
    assert list(after) == list(before)
    assert all(torch.equal(after[name], value) for name, value in before.items())
    moe_patch.unpatch(model)
    assert type(gate) is DeepseekV3TopkRouter
    assert torch.equal(model(tokens(device)).logits, expected) and len(selected) == 1


@pytest.mark.parametrize(
    "clone",
    [
        copy.deepcopy,
        lambda x: pickle.loads(pickle.dumps(x)),
        lambda x: torch.load(saved(x), weights_only=False),
    ],
)
def test_copies_are_patched(clone, model, device, selected):
    moe_patch.patch(model)
    expected = model(tokens(device)).logits
    twin = clone(model)
    gate = twin.model.layers[1].mlp.gate
    assert type(gate) is type(model.model.layers[1].mlp.gate)
    assert gate.weight is not model.model.layers[1].mlp.gate.weight
    assert torch.equal(twin(tokens(device)).logits, expected) and len(selected) == 2
    moe_patch.unpatch(twin)
    assert type(gate) is DeepseekV3TopkRouter


def saved(module):
    buffer = io.BytesIO()
    torch.save(module, buffer)
    buffer.seek(0)
    return buffer


@pytest.mark.parametrize("family", ["deepseek_v3", "glm4_moe", "mixtral", "gpt_oss"])
def test_generation_and_recorded_logits(family, device, selected):
    model = build(family, device)
    ids = tokens(device, 2, 4) % SMALL["vocab_size"]
    options = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}

    def run():
        out = model(ids, output_router_logits=True)
        return model.generate(ids, **options), getattr(out, "router_logits", None)

    expected, recorded = run()
    moe_patch.patch(model)
    actual, ours = run()
    assert selected and torch.equal(actual, expected)
    assert (ours is None) == (recorded is None)  # transformers 5.17 records DeepSeek-V3's not
    assert recorded or family not in ("mixtral", "gpt_oss")
    for one, other in zip(ours or (), recorded or ()):
        assert_close(one, other)


def test_a_step_of_training_leaves_the_bias(model, device, selected):
    moe_patch.patch(model.train())
    gate = model.model.layers[1].mlp.gate
    bias = gate.e_score_correction_bias.clone()
    model(tokens(device), labels=tokens(device)).loss.backward()
    assert selected and gate.weight.grad.abs().sum() > 0
    assert torch.equal(gate.e_score_correction_bias, bias)


def test_compiles_without_graph_breaks(model, device):
    moe_patch.patch(model)
    torch._dynamo.reset()
    with torch.no_grad():
        expected = model(tokens(device)).logits
        compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
        assert_close(compiled(tokens(device)).logits, expected)
    torch._dynamo.reset()


def test_autocast_gives_hf_s_dtypes(device):
    for name, (cls, rule) in ROUTERS.items():
        router = make(cls).to(device)
        hidden, given = torch.randn(6, 64, device=device), bias_of(router, rule, device)
        with torch.no_grad(), torch.autocast(device.type, torch.float16), routers._Definite():
            expected = router(hidden, *given)
        with torch.no_grad(), torch.autocast(device.type, torch.float16):
            actual = swap(router)(hidden, *given)
        if rule.autocast:  # else HF's own ran
            assert [x.dtype for x in actual] == [x.dtype for x in expected], name


def test_too_few_experts_in_the_best_groups_are_hf_s(device, selected):
    router = make(DeepseekV3TopkRouter).to(device)
    router.num_group, router.topk_group, router.top_k = 4, 1, 3
    hidden = torch.randn(5, 64, device=device)
    for ours, theirs in zip(swap(router)(hidden), router(hidden)):
        assert torch.equal(ours, theirs)
    assert not selected


@pytest.mark.filterwarnings("default:moe_patch runs Hugging Face")
def test_falls_back_and_says_so(device, monkeypatch, selected):
    router = make(DeepseekV3TopkRouter).to(device)
    fused, hidden = swap(router), torch.randn(5, 64, device=device)
    expected = router(hidden)
    with says_once("a tensor is torch.float64"):
        fused.double()(hidden.double())
    fused.float()
    monkeypatch.setattr(switch, "ENABLED", False)
    assert all(map(torch.equal, fused(hidden), expected))
    assert not selected
