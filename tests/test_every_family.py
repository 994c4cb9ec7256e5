"""A tiny model of every family whose experts are fused, from its own config class, patched."""

from __future__ import annotations

import importlib

import pytest
import torch
from small import MORE, shrink
from test_models_decorated import decorated_classes
from test_support import UNFUSED
from torch import nn
from transformers import PreTrainedModel

import moe_patch

NOT_GENERATING = {"granitemoehybrid", "jamba"}  # not with two layers, none of them attention
INPUTS = {"ernie4_5_vl_moe": {"moe_mm_token_type_ids": torch.arange(14).view(2, 7) % 2}}  # images
NARROW = {"hidden_size": 32, "intermediate_size": 32, "moe_intermediate_size": 16}  # half the time
WIDE = {"ernie4_5_vl_moe", "glm4v_moe", "granitemoehybrid"}  # whose heads follow from the width
FAMILIES = {"step3p7": "transformers.models.step3p7.modeling_step3p7"}
for module, _ in decorated_classes():
    FAMILIES.setdefault(module.split(".")[2], module)


def build(family, device):
    module = importlib.import_module(FAMILIES[family])
    classes = [c for c in vars(module).values() if isinstance(c, type)]
    classes = [
        c for c in classes if issubclass(c, PreTrainedModel) and c.__module__ == FAMILIES[family]
    ]
    ends = ("ForCausalLM", "TextModel", "Model", "ForConditionalGeneration")
    classes = [c for c in classes if c.__name__.endswith(ends) and "PreTrained" not in c.__name__]
    classes.sort(key=lambda c: next(i for i, end in enumerate(ends) if c.__name__.endswith(end)))
    cls = next(c for c in classes if not any(w in c.__name__ for w in ("Vision", "Audio", "MTP")))
    torch.manual_seed(0)
    sizes = ({} if family in WIDE else NARROW) | MORE.get(family, {})
    model = cls(shrink(cls.config_class(), sizes)).to(device).eval()
    for parameter in model.parameters():
        if parameter.dim() == 3:
            nn.init.normal_(parameter, std=0.1)
    return model


@pytest.mark.parametrize("family", [f for f in FAMILIES if f not in UNFUSED])
def test_patched_as_unpatched(family, device, ran):
    model = build(family, device)
    ids = torch.randint(2, 90, (2, 7), device=device)
    more = {name: value.to(device) for name, value in INPUTS.get(family, {}).items()}

    def run():
        model.zero_grad()
        out = model(ids, use_cache=False, **more)[0]
        (out * torch.linspace(-1, 1, out.numel(), device=device).view_as(out)).mean().backward()
        return out, {n: p.grad for n, p in model.named_parameters() if p.grad is not None}

    def generate():
        if not model.can_generate() or family in NOT_GENERATING:
            return ids
        return model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=3
        )

    expected, expected_grads = run()
    tokens = generate()
    report = moe_patch.patch(model)
    assert report.fused and not report.skipped, report
    assert not ran
    out, grads = run()
    assert len(ran) >= len(report.fused)
    torch.testing.assert_close(out, expected, rtol=2e-5, atol=2e-5 * float(expected.abs().max()))
    assert grads.keys() == expected_grads.keys()
    for name, grad in expected_grads.items():
        atol = 1e-4 * float(grad.abs().max()) + 1e-9
        torch.testing.assert_close(grads[name], grad, rtol=1e-4, atol=atol)
    assert torch.equal(generate(), tokens)
    moe_patch.unpatch(model)
    torch.testing.assert_close(run()[0], expected, rtol=0, atol=0)
