"""Forward-mode AD, torch.func and torch.jit.trace: Hugging Face's own forward runs, and says so."""

from __future__ import annotations

import contextlib
import copy
import importlib
import warnings

import pytest
import torch
from ops import moe
from tiny import assert_close, both_families, says_once, tiny_block, tiny_model, tokens
from torch import func, nn
from torch.autograd import forward_ad
from torch.autograd.functional import jacobian
from torch.utils import _pytree as pytree

import moe_patch
from moe_patch import reference
from moe_patch.models import decorated, llama4
from moe_patch.ops import expert_order, fused_experts, grouped_gemm
from moe_patch.ops.grouped import add_bias
from moe_patch.ops.routing import select_experts

EAGER = {"attn_implementation": "eager", "experts_implementation": "eager"}
SIZE = (7, 32, 16, 5, 2)


@pytest.fixture(autouse=True)
def quiet():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@pytest.fixture
def fused(monkeypatch):
    """Grows by one on every call of fused_experts by a module."""
    calls = []
    for module in (decorated, llama4):
        original = module.fused_experts
        monkeypatch.setattr(
            module, "fused_experts", lambda *a, f=original, **k: calls.append(f) or f(*a, **k)
        )
    return calls


def pair(module):
    patched = copy.deepcopy(module)
    assert moe_patch.patch(patched).fused
    return module, patched


def first(module):
    """The module as a function of a tensor to a tensor."""

    def function(*args):
        out = module(*args)
        return out[0] if isinstance(out, tuple) else out

    return function


def assert_equal(ours, theirs):
    """Leaf by leaf; not all of them zero."""
    ours, theirs = pytree.tree_leaves(ours), pytree.tree_leaves(theirs)
    assert len(ours) == len(theirs) and any(bool(leaf.any()) for leaf in theirs)
    for mine, other in zip(ours, theirs):
        torch.testing.assert_close(mine, other)


def of_parameters(module, x):
    def loss(parameters):
        return first(lambda x: func.functional_call(module, parameters, (x,)))(x).square().sum()

    return func.grad(loss)(dict(module.named_parameters()))


TRANSFORMS = {
    "jvp": lambda m, x: func.jvp(first(m), (x,), (x.cos(),)),
    "grad": lambda m, x: func.grad(lambda x: first(m)(x).square().sum())(x),
    "grad of parameters": of_parameters,
    "vjp": lambda m, x: func.vjp(first(m), x)[1](first(m)(x).cos()),
    "jacrev": lambda m, x: func.jacrev(first(m))(x),
    "jacfwd": lambda m, x: func.jacfwd(first(m))(x),
    "hessian": lambda m, x: func.hessian(lambda x: first(m)(x).square().sum())(x[:, :1]),
    "vmap": lambda m, x: func.vmap(first(m))(torch.stack([x, x.cos()])),
    "functional": lambda m, x: jacobian(first(m), x, strategy="forward-mode", vectorize=True),
}


@pytest.mark.parametrize("implementation", ("eager", "grouped_mm"))
@pytest.mark.parametrize("transform", TRANSFORMS)
@both_families
def test_blocks_under_transforms(family, transform, implementation, device):
    x = torch.randn(1, 3, 64, device=device)
    plain, patched = pair(tiny_block(family, device, experts_implementation=implementation))
    try:
        expected = TRANSFORMS[transform](plain, x)
    except (RuntimeError, NotImplementedError) as error:  # torch cannot: nor can it here
        with pytest.raises(type(error)):
            TRANSFORMS[transform](patched, x)
    else:
        assert_equal(TRANSFORMS[transform](patched, x), expected)


def test_hugging_face_s_own_takes_most_of_them(device):
    """Else the test above shows nothing."""
    x, works = torch.randn(1, 3, 64, device=device), {}
    for implementation in ("eager", "grouped_mm"):
        block = tiny_block("qwen3_moe", device, experts_implementation=implementation)
        for name, transform in TRANSFORMS.items():
            with contextlib.suppress(RuntimeError, NotImplementedError):
                transform(block, x)
                works.setdefault(name, []).append(implementation)
    assert works.keys() == TRANSFORMS.keys(), works


@pytest.mark.parametrize("frozen", ("frozen", "no_grad"))
@both_families
def test_tangents_of_models(family, frozen, device):
    """Of frozen weights, or without gradients: no autograd function would say anything."""
    found = []
    for model in pair(tiny_model(family, device, **EAGER)):
        model.requires_grad_(frozen != "frozen")
        embedded = model.get_input_embeddings()(tokens(device)).detach()
        tangent = torch.randn(embedded.shape, generator=torch.manual_seed(2)).to(device)
        with torch.set_grad_enabled(frozen == "frozen"), forward_ad.dual_level():
            out = model(inputs_embeds=forward_ad.make_dual(embedded, tangent), use_cache=False)
            found.append([part.detach() for part in forward_ad.unpack_dual(out.logits)])
    assert found[0][1] is not None
    for ours, theirs in zip(found[1], found[0]):
        assert_close(ours, theirs)


REASONS = {
    "forward": ("forward-mode AD", lambda f, x: func.jvp(f, (x,), (x,))),
    "dual": ("forward-mode AD", lambda f, x: dual(f, x)),
    "func": ("torch.func", lambda f, x: func.grad(lambda x: f(x).sum())(x)),
    "trace": ("torch.jit.trace", lambda f, x: torch.jit.trace(f, (x,), check_trace=False)),
}


def dual(function, x):
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(function(forward_ad.make_dual(x, x))).tangent


@pytest.mark.parametrize("how", ("dual", "func", "trace"))
@both_families
def test_it_says_so_once(family, how, device):
    reason, transform = REASONS[how]
    _, patched = pair(tiny_block(family, device, experts_implementation="eager"))
    patched.requires_grad_(False)
    x = torch.randn(1, 3, 64, device=device)
    with says_once(reason):
        for _ in range(2):
            transform(first(patched), x)


@pytest.mark.parametrize("how", ("dual", "func"))
def test_every_level_leaves_it_to_hugging_face(how, device, fused, monkeypatch):
    """Routers by rule, experts with biases, by parts, a block that overlaps, PEFT's wrapper."""
    from peft import LoraConfig, get_peft_model

    deepseek = importlib.import_module("transformers.models.deepseek_v3")
    config = deepseek.DeepseekV3Config(
        hidden_size=64, intermediate_size=64, moe_intermediate_size=32, n_routed_experts=8,
        n_shared_experts=1, n_group=2, topk_group=1, num_experts_per_tok=2,
        experts_implementation="eager",
    )  # fmt: skip
    torch.manual_seed(0)
    block = deepseek.modeling_deepseek_v3.DeepseekV3MoE(config)
    blocks = {"deepseek": block, "by parts": tiny_block("qwen3_moe", **EAGER)}
    blocks["by parts"].experts.act_fn = nn.Tanh()
    wrapper = nn.ModuleDict({"mlp": tiny_block("qwen3_moe", **EAGER)})
    names = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    options = {"target_modules": [], "lora_dropout": 0.0, "init_lora_weights": False}
    wrapper = get_peft_model(wrapper, LoraConfig(r=2, target_parameters=names, **options))
    if how == "dual":  # torch.func refuses PEFT's parametrizations, patched or not
        blocks["lora"] = wrapper.base_model.model["mlp"]
    monkeypatch.setattr(decorated, "by_parts", None)
    for name, block in blocks.items():
        for parameter in block.parameters():
            nn.init.normal_(parameter, std=0.1)
        plain, patched = pair(block.to(device).eval().requires_grad_(False))
        x = torch.randn(1, 20, 64, device=device)
        with torch.no_grad() if how == "dual" else torch.enable_grad():
            theirs, ours = (REASONS[how][1](first(each), x) for each in (plain, patched))
        assert theirs.any(), name
        assert_close(ours, theirs)
    assert not fused


@both_families
def test_traced_models(family, device):
    """The traced outputs are Hugging Face's, on other tokens, too."""
    other = tokens(device).flip(1)
    found = []
    options = {**EAGER, "experts_implementation": "eager" if family == "llama4" else "grouped_mm"}
    for model in pair(tiny_model(family, device, **options)):
        model.requires_grad_(False)
        model.config.use_cache = False

        class Logits(nn.Module):
            def __init__(self, model=model):
                super().__init__()
                self.model = model

            def forward(self, embedded):
                return self.model(inputs_embeds=embedded).logits

        embed = model.get_input_embeddings()
        traced = torch.jit.trace(Logits(), (embed(tokens(device)),), check_trace=False)
        found.append((traced(embed(tokens(device))), traced(embed(other))))
    for ours, theirs in zip(found[1], found[0]):
        assert torch.equal(ours, theirs)


@both_families
def test_afterwards_it_is_fused_again(family, device, fused):
    _, patched = pair(tiny_block(family, device))
    x = torch.randn(1, 3, 64, device=device)
    func.grad(lambda x: first(patched)(x).sum())(x)
    assert not fused
    patched(x)
    assert len(fused) == 1


def split(arguments):
    """(names and values of the float arguments, the others)."""
    floats = {n: t.detach() for n, t in arguments.items() if t.is_floating_point()}
    return floats, {n: t for n, t in arguments.items() if n not in floats}


@pytest.mark.parametrize("weight_on", ("output", "input"))
def test_fused_experts_itself(device, weight_on):
    floats, rest = split(moe(device, torch.float32, *SIZE, routing="sentinel"))
    tangents = {name: torch.randn_like(value) for name, value in floats.items()}
    found = []
    for function in (fused_experts, reference.fused_experts):

        def run(values, function=function):
            return function(**values, **rest, weight_on=weight_on)

        with torch.no_grad(), forward_ad.dual_level():
            duals = {n: forward_ad.make_dual(v, tangents[n]) for n, v in floats.items()}
            tangent = forward_ad.unpack_dual(run(duals)).tangent
        gradient = func.grad(lambda values, run=run: run(values).square().sum())(floats)
        found.append((tangent, gradient, func.jvp(run, (floats,), (tangents,))))
    assert_equal(*found)


def test_a_trace_of_fused_experts_follows_the_routing(device):
    floats, rest = split(moe(device, torch.float32, *SIZE, routing="sentinel"))
    index = rest["top_k_index"]
    traced = torch.jit.trace(
        lambda index: fused_experts(**floats, top_k_index=index), (index,), check_trace=False
    )
    for other in (index, index.flip(0), torch.zeros_like(index)):
        assert_close(traced(other), fused_experts(**floats, top_k_index=other))


def test_grouped_gemm_and_its_order(device):
    arguments = moe(device, torch.float32, *SIZE, routing="sentinel", grad=False)
    x, weight, index = (arguments[n] for n in ("hidden_states", "gate_up_proj", "top_k_index"))
    bias = torch.randn(weight.shape[:2], device=device)
    known = (index >= 0) & (index < len(weight))

    def run(x, weight, bias, index, ours=True):
        kit = (expert_order, grouped_gemm, add_bias)
        if not ours:
            kit = (lambda i, e, _: reference.sort_tokens(i, e, 16), reference.grouped_gemm,
                   reference.add_bias)  # fmt: skip
        order = kit[0](index, len(weight), x.dtype)
        rows = kit[1](x, weight, order, gather=True)
        rows = kit[2](rows, bias, index, order)
        keep = known.reshape(-1)[order.row_to_slot.long()]
        return rows.masked_fill(~keep[:, None], 0).square().sum()

    grads = [
        func.grad(lambda *a, ours=ours: run(*a, index, ours=ours), argnums=(0, 1, 2))(
            x, weight, bias
        )
        for ours in (True, False)
    ]
    assert_equal(*grads)
    with torch.no_grad(), forward_ad.dual_level():
        tangents = [
            forward_ad.unpack_dual(
                run(forward_ad.make_dual(x, x.cos()), weight, bias, index, ours=ours)
            ).tangent
            for ours in (True, False)
        ]
    assert_equal(*tangents)
    sizes = torch.tensor([2, 0, 3, 1, 1], device=device)
    by_group = [
        func.grad(lambda x, g=g: g(x, weight, m_sizes=sizes).square().sum())(x)
        for g in (grouped_gemm, reference.grouped_gemm)
    ]
    assert_equal(*by_group)


def test_a_trace_of_grouped_gemm_is_refused(device):
    x, weight = torch.randn(4, 32, device=device), torch.randn(2, 16, 32, device=device)
    sizes = torch.tensor([2, 2], device=device)
    for function in (
        lambda x: grouped_gemm(x, weight, m_sizes=sizes),
        lambda x: expert_order(x.long(), 2, torch.float32).row_to_slot,
    ):
        with pytest.raises(RuntimeError, match="cannot record moe_patch's expert_order and group"):
            torch.jit.trace(function, (x,), check_trace=False)


@pytest.mark.parametrize("options", ({}, {"score": "sigmoid", "renormalize": True}), ids=str)
def test_select_experts_itself(device, options):
    logits = torch.randn(5, 8, device=device)
    found = []
    for function in (select_experts, reference.select_experts):

        def run(logits, function=function):
            return function(logits, 3, **options)

        with torch.no_grad(), forward_ad.dual_level():
            dual = forward_ad.make_dual(logits, logits.cos())
            tangent = forward_ad.unpack_dual(run(dual)[1]).tangent
        jacobian = func.jacrev(lambda logits, run=run: run(logits)[1])(logits)
        traced = torch.jit.trace(run, (logits,), check_trace=False)(logits.flip(0))
        found.append((tangent, jacobian, func.vmap(run)(logits[:, None]), traced))
    assert_equal(*found)


def test_what_decides_is_asked_only_in_eager(monkeypatch):
    """torch.compile keeps its own rules: nothing of this is traced."""
    from moe_patch.ops import differentiable

    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    with forward_ad.dual_level():
        assert differentiable.why_not_kernels() is None
        assert not differentiable.wanted(torch.ones(1))
