"""Experts with biases, interleaved halves or no gate, fused; with a gate of their own, by parts."""

from __future__ import annotations

import importlib
from types import SimpleNamespace

import pytest
import torch
from four_bits import quantised
from ops import assert_close
from plain import honest
from torch import nn
from transformers import AutoModelForCausalLM, GptOssConfig
from transformers.activations import ACT2FN
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, use_experts_implementation

import moe_patch
from moe_patch.models import decorated
from moe_patch.ops.grouped import add_bias, expert_order
from moe_patch.parity import check_parity
from moe_patch.parity.compare import Comparison
from moe_patch.parity.passes import MANY
from moe_patch.recognise.eligibility import why_by_parts
from moe_patch.recognise.gates import activation_of
from moe_patch.recognise.parts import up_name

CONFIG = {
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 8),
    **dict.fromkeys(("intermediate_size", "moe_intermediate_size"), 32),
    "hidden_size": 64,
    "mlp_hidden_act": "relu2",
    "moe_latent_size": None,
    "swiglu_limit": 7.0,
    "swiglu_alpha": 1.702,
    "_experts_implementation": "grouped_mm",
}
FAMILIES = {
    "gpt_oss": ("GptOssExperts", "silu 7.0 1.702 1.0 interleaved"),
    "openai_privacy_filter": ("OpenAIPrivacyFilterExperts", "silu 7.0 1.702 1.0 concatenated"),
    "nemotron_h": ("NemotronHExperts", "relu2 None 1.0 0.0 ungated"),
}


@use_experts_implementation
class Learned(nn.Module):
    """A gate with a weight of its own, which no fused activation can be."""

    def __init__(self, config):
        super().__init__()
        self.num_experts = 8
        self.gate_up_proj = nn.Parameter(torch.empty(8, 64, 64))
        self.down_proj = nn.Parameter(torch.empty(8, 64, 32))
        self.scale = nn.Parameter(torch.ones(32))
        self.act_fn = ACT2FN["silu"]

    def forward(self, hidden_states, top_k_index, top_k_weights):
        raise AssertionError("grouped_mm runs instead")

    def _apply_gate(self, gate_up):
        gate, up = gate_up.chunk(2, dim=-1)
        return self.act_fn(gate) * up * self.scale


@use_experts_implementation
class Normalised(nn.Module):
    """Experts that normalise their output before it is weighted: MuseSpark's, transformers 5.23."""

    def __init__(self, config):
        super().__init__()
        self.num_experts = 8
        self.gate_up_proj = nn.Parameter(torch.empty(8, 64, 64))
        self.down_proj = nn.Parameter(torch.empty(8, 64, 32))
        self.act_fn = ACT2FN["silu"]
        self.post_expert_norm = nn.RMSNorm(64, eps=1e-8)

    def forward(self, hidden_states, top_k_index, top_k_weights):
        out = torch.zeros_like(hidden_states)
        for choice, weight in zip(top_k_index.T, top_k_weights.T):
            rows = (self.gate_up_proj[choice] @ hidden_states[..., None])[..., 0]
            rows = (self.down_proj[choice] @ self._apply_gate(rows)[..., None])[..., 0]
            out = out + self.post_expert_norm(rows) * weight[:, None]
        return out


OWN = {"learned": (Learned, "a gate of its own")}
OWN["normalised"] = Normalised, "a norm of each expert's output"


def build(family, device="cpu", std=0.3):
    if family in OWN:
        experts = OWN[family][0](SimpleNamespace(**CONFIG))
        experts.has_post_expert_norm = family == "normalised"  # by the decorator, since 5.23
        if family == "normalised":
            experts.config._experts_implementation = "eager"
    else:
        module = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
        experts = getattr(module, FAMILIES[family][0])(SimpleNamespace(**CONFIG))
    for parameter in experts.parameters():
        nn.init.normal_(parameter, std=std)
    return experts.to(device)


def routed(device, dropped=False):
    hidden = torch.randn(12, 64, device=device, requires_grad=True)
    weights, index = torch.rand(12, 8, device=device).topk(2)
    if dropped:
        index = index.masked_fill(torch.rand(12, 2, device=device) < 0.4, 8)
        weights = weights.masked_fill(index == 8, 0)
    return hidden, index, weights.requires_grad_()


def results(experts, hidden, index, weights):
    out = experts(hidden, index, weights)
    leaves = [hidden, weights, *experts.parameters()]
    return out.detach(), *torch.autograd.grad(out.square().sum(), leaves)


@pytest.mark.parametrize("dropped", (False, True))
@pytest.mark.parametrize("family", [*FAMILIES, *OWN])
def test_hugging_face_s_results(family, device, dropped, ran):
    experts, (hidden, index, weights) = build(family, device), routed(device, dropped)
    gone = index == 8  # to Hugging Face, slots of weight 0
    expected = list(results(experts, hidden, index.masked_fill(gone, 0), weights))
    expected[2] = expected[2].masked_fill(gone, 0)
    report = moe_patch.patch(experts)
    assert report.fused and not report.skipped
    own = family in OWN
    assert why_by_parts(experts) == (OWN[family][1] if own else None)
    assert own or activation_of(experts) == FAMILIES[family][1]
    for ours, theirs in zip(results(experts, hidden, index, weights), expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=2e-5, atol=2e-5 * float(theirs.abs().max()))
    assert ran == ["by_parts" if own else "fused_experts"]


@pytest.mark.parametrize(
    "dtype",
    [torch.float32, torch.float16, pytest.param(torch.bfloat16, marks=pytest.mark.gpu)],
    ids=str,
)
@pytest.mark.parametrize("family", FAMILIES)
def test_the_law_holds_biases_included(family, dtype, device):
    # short of the clamps, at whose edge a rounding is a whole gradient (docs/parity.md)
    experts = build(family, device, std=0.15).to(dtype)
    ways = () if dtype == torch.float32 else MANY
    if device.type == "cpu":  # in the interpreter they take minutes: each is run with one family
        ways = ways[[*FAMILIES].index(family) :: len(FAMILIES)]
    rows, _ = Comparison(experts).rows(70, backward=True, seed=0, ways=ways)
    assert all(row.passed for row in rows), rows
    names = {row.tensor for row in rows}
    assert {f"d_{name}" for name, _ in experts.named_parameters()} <= names


def test_by_parts_is_the_same_function(device, monkeypatch):
    """Biases and other forms are fused where the gate is known, and not only there."""
    for family in FAMILIES:
        experts, arguments = build(family, device), routed(device, dropped=True)
        moe_patch.patch(experts)
        expected = results(experts, *arguments)
        with monkeypatch.context() as patched:
            patched.setattr(decorated, "activation_of", lambda _: None)
            for ours, theirs in zip(results(experts, *arguments), expected, strict=True):
                atol = 2e-5 * float(theirs.abs().max())
                torch.testing.assert_close(ours, theirs, rtol=2e-5, atol=atol)


@pytest.mark.parametrize("name", ["gate_up_bias", "down_bias"])
def test_a_bias_law_can_fail(name, device, use):
    """The check sees a bias that is left out."""
    experts = build("gpt_oss", device)
    use(lambda *args, **more: honest(*args, **more | {name: None}))
    assert not moe_patch.check_parity(experts, tokens=70).passed


@pytest.mark.parametrize("scattered", (False, True))
@pytest.mark.parametrize("dtype", (torch.float32, torch.float16), ids=str)
def test_bias_gradients_are_summed_in_float32(device, dtype, scattered):
    index = torch.randint(0, 6, (700, 2), device=device)  # 5: dropped
    order = expert_order(index, 5, dtype)
    rows = torch.randn(1400, 24, device=device).to(dtype).requires_grad_()
    bias = torch.randn(5, 24, device=device).to(dtype).requires_grad_()
    out = add_bias(rows, bias, index, order, scattered=scattered)
    slot = torch.arange(1400, device=device) if scattered else order.row_to_slot.long()
    expert = index.reshape(-1)[slot]
    known = expert < 5
    assert torch.equal(out[known], (rows + bias[expert.clamp(max=4)])[known])
    d_out = torch.randn_like(out).masked_fill(~known[:, None], 0)
    d_rows, d_bias = torch.autograd.grad(out, [rows, bias], d_out)
    truth = torch.zeros(6, 24, dtype=torch.float64, device=device)
    truth = truth.index_add(0, expert, d_out.double())[:5]
    assert torch.equal(d_rows, d_out)
    assert_close(d_bias, truth, dtype)


def test_autocast(device):
    experts, arguments = build("gpt_oss", device), routed(device)
    moe_patch.patch(experts)
    expected = experts(*arguments)
    with torch.autocast(device.type, dtype=torch.float16):
        out = experts(*arguments)
    assert out.dtype == expected.dtype
    assert (out - expected).norm() < 5e-3 * expected.norm()


@pytest.mark.parametrize("family", FAMILIES)
def test_compiles_without_graph_breaks(family, device):
    experts, (hidden, index, weights) = build(family, device), routed(device)
    moe_patch.patch(experts)
    expected = results(experts, hidden, index, weights)
    torch._dynamo.reset()
    compiled = torch.compile(experts, fullgraph=True, backend="aot_eager")
    for ours, theirs in zip(results(compiled, hidden, index, weights), expected):
        torch.testing.assert_close(ours, theirs)


def test_whole_gpt_oss(device):
    config = GptOssConfig(
        hidden_size=64, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, vocab_size=96, num_local_experts=8,
        num_experts_per_tok=2, max_position_embeddings=64, sliding_window=16,
        pad_token_id=0, eos_token_id=None,
    )  # fmt: skip
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).to(device).eval()
    for name, parameter in model.named_parameters():
        if "experts" in name:
            nn.init.normal_(parameter, std=0.2)
    ids = torch.randint(96, (2, 9), device=device)

    def run():
        model.zero_grad()
        out = model(ids, labels=ids)
        out.loss.backward()
        return out.logits, {n: p.grad for n, p in model.named_parameters() if p.grad is not None}

    logits, grads = run()
    tokens = model.generate(ids, do_sample=False, max_new_tokens=5)
    assert len(moe_patch.patch(model).fused) == 2
    ours, our_grads = run()
    torch.testing.assert_close(ours, logits, rtol=1e-4, atol=1e-4)
    assert our_grads.keys() == grads.keys()
    for name, grad in grads.items():
        atol = 1e-4 * float(grad.abs().max()) + 1e-8
        torch.testing.assert_close(our_grads[name], grad, rtol=1e-4, atol=atol)
    assert torch.equal(model.generate(ids, do_sample=False, max_new_tokens=5), tokens)
    moe_patch.unpatch(model)
    torch.testing.assert_close(run()[0], logits, rtol=0, atol=0)


@pytest.mark.parametrize("family", ["gpt_oss", "nemotron_h", "learned"])
def test_lora_on_such_experts(family, device, ran):
    from peft import LoraConfig, get_peft_model

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.experts = build(family, device)

        def forward(self, *arguments):
            return self.experts(*arguments)

    config = LoraConfig(
        r=2, init_lora_weights=False, target_modules=[],
        target_parameters=[f"experts.{up_name(build(family))}", "experts.down_proj"],
    )  # fmt: skip
    model, arguments = get_peft_model(Model(), config), routed(device)
    expected = model(*arguments)
    assert moe_patch.patch(model).fused
    adapters = [p for n, p in model.named_parameters() if "lora_" in n]
    grads = torch.autograd.grad(expected.square().sum(), adapters)
    out = model(*arguments)
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-4 * float(expected.abs().max()))
    for ours, theirs in zip(torch.autograd.grad(out.square().sum(), adapters), grads):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4 * float(theirs.abs().max()))
    assert ran == ["by_parts" if family == "learned" else "fused_experts"]


class Holder(nn.Module):
    """What PEFT can put adapters into."""

    def __init__(self, experts):
        super().__init__()
        self.experts = experts

    def forward(self, *arguments):
        return self.experts(*arguments)


@pytest.mark.filterwarnings("ignore:.*experts in 4 bits, dequantised")
@pytest.mark.parametrize("adapted", (False, True), ids=("bare", "adapted"))
@pytest.mark.parametrize("family", OWN)
def test_in_4_bits(family, adapted, device, ran):
    from peft import LoraConfig, get_peft_model

    pair, arguments = quantised(Holder(build(family, device))), routed(device)
    if adapted:
        config = LoraConfig(
            r=2, init_lora_weights=False, target_modules=[],
            target_parameters=["experts.gate_up_proj", "experts.down_proj"],
        )  # fmt: skip
        models = []
        for each in pair:
            torch.manual_seed(1)
            models.append(get_peft_model(each, config))
        pair = tuple(models)

    def run(model):
        named = {n: p for n, p in model.named_parameters() if p.requires_grad}
        named = {n: p for n, p in named.items() if "bias" in n or "lora_" in n or "norm" in n}
        out = model(*arguments)
        leaves = [arguments[0], arguments[2], *named.values()]
        return out.detach(), *torch.autograd.grad(out.square().sum(), leaves)

    expected = run(pair[1])
    report = moe_patch.patch(pair[0])
    assert report.fused and OWN[family][1] in str(report)
    for _ in ("patched", "unpatched"):
        for ours, theirs in zip(run(pair[0]), expected, strict=True):
            atol = 2e-5 * float(theirs.abs().max())
            torch.testing.assert_close(ours, theirs, rtol=2e-5, atol=atol)
        assert ran == ["by_parts"]
        moe_patch.unpatch(pair[0])


def test_grouped_mm_is_the_yardstick(device):
    """Ours is Hugging Face's function, not only its class."""
    experts, arguments = build("nemotron_h", device), routed(device)
    expected = ALL_EXPERTS_FUNCTIONS["grouped_mm"](experts, *arguments)
    assert_close(decorated.experts_forward(experts, *arguments), expected.double(), torch.float32)


def test_parity_of_normalised_experts(device, monkeypatch):
    experts = build("normalised", device)
    experts.config._experts_implementation = "grouped_mm"
    # 5.17 has none
    monkeypatch.setattr("moe_patch.parity.compare.implementations", lambda _: ["eager"])
    assert check_parity(experts, tokens=64, backward=False).passed
    original = decorated.by_parts
    monkeypatch.setattr(decorated, "by_parts", lambda *arguments: original(*arguments) * 0.99)
    assert not check_parity(experts, tokens=64, backward=False).passed
