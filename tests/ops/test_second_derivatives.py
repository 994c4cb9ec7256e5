"""Gradients of gradients: create_graph=True, hessians, gradient penalties, vmapped backwards."""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch
from ops import in_double, in_fp8, moe
from tiny import assert_close, both_families, tiny_block, tiny_model, tokens
from torch import nn
from torch.autograd import forward_ad
from torch.autograd.functional import hessian, jacobian
from torch.utils.checkpoint import checkpoint
from transformers import AutoModelForCausalLM, GptOssConfig

import moe_patch
from moe_patch import reference
from moe_patch.activation import Activation
from moe_patch.ops import expert_order, fused_experts, grouped_gemm
from moe_patch.ops.grouped import add_bias
from moe_patch.ops.routing import select_experts

SIZE = (7, 32, 16, 5, 2)
EAGER = {"attn_implementation": "eager", "experts_implementation": "eager"}


def near(ours, truth):
    """Equal up to the roundings of float32 sums, and not zero."""
    scale = float(truth.detach().abs().max())
    assert scale > 0
    torch.testing.assert_close(ours, truth.to(ours.dtype), rtol=2e-4, atol=2e-5 * scale)


def second_order(function, leaves):
    """The first gradients, and those of their product with random directions, d_out's too."""
    draw = torch.Generator().manual_seed(3)

    def random(like):
        return torch.randn(like.shape, generator=draw).to(like)

    out = function()
    d_out = random(out).requires_grad_()
    first = torch.autograd.grad(out, leaves, d_out, create_graph=True)
    product = sum((grad * random(grad)).sum() for grad in first)
    return *first, *torch.autograd.grad(product, [*leaves, d_out], materialize_grads=True)


def both(function, twin, arguments):
    """second_order of the function in float32 and of its twin in float64, and that they agree."""
    exact = in_double(arguments)
    found = []
    for each, given in ((function, arguments), (twin, exact)):
        leaves = [t for t in given.values() if torch.is_tensor(t) and t.requires_grad]
        found.append(second_order(partial(each, **given), leaves))
    for mine, other in zip(*found, strict=True):
        if other.any():
            near(mine, other)
        else:
            assert not mine.any()


CASES = {
    "plain": {},
    "transposed": {"transposed": True},
    "sentinels": {"routing": "sentinel"},
    "twice in a token": {"routing": "repeat"},
    "biases": {"biased": True},
    **{
        str(act): {"act": act, "biased": act.form != "concatenated"}
        for act in (
            Activation("silu", 7.0, 1.702, 1.0, "interleaved"),
            Activation("gelu"),
            Activation("gelu_tanh"),
            Activation("relu2", form="ungated"),
        )
    },
}


@pytest.mark.parametrize("case", CASES)
def test_fused_experts(device, case):
    arguments = moe(device, torch.float32, *SIZE, **CASES[case])
    more = {"activation": CASES[case]["act"]} if "act" in CASES[case] else {}
    both(partial(fused_experts, **more), partial(reference.fused_experts, **more), arguments)


@pytest.mark.parametrize("routing", ("random", "sentinel"))
def test_weights_on_the_input(device, routing):
    arguments = moe(device, torch.float32, *SIZE, transposed=True, routing=routing)
    on = {"weight_on": "input"}
    both(partial(fused_experts, **on), partial(reference.fused_experts, **on), arguments)


@pytest.mark.parametrize("weight_on", ("input", "output"))
def test_low_rank_updates(device, weight_on):
    arguments = moe(device, torch.float32, *SIZE)
    _, hidden, inner, experts, _ = SIZE
    for name, (n, k) in {"gate_up": (2 * inner, hidden), "down": (hidden, inner)}.items():
        for side, shape in {"a": (experts, 3, k), "b": (experts, n, 3)}.items():
            low = torch.randn(shape, device=device) * 0.3
            arguments[f"{name}_{side}"] = low.requires_grad_()

    def on(function, gate_up_a, gate_up_b, down_a, down_b, **given):
        low = {"gate_up_low_rank": (gate_up_a, gate_up_b), "down_low_rank": (down_a, down_b)}
        return function(**given, **low, weight_on=weight_on)

    both(partial(on, fused_experts), partial(on, reference.fused_experts), arguments)


def test_weights_computed_from_hidden_states(device):
    """Their gradients are partial: what comes through top_k_weights is counted once."""
    arguments = moe(device, torch.float32, *SIZE)
    hidden = arguments["hidden_states"]

    def on(function, hidden_states, top_k_weights, **given):
        weights = top_k_weights * hidden_states.square().mean(1, keepdim=True)
        return function(hidden_states=hidden_states, top_k_weights=weights, **given)

    both(partial(on, fused_experts), partial(on, reference.fused_experts), arguments)
    assert hidden.grad is None


@pytest.mark.parametrize("how", ("plain", "gather", "scatter"))
def test_grouped_gemm_and_bias(device, how):
    tokens, hidden, inner, experts, top_k = SIZE
    index = moe(device, torch.float32, *SIZE, routing="sentinel")["top_k_index"]
    rows = tokens if how == "gather" else tokens * top_k
    arguments = {
        "x": torch.randn(rows, hidden, device=device, requires_grad=True),
        "weight": torch.randn(experts, inner, hidden, device=device, requires_grad=True),
        "bias": torch.randn(experts, inner, device=device, requires_grad=True),
    }
    order = expert_order(index, experts, torch.float32)
    dropped = ((index < 0) | (index >= experts)).reshape(-1, 1)
    scattered = how == "scatter"
    dropped = dropped if scattered else dropped[order.row_to_slot.long()]

    def on(gemm, add, x, weight, bias):
        out = gemm(x, weight, order, gather=how == "gather", scatter=scattered)
        # squared: of linear functions alone, hardly a second derivative is left
        return add(out, bias, index, order, scattered=scattered).masked_fill(dropped, 0).square()

    ours, twin = (grouped_gemm, add_bias), (reference.grouped_gemm, reference.add_bias)
    both(partial(on, *ours), partial(on, *twin), arguments)


@pytest.mark.parametrize(
    "options",
    (
        {},
        {"renormalize": True},
        {"score": "sigmoid", "scale": 2.5},
        {"score": "sigmoid", "renormalize": True, "eps": 1e-3},
    ),
    ids=str,
)
def test_select_experts(device, options):
    logits = torch.randn(6, 8, device=device, requires_grad=True)

    def on(function, logits):
        return function(logits, 3, **options)[1]

    both(partial(on, select_experts), partial(on, reference.select_experts), {"logits": logits})


def test_half_precision_too(device):
    """In the inputs' dtypes, within their roundings."""
    arguments = moe(device, torch.float16, *SIZE, biased=True)
    leaves = [t for t in arguments.values() if t.requires_grad]
    ours = second_order(partial(fused_experts, **arguments), leaves)
    exact = in_double(arguments)
    truth = second_order(
        partial(reference.fused_experts, **exact), [t for t in exact.values() if t.requires_grad]
    )
    for mine, other in zip(ours, truth):
        assert mine.dtype == torch.float16
        assert (mine.double() - other).norm() < 0.02 * other.norm()


def pair(model):
    """(the model, its patched copy)."""
    patched = copy.deepcopy(model)
    assert moe_patch.patch(patched).fused
    return model, patched


def product_with_hessian(model, ids):
    """(the gradients, the hessian's product with one direction) of every parameter."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    draw = torch.Generator().manual_seed(7)
    loss = model(ids, labels=ids).loss
    first = torch.autograd.grad(loss, parameters, create_graph=True)
    direction = [torch.randn(p.shape, generator=draw).to(p) for p in parameters]
    dot = sum((grad * v).sum() for grad, v in zip(first, direction))
    return first, torch.autograd.grad(dot, parameters)


def assert_same_products(model, ids):
    theirs, ours = (product_with_hessian(each, ids) for each in pair(model))
    for order in range(2):
        for mine, other in zip(ours[order], theirs[order], strict=True):
            near(mine, other)


@both_families
def test_hessian_vector_products_of_models(family, device):
    assert_same_products(tiny_model(family, device, **EAGER), tokens(device))


@both_families
def test_frozen_experts(family, device):
    model = tiny_model(family, device, **EAGER)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("experts" not in name)
    assert_same_products(model, tokens(device))


def gpt_oss(device, **changes):
    config = GptOssConfig(
        hidden_size=64, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, head_dim=32, num_local_experts=4, num_experts_per_tok=2,
        vocab_size=128, **EAGER, **changes,
    )  # fmt: skip
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).to(device).eval()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.2)
    return model


def test_experts_with_biases(device, ran):
    assert_same_products(gpt_oss(device), tokens(device))
    assert set(ran) == {"fused_experts"}


def test_experts_that_run_by_parts(device, ran):
    model = tiny_model("qwen3_moe", device, **EAGER)
    for module in model.modules():
        if hasattr(module, "act_fn") and hasattr(module, "gate_up_proj"):
            module.act_fn = nn.Tanh()
    assert_same_products(model, tokens(device))
    assert set(ran) == {"by_parts"}


@both_families
def test_adapters(family, device):
    from peft import LoraConfig, get_peft_model

    block = "mlp" if family == "qwen3_moe" else "feed_forward"
    names = [f"{block}.experts.gate_up_proj", f"{block}.experts.down_proj"]
    config = LoraConfig(
        r=2, target_parameters=names, target_modules=[], lora_dropout=0.0, init_lora_weights=False
    )
    assert_same_products(
        get_peft_model(tiny_model(family, device, **EAGER), config), tokens(device)
    )


@both_families
def test_hessian_of_a_block(family, device):
    block, x = tiny_block(family, device, hidden_size=16), torch.randn(1, 2, 16, device=device)
    found = []
    for each in pair(block):

        def loss(x, each=each):
            out = each(x)
            return (out[0] if isinstance(out, tuple) else out).square().sum()

        found.append(hessian(loss, x))
    near(found[1], found[0])


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True")
@both_families
def test_gradient_penalty_with_a_gradient_there(family, device):
    """backward(create_graph=True) adds to .grad what can be differentiated."""
    found = []
    for model in pair(tiny_model(family, device, **EAGER)):
        ids = tokens(device)
        model(ids, labels=ids).loss.backward()
        model(ids, labels=ids).loss.backward(create_graph=True)
        grads = [p.grad for p in model.parameters()]
        assert all(grad.requires_grad for grad in grads)
        penalty = sum(grad.square().sum() for grad in grads)
        found.append((penalty, *torch.autograd.grad(penalty, list(model.parameters()))))
        model.zero_grad()
    for theirs, ours in zip(*found):
        near(ours, theirs)


@pytest.mark.parametrize("use_reentrant", (True, False))
def test_checkpointed_twice(device, use_reentrant):
    """First derivatives in both modes; second ones where torch has them."""
    arguments = moe(device, torch.float32, *SIZE)
    leaves = [t for t in arguments.values() if t.requires_grad]

    def run():
        return checkpoint(fused_experts, *arguments.values(), use_reentrant=use_reentrant)

    run().square().sum().backward()
    expected = torch.autograd.grad(fused_experts(**arguments).square().sum(), leaves)
    for leaf, grad in zip(leaves, expected):
        assert torch.equal(leaf.grad, grad)
    if not use_reentrant:
        for ours, same in zip(
            second_order(run, leaves), second_order(partial(fused_experts, **arguments), leaves)
        ):
            torch.testing.assert_close(ours, same)


@both_families
def test_many_gradients_at_once(family, device):
    """is_grads_batched=True, and what is built on it."""
    x = torch.randn(1, 3, 64, device=device, requires_grad=True)
    found = []
    for each in pair(tiny_block(family, device)):
        out = each(x)
        out = out[0] if isinstance(out, tuple) else out
        seeds = torch.eye(out.numel(), device=device)[:5].view(5, *out.shape)
        leaves = [x, *each.parameters()]
        batched = torch.autograd.grad(
            out, leaves, seeds, is_grads_batched=True, materialize_grads=True
        )

        def function(x, each=each):
            out = each(x)
            return out[0] if isinstance(out, tuple) else out

        found.append((*batched, jacobian(function, x, vectorize=True)))
    for theirs, ours in zip(*found, strict=True):
        near(ours, theirs)


def test_tangents_of_a_backward(device):
    """Forward-mode AD of a vector-Jacobian product whose graph was built outside."""
    act = Activation("relu2", form="ungated")  # torch's silu_backward has no tangents
    arguments = moe(device, torch.float32, *SIZE, act=act) | {"activation": act}
    leaves = [t for t in arguments.values() if torch.is_tensor(t) and t.requires_grad]
    v, t = torch.randn(2, SIZE[0], SIZE[1], device=device)
    found = []
    for function in (fused_experts, reference.fused_experts):
        out = function(**arguments)
        with forward_ad.dual_level():
            grads = torch.autograd.grad(out, leaves, forward_ad.make_dual(v, t))
            found.append([forward_ad.unpack_dual(grad).tangent for grad in grads])
    for ours, theirs in zip(*found):
        assert_close(ours, theirs)


@pytest.mark.parametrize("how", ("grad", "backward", "batched"))
def test_fp8_weights_are_refused(device, how):
    arguments = in_fp8(moe(device, torch.float32, 5, 128, 128, 4, 2))
    hidden = arguments["hidden_states"]
    out = fused_experts(**arguments)
    with pytest.raises(RuntimeError, match="moe_patch computes first gradients alone.*FP8"):
        if how == "grad":
            torch.autograd.grad(out.sum(), hidden, create_graph=True)
        elif how == "backward":
            out.sum().backward(create_graph=True)
        else:
            many = torch.ones(2, *out.shape, device=device)
            torch.autograd.grad(out, hidden, many, is_grads_batched=True)


def test_nothing_as_large_as_all_experts_is_made_for_each(device):
    """An indexed expert's gradient would be zeros for all the others, E times."""
    from torch.utils._python_dispatch import TorchDispatchMode

    arguments = moe(device, torch.float32, 4, 32, 16, 24, 2)
    made = []

    class Large(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            out = function(*args, **kwargs or {})
            shape = tuple(getattr(out, "shape", ()))
            if shape in ((24, 32, 32), (24, 32, 16)):
                made.append(str(function))
            return out

    leaves = [t for t in arguments.values() if t.requires_grad]
    out = fused_experts(**arguments)
    with Large():
        torch.autograd.grad(out.sum(), leaves, create_graph=True)
    assert 0 < len(made) < 24, made
