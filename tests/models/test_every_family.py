"""A tiny model of every family whose experts are fused, from its own config class, patched."""

from __future__ import annotations

import copy

import pytest
import torch
from families import FAMILIES, UNFUSED, build

import moe_patch
from moe_patch.recognise.parts import up_name

NOT_GENERATING = {"granitemoehybrid", "jamba"}  # not with two layers, none of them attention
INPUTS = {"ernie4_5_vl_moe": {"moe_mm_token_type_ids": torch.arange(14).view(2, 7) % 2}}  # images
SMOOTH = {  # of steps in a function one near-tie decides a gradient
    "phimoe": {"router_jitter_noise": 1.0},  # no expert is left out of a softmax
    "step3p7": {"swiglu_limits": [None, 7.0]},  # no value is clamped
}
ONE_DTYPE = {"deepseek_v4"}  # loaded in two, transformers 5.17 cannot multiply them
CANCELLED = {  # gradients that a norm takes away but for roundings: Hugging Face's own are as far
    "hy_v4_vl": "hc_head.",  # from float64's as ours
}
every_family = pytest.mark.parametrize("family", [f for f in FAMILIES if f not in UNFUSED])


def step(model, family, ids):
    """Logits, and {name: gradient}."""
    model.zero_grad()
    more = {name: value.to(ids.device) for name, value in INPUTS.get(family, {}).items()}
    out = model(ids, use_cache=False, **more)[0]
    (out * torch.linspace(-1, 1, out.numel(), device=ids.device).view_as(out)).mean().backward()
    return out.detach(), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def generate(model, family, ids):
    if not model.can_generate() or family in NOT_GENERATING:
        return ids
    return model.generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=3
    )


@every_family
def test_patched_as_unpatched(family, device, ran):
    model = build(family, device)
    ids = torch.randint(2, 90, (2, 7), device=device)
    expected, expected_grads = step(model, family, ids)
    tokens = generate(model, family, ids)
    report = moe_patch.patch(model)
    assert report.fused and not report.skipped, report
    assert not ran
    out, grads = step(model, family, ids)
    assert len(ran) >= len(report.fused)
    torch.testing.assert_close(out, expected, rtol=2e-5, atol=2e-5 * float(expected.abs().max()))
    assert grads.keys() == expected_grads.keys()
    for name, grad in expected_grads.items():
        floor = 4e-9 if family in CANCELLED and name.startswith(CANCELLED[family]) else 1e-9
        atol = 1e-4 * float(grad.abs().max()) + floor
        torch.testing.assert_close(grads[name], grad, rtol=1e-4, atol=atol)
    assert torch.equal(generate(model, family, ids), tokens)
    moe_patch.unpatch(model)
    torch.testing.assert_close(step(model, family, ids)[0], expected, rtol=0, atol=0)


@pytest.mark.gpu
@every_family
def test_bfloat16(family, device, ran):
    check_half(family, device, torch.bfloat16, ran)


def check_half(family, device, dtype, ran):
    """The parity law for each block, and the whole no further from float32 than unpatched.

    Of ids for which all choose the same experts: after a near-tie another expert is an error of a
    hundred roundings, and every model makes it now and then.
    """
    truth = build(family, device, **SMOOTH.get(family, {}))
    for parameter in truth.parameters():
        if parameter.dim() == 2:  # or many scores of routers round to the same number
            parameter.data.mul_(5)
    theirs = loaded(truth, family, dtype)
    truth.load_state_dict(theirs.state_dict())
    ours = copy.deepcopy(theirs)
    parity = moe_patch.check_parity(theirs, tokens=1024)  # of 64 chance decides in an expert of 16
    parity += moe_patch.check_parity(theirs, tokens=7, backward=False)
    assert parity.passed, parity
    report = moe_patch.patch(ours)
    assert report.fused and not report.skipped, report

    ran.clear()
    draws, same = 0, []
    while len(same) < 8:
        assert draws < 64, f"the same experts for {len(same)} of {draws} draws of ids"
        draws += 1
        ids = torch.randint(2, 90, (2, 7), device=device)
        models = truth, theirs, ours
        runs, chosen = zip(*(choosing(step, model, family, ids) for model in models))
        if all(torch.equal(chosen[0], other) for other in chosen):
            same.append([{"logits": logits} | grads for logits, grads in runs])
    assert len(ran) >= draws * len(report.fused)
    assert_near(*zip(*same), eps=torch.finfo(dtype).eps)
    assert_same_text(theirs, ours, family, ids, eps=torch.finfo(dtype).eps)
    moe_patch.unpatch(ours)
    assert torch.equal(step(ours, family, ids)[0], runs[1][0])


def loaded(model, family, dtype):
    """As from_pretrained gives it, which keeps in float32 what the family needs so."""
    half = type(model).from_pretrained(
        None, config=copy.deepcopy(model.config), state_dict=model.state_dict(), dtype=dtype
    )
    half.to(next(model.parameters()).device)
    return half.to(dtype).eval() if family in ONE_DTYPE else half.eval()


def choosing(function, model, *args):
    """What function(model, *args) returns, and the experts chosen meanwhile, of all layers."""
    chosen = []
    hooks = [
        module.register_forward_pre_hook(lambda _, args: chosen.append(args[1].sort().values))
        for module in model.modules()
        if getattr(getattr(module, up_name(module), None), "ndim", 0) == 3
    ]
    result = function(model, *args)
    for hook in hooks:
        hook.remove()
    return result, torch.cat([index.flatten() for index in chosen])


def assert_near(truth, theirs, ours, eps):
    """Each is {name: tensor} of every draw; rms of logits, and of all gradients together."""
    assert all(one.keys() == two.keys() for one, two in zip(theirs, ours))
    total = [0.0, 0.0]
    for name in truth[0]:
        exact, their, our = (
            torch.stack([draw[name].double() for draw in draws]) for draws in (truth, theirs, ours)
        )
        assert our.isfinite().all(), name
        scale = rms(exact)
        error, other = rms(our - exact), rms(their - exact)
        if name == "logits":
            assert error <= 1.3 * other + eps / 2 * scale, f"{error}, HF's {other}, of {scale}"
        elif exact[0].numel() >= 16 and other < scale / 4:  # else luck, or of what should be zero
            total = [total[0] + (error / scale) ** 2, total[1] + (other / scale) ** 2]
    assert 0 < total[0] <= 1.3**2 * total[1], f"all gradients: {total[0]}, HF's {total[1]}"


def rms(tensor):
    return float(tensor.square().mean().sqrt())


def assert_same_text(theirs, ours, family, ids, eps):
    """Up to where the best two tokens nearly tie, or experts do."""
    texts = (generate(model, family, ids) for model in (theirs, ours))
    for their, our in zip(*texts):
        if torch.equal(their, our):
            continue
        begin = their[None, : (their != our).nonzero()[0, 0]]
        (logits, expected), (_, chosen) = (
            choosing(last_logits, model, begin) for model in (theirs, ours)
        )
        best, second = logits.topk(2).values
        near = best - second <= 2 * eps * logits.abs().max()
        assert near or not torch.equal(chosen, expected), f"{our}, unpatched {their}"


@torch.no_grad()
def last_logits(model, ids):
    return model(ids, use_cache=False)[0][0, -1].float()
