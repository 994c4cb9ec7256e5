"""The second gradient of a weight is added to .grad where it is computed, and nobody can tell."""

from __future__ import annotations

import types
from dataclasses import replace

import pytest
import torch
from ops import BOUND, assert_close, in_double, moe, rehearses
from torch.utils.checkpoint import checkpoint

from moe_patch import reference
from moe_patch.ops import accumulate, expert_order, fused_experts, grouped_gemm

WEIGHTS = "gate_up_proj", "down_proj"
SIZES = (14, 32, 16, 5, 2)
CASES = [torch.float32, torch.float16, pytest.param(torch.bfloat16, marks=pytest.mark.gpu)]


@pytest.fixture
def made(monkeypatch):
    """Whether a gradient was made (True) or added to (False), one entry a weight and backward."""
    found, original = [], accumulate.gradient

    def gradient(*arguments):
        out = original(*arguments)
        if not rehearses():
            found.append(out is not None)
        return out

    monkeypatch.setattr("moe_patch.ops.backward.gradient", gradient)
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


@pytest.mark.parametrize("kind", ("before", "after"))
def test_hooks_on_the_accumulating_node_see_the_gradient(device, made, kind):
    """DeepSpeed's come after; one that comes before may change the gradient."""
    found, parameters = arguments(device)
    call(found).sum().backward()
    first = [p.grad.clone() for p in parameters.values()]
    seen = []
    nodes = [torch.autograd.graph.get_gradient_edge(p).node for p in parameters.values()]
    for node in nodes:
        if kind == "before":
            node.register_prehook(lambda grads: seen.append(grads[0]) or (10 * grads[0],))
        else:
            node.register_hook(lambda _, grads: seen.append(grads[0]))
    call(found).sum().backward()
    assert len(seen) == 2 and made == [True] * 4
    for grad in first:
        assert any(torch.equal(grad, other) for other in seen)
    for parameter, grad in zip(parameters.values(), first):
        torch.testing.assert_close(parameter.grad, (11 if kind == "before" else 2) * grad)


def test_a_hook_that_was_removed_is_none(device, made):
    found, parameters = arguments(device)
    call(found).sum().backward()
    nodes = [torch.autograd.graph.get_gradient_edge(p).node for p in parameters.values()]
    for node in nodes:
        node.register_prehook(lambda grads: None).remove()
        node.register_hook(lambda *_: None).remove()
    for _ in range(2):
        call(found).sum().backward()
    assert made == [True] * 2 + [False] * 4


@pytest.mark.parametrize("how", ("hook", "retain", "later"))
def test_the_transpose_of_a_parameter_is_watched_too(device, made, how):
    """Its own hooks and its own .grad, asked for before the forward or after."""
    found, parameters = arguments(device, stored_transposed=True)
    call(found, True).sum().backward()
    first = {name: p.grad.clone() for name, p in parameters.items()}
    weights = {name: found[name].transpose(1, 2) for name in WEIGHTS}
    seen = []

    def watch():
        for weight in weights.values():
            weight.retain_grad() if how == "retain" else weight.register_hook(
                lambda grad: seen.append(grad) or 3 * grad
            )

    if how != "later":
        watch()
    out = fused_experts(**found | weights)
    if how == "later":
        watch()
    out.sum().backward()
    assert made == [True] * 4
    for name, parameter in parameters.items():
        torch.testing.assert_close(parameter.grad, first[name] * (2 if how == "retain" else 4))
        if how == "retain":
            torch.testing.assert_close(weights[name].grad, first[name].transpose(1, 2))


class Tripled(torch.autograd.Function):
    """A transpose whose gradient is not just the transpose."""

    @staticmethod
    def forward(ctx, x):
        return x.transpose(1, 2)

    @staticmethod
    def backward(ctx, grad):
        return 3 * grad.transpose(1, 2)


def test_a_view_with_a_gradient_of_its_own(device, made):
    found, parameters = arguments(device, stored_transposed=True)
    call(found, True).sum().backward()
    first = {name: p.grad.clone() for name, p in parameters.items()}
    fused_experts(**found | {name: Tripled.apply(found[name]) for name in WEIGHTS}).sum().backward()
    with torch.no_grad():
        leaves = {name: found[name].transpose(1, 2) for name in WEIGHTS}
    for leaf in leaves.values():
        leaf.requires_grad_()
    fused_experts(**found | leaves).sum().backward()
    assert made == [True] * 6
    for name, parameter in parameters.items():
        torch.testing.assert_close(parameter.grad, 4 * first[name])
        torch.testing.assert_close(leaves[name].grad, first[name].transpose(1, 2))


def test_a_saved_grad_that_changes_is_noticed(device, made):
    found, parameters = arguments(device)
    call(found).sum().backward()
    grads = [p.grad for p in parameters.values()]
    scale = torch.ones((), device=device, requires_grad=True)
    products = [scale * grad for grad in grads]
    versions = [grad._version for grad in grads]
    call(found).sum().backward()
    assert made == [True] * 2 + [False] * 2
    for product, parameter, grad, version in zip(
        products, parameters.values(), grads, versions, strict=True
    ):
        assert parameter.grad is grad and grad._version > version
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            product.sum().backward()


@pytest.mark.parametrize("change", ("none", "other"))
def test_a_grad_that_changes_before_its_turn(device, made, change):
    """Weights of two layers: a hook between the two backwards takes .grad away, or puts another."""
    found, parameters = arguments(device)
    expected, _ = arguments(device)
    first = {name: torch.randn_like(p) for name, p in parameters.items()}
    other = {name: torch.randn_like(p).mT.contiguous().mT for name, p in parameters.items()}
    for name, parameter in parameters.items():
        parameter.grad = first[name].clone()

    def step(found, function, hook=None):
        found["hidden_states"] = found["hidden_states"].detach().requires_grad_()
        inner = function(**found)
        if hook:
            inner.register_hook(hook)
        function(**found | {"hidden_states": inner}).sum().backward()

    def hook(_):
        for name, parameter in parameters.items():
            parameter.grad = None if change == "none" else other[name].clone()

    step(found, fused_experts, hook)
    step(expected, reference.fused_experts)
    assert made[-4:] == [False] * 2 + [True] * 2
    for name, parameter in parameters.items():
        before = 0 if change == "none" else other[name]
        torch.testing.assert_close(parameter.grad, before + expected[name].grad)


class Between(torch.autograd.Function):
    """Takes weights, gives them no gradient, and calls a function in its backward."""

    @staticmethod
    def forward(ctx, function, x, *weights):
        ctx.function = function
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        ctx.function()
        return None, grad, None, None


@pytest.mark.parametrize("change", ("none", "other"))
def test_a_grad_that_changes_and_no_other_gradient_comes(device, made, change):
    """The weights' other use has none: what was to be added is the whole gradient."""
    found, parameters = arguments(device)
    found["hidden_states"].requires_grad_()
    call(found).sum().backward()
    first = {name: p.grad for name, p in parameters.items()}
    kept = {name: grad.clone() for name, grad in first.items()}
    other = {name: torch.randn_like(p).mT.contiguous().mT for name, p in parameters.items()}

    def put():
        for name, parameter in parameters.items():
            parameter.grad = None if change == "none" else other[name].clone()

    inner = Between.apply(put, found["hidden_states"], *parameters.values())
    call(found | {"hidden_states": inner}).sum().backward()
    assert made == [True] * 2 + [False] * 2
    for name, parameter in parameters.items():
        assert torch.equal(first[name], kept[name])
        before = 0 if change == "none" else other[name]
        torch.testing.assert_close(parameter.grad, before + kept[name])


def test_a_sparse_grad_becomes_dense(device, made):
    found, parameters = arguments(device)
    call(found).sum().backward()
    first = {name: p.grad for name, p in parameters.items()}
    for parameter in parameters.values():
        parameter.grad = parameter.grad.to_sparse()
    call(found).sum().backward()
    assert made == [True] * 4
    for name, parameter in parameters.items():
        torch.testing.assert_close(parameter.grad, 2 * first[name])


class Seen(torch.Tensor):
    """Counts what torch does to it."""

    done: dict[str, int] = {}

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        cls.done[str(function)] = cls.done.get(str(function), 0) + 1
        with torch._C._DisableTorchDispatch():
            return function(*args, **kwargs or {})


def test_a_grad_of_another_class_sees_the_addition(device, made):
    """A class of tensors may do more than add, as FSDP's does."""
    found, parameters = arguments(device)
    call(found).sum().backward()
    first = {name: p.grad.clone() for name, p in parameters.items()}
    for parameter in parameters.values():
        parameter.grad = parameter.grad.as_subclass(Seen)
    Seen.done.clear()
    call(found).sum().backward()
    assert made == [True] * 4 and Seen.done["aten.add_.Tensor"] == 2
    for name, parameter in parameters.items():
        total = parameter.grad.as_subclass(torch.Tensor)
        torch.testing.assert_close(total, 2 * first[name])


def test_one_number_in_the_place_of_a_grad_is_refused(device, made):
    """Autograd refuses: it would write a whole gradient to one number."""
    found, parameters = arguments(device)
    for parameter in parameters.values():
        parameter.grad = torch.zeros((), device=device).expand(parameter.shape)
    with pytest.raises(RuntimeError, match="refers to a single memory location"):
        call(found).sum().backward()
    assert not any(p.grad.any() for p in parameters.values())


def test_a_backward_that_fails_leaves_nothing(device, made):
    """The next one adds its own gradient alone."""
    found, parameters = arguments(device)
    found["hidden_states"].requires_grad_()
    call(found).sum().backward()
    first = {name: p.grad.clone() for name, p in parameters.items()}
    nodes = [torch.autograd.graph.get_gradient_edge(p).node for p in parameters.values()]

    def fail(_):
        raise ZeroDivisionError

    inner = call(found)
    handle = inner.register_hook(fail)
    out = call(found | {"hidden_states": inner})
    with pytest.raises(ZeroDivisionError):
        out.sum().backward(retain_graph=True)
    for name, parameter in parameters.items():
        assert torch.equal(parameter.grad, first[name])
    handle.remove()
    call(found).sum().backward()
    for name, parameter in parameters.items():
        torch.testing.assert_close(parameter.grad, 2 * first[name])
    assert len(nodes) == 2


def test_anomaly_mode_sees_the_gradient(device, made):
    found, _ = arguments(device)
    for _ in range(2):
        with torch.autograd.detect_anomaly(check_nan=True):
            call(found).sum().backward()
    assert made == [True] * 4


@pytest.mark.gpu
def test_two_streams_and_one_backward(device):
    """Both forwards' streams write to .grad, in turn, and the caller reads it at once."""
    found = moe(device, torch.bfloat16, 4096, 1024, 512, 16, 4, grad=False)
    parameters = [torch.nn.Parameter(found[name]) for name in WEIGHTS]
    found |= dict(zip(WEIGHTS, parameters))
    batches = [torch.randn_like(found["hidden_states"]) for _ in range(2)]
    for batch in batches:
        fused_experts(**found | {"hidden_states": batch}).float().sum().backward()
    expected = [p.grad.clone() for p in parameters]
    streams = [torch.cuda.Stream() for _ in batches]
    torch.cuda.synchronize()
    for attempt in range(50):
        for parameter in parameters:
            parameter.grad.zero_()
        losses = []
        for stream, batch in zip(streams, batches):
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                if attempt % 2:
                    torch.cuda._sleep(2_000_000)
                losses.append(fused_experts(**found | {"hidden_states": batch}).float().sum())
        for stream in streams:
            torch.cuda.current_stream().wait_stream(stream)
        sum(losses).backward()
        read = [p.grad.clone() for p in parameters]  # on the caller's stream, without waiting
        for mine, truth in zip(read, expected):
            error = (mine.double() - truth.double()).norm() / truth.double().norm()
            assert error < 0.01, (attempt, float(error))


@pytest.mark.gpu
@pytest.mark.parametrize("early", (False, True))
def test_a_side_stream_s_gradient_is_read_at_once(device, made, early):
    """The default stream has nothing to do and reads .grad after the backward. `early`: the node
    that accumulates was made on the default stream, before."""
    found = moe(device, torch.bfloat16, 4096, 1024, 512, 16, 4, grad=False)
    parameters = [torch.nn.Parameter(found[name]) for name in WEIGHTS]
    found |= dict(zip(WEIGHTS, parameters))
    fused_experts(**found).float().sum().backward()
    expected = [p.grad.clone() for p in parameters]
    side = torch.cuda.Stream()
    nodes = []
    if early:
        nodes = [torch.autograd.graph.get_gradient_edge(p).node for p in parameters]
    for attempt in range(50):
        for parameter in parameters:
            parameter.grad.zero_()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            torch.cuda._sleep(5_000_000)
            loss = fused_experts(**found).float().sum()
        loss.backward()  # from the default stream, which does not wait for the forward
        read = [p.grad.clone() for p in parameters]
        for mine, truth in zip(read, expected):
            assert torch.equal(mine, truth), attempt
    assert made == [True] * 2 + [False] * 100 and len(nodes) == 2 * early


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


def test_a_product_on_another_stream_counts_its_turns_apart():
    kept = []
    tensor = types.SimpleNamespace(record_stream=kept.append)
    order = reference.sort_tokens(torch.tensor([[0, 1]]), 2, 16)
    given = accumulate.Product(tensor, tensor, replace(order, row_to_slot=tensor), top_k=2)
    other = given.on("stream")
    assert kept == ["stream"] * 3
    assert other.order.taken.data_ptr() != order.taken.data_ptr()
    assert other == replace(given, order=other.order)
