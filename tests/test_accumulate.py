"""The second gradient of a weight is added to .grad where it is computed, and nobody can tell."""

from __future__ import annotations

import pytest
import torch
from ops import BOUND, assert_close, in_double, moe
from torch.utils.checkpoint import checkpoint

from moe_patch import accumulate, reference
from moe_patch.experts import expert_order, fused_experts, grouped_gemm

WEIGHTS = "gate_up_proj", "down_proj"
SIZES = (14, 32, 16, 5, 2)
CASES = [torch.float32, torch.float16, pytest.param(torch.bfloat16, marks=pytest.mark.gpu)]


@pytest.fixture
def made(monkeypatch):
    """Whether a gradient was made (True) or added to (False), one entry a weight and backward."""
    found, original = [], accumulate.target

    def target(weight, leaf):
        out, add = original(weight, leaf)
        found.append(not add)
        return out, add

    monkeypatch.setattr("moe_patch.experts.target", target)
    return found


def arguments(device, dtype=torch.float32, stored_transposed=False):
    """Of fused_experts, its weights Parameters, or views of Parameters stored as Llama4's."""
    found = moe(device, dtype, *SIZES, grad=False)
    found["top_k_index"][found["top_k_index"] == 3] = 2  # an expert without rows
    parameters = {}
    for name in WEIGHTS:
        weight = found[name]
        if stored_transposed:
            weight = weight.transpose(1, 2).contiguous()
        parameters[name] = torch.nn.Parameter(weight)
        found[name] = parameters[name]
    return found, parameters


def call(found, stored_transposed=False, function=fused_experts):
    if stored_transposed:
        found = found | {name: found[name].transpose(1, 2) for name in WEIGHTS}
    return function(**found)


@pytest.mark.parametrize("stored_transposed", (False, True))
@pytest.mark.parametrize("dtype", CASES, ids=str)
def test_steps_add_up_in_place(device, made, dtype, stored_transposed):
    found, parameters = arguments(device, dtype, stored_transposed)
    exact = {name: found[name].detach().double().requires_grad_() for name in WEIGHTS}
    places = []
    for _ in range(3):
        found["hidden_states"] = torch.randn_like(found["hidden_states"])
        call(found, stored_transposed).sum().backward()
        call(in_double(found) | exact, stored_transposed, reference.fused_experts).sum().backward()
        places.append([p.grad.data_ptr() for p in parameters.values()])
    assert places[0] == places[1] == places[2]
    assert made == [True] * 2 + [False] * 4
    for name, parameter in parameters.items():
        grad, truth = parameter.grad, exact[name].grad
        assert grad.dtype == dtype and grad.stride() == parameter.stride()
        assert not grad[3].any()
        bound = 3**0.5 * BOUND[dtype]  # rounded three times
        assert (grad.double() - truth).norm() <= bound * truth.norm(), name


def test_an_asked_for_gradient_is_not_added(device, made):
    found, parameters = arguments(device)
    call(found).sum().backward()
    kept = {name: p.grad.clone() for name, p in parameters.items()}
    grads = torch.autograd.grad(call(found).sum(), list(parameters.values()))
    for (name, parameter), grad in zip(parameters.items(), grads):
        assert torch.equal(parameter.grad, kept[name]) and torch.equal(grad, kept[name])
    found["hidden_states"].requires_grad_()
    call(found).sum().backward(inputs=[found["hidden_states"], parameters["down_proj"]])
    assert torch.equal(parameters["gate_up_proj"].grad, kept["gate_up_proj"])
    assert torch.equal(parameters["down_proj"].grad, 2 * kept["down_proj"])


@pytest.mark.parametrize("hook", ("tensor", "after"))
def test_hooks_see_the_gradient(device, made, hook):
    found, parameters = arguments(device)
    call(found).sum().backward()
    first = {name: p.grad.clone() for name, p in parameters.items()}
    seen = []
    for parameter in parameters.values():
        if hook == "tensor":
            parameter.register_hook(lambda grad: seen.append(grad) or 3 * grad)
        else:
            parameter.register_post_accumulate_grad_hook(seen.append)
    call(found).sum().backward()
    assert len(seen) == 2 and made == [True] * 4
    for name, parameter in parameters.items():
        assert torch.allclose(parameter.grad, (4 if hook == "tensor" else 2) * first[name])


def test_a_hook_on_the_accumulating_node_still_runs(device, made):
    """As DistributedDataParallel's and DeepSpeed's."""
    found, parameters = arguments(device)
    ready = []
    nodes = [torch.autograd.graph.get_gradient_edge(p).node for p in parameters.values()]
    for node in nodes:
        node.register_hook(lambda *gradients: ready.append(gradients))
    for _ in range(2):
        call(found).sum().backward()
    assert len(ready) == 4 and made == [True] * 2 + [False] * 2


def test_twice_through_one_graph_and_weights_used_twice(device):
    found, parameters = arguments(device)
    out = call(found)
    out.sum().backward(retain_graph=True)
    first = {name: p.grad.clone() for name, p in parameters.items()}
    out.sum().backward()
    (call(found) + call(found)).sum().backward()
    for name, parameter in parameters.items():
        assert torch.allclose(parameter.grad, 4 * first[name], rtol=1e-5)


@pytest.mark.parametrize("use_reentrant", (True, False))
def test_under_checkpointing(device, made, use_reentrant):
    found, parameters = arguments(device)
    found["hidden_states"].requires_grad_()
    for _ in range(2):
        checkpoint(fused_experts, *found.values(), use_reentrant=use_reentrant).sum().backward()
    # the reentrant mode runs on copies of what it is given, Parameters too
    assert made == [True] * 2 + [use_reentrant] * 2
    fresh, again = arguments(device)
    call(fresh).sum().backward()
    for name in WEIGHTS:
        assert torch.equal(parameters[name].grad, 2 * again[name].grad)


@pytest.mark.skipif(not hasattr(torch.Tensor, "grad_dtype"), reason="new in torch 2.10")
@pytest.mark.parametrize("stored_transposed", (False, True))
def test_float32_gradients_of_half_weights(device, made, stored_transposed):
    """They are never rounded to the weights' dtype."""
    found, parameters = arguments(device, torch.float16, stored_transposed)
    for parameter in parameters.values():
        parameter.grad_dtype = torch.float32
    exact = {name: found[name].detach().double().requires_grad_() for name in WEIGHTS}
    steps = 3
    for _ in range(steps):
        call(found, stored_transposed).sum().backward()
        call(in_double(found) | exact, stored_transposed, reference.fused_experts).sum().backward()
    assert made == [True] * 2 + [False] * 2 * (steps - 1)
    for name, parameter in parameters.items():
        assert parameter.grad.dtype == torch.float32
        assert_close(parameter.grad, exact[name].grad, torch.float16, name)


def test_what_is_no_parameter_gets_a_gradient_of_its_own(device, made):
    """As weights under an adapter, a cast or a slice: their gradient flows on."""
    found, parameters = arguments(device)
    expected, others = arguments(device)
    call(expected).sum().backward()
    for _ in range(2):
        view = {name: parameters[name] * 1.0 for name in WEIGHTS}
        call(found | view).sum().backward()
    part = {name: parameters[name][:] for name in WEIGHTS}
    call(found | part).sum().backward()
    assert made == [True] * 8
    for name in WEIGHTS:
        assert torch.allclose(parameters[name].grad, 3 * others[name].grad, rtol=1e-5)


def test_grad_scaler(device):
    """fp16 steps: a step whose gradients overflow is skipped, and the next one is taken."""
    found, parameters = arguments(device, torch.float16)
    masters = {name: p.detach().float().requires_grad_() for name, p in parameters.items()}
    optimizer = torch.optim.SGD(masters.values(), lr=0.1)
    scaler = torch.amp.GradScaler(device.type, init_scale=2.0**24, backoff_factor=2.0**-16)
    before, taken = {n: m.detach().clone() for n, m in masters.items()}, []
    for _ in range(3):
        optimizer.zero_grad()
        weights = {name: master.half() for name, master in masters.items()}
        loss = fused_experts(**found | weights).float().square().mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        taken.append(any(not torch.equal(masters[n], before[n]) for n in masters))
    assert taken == [False, True, True] and scaler.get_scale() == 2.0**8


@pytest.mark.parametrize("frozen", (False, True))
@pytest.mark.parametrize("stored_transposed", (False, True))
def test_the_parameters_themselves_are_kept(device, stored_transposed, frozen):
    """ZeRO-3 empties a parameter after its forward: a view would keep what it held alive."""
    found, parameters = arguments(device, stored_transposed=stored_transposed)
    for parameter in parameters.values():
        parameter.requires_grad_(not frozen)
    found["hidden_states"].requires_grad_()

    def one_projection(hidden_states, gate_up_proj, top_k_index, **_):
        order = expert_order(top_k_index, len(gate_up_proj), hidden_states.dtype)
        return grouped_gemm(hidden_states, gate_up_proj, order, gather=True)

    for function, count in ((fused_experts, 2), (one_projection, 1)):
        kept = []
        with torch.autograd.graph.saved_tensors_hooks(
            lambda tensor, kept=kept: kept.append(tensor) or tensor, lambda tensor: tensor
        ):
            out = call(found, stored_transposed, function)
        weights = [tensor for tensor in kept if tensor.dim() == 3]
        assert len(weights) == count
        assert all(any(tensor is p for p in parameters.values()) for tensor in weights)
        out.sum().backward()
