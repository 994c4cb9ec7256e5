"""What fused_experts() refuses, each with a sentence."""

from __future__ import annotations

import pytest
import torch
from ops import moe

from moe_patch.ops.experts import fused_experts

SMALL = {"tokens": 5, "hidden": 32, "inner": 24, "num_experts": 4, "top_k": 2, "grad": False}


@pytest.mark.parametrize(
    "change, error, says",
    [
        ({"weight_on": "both"}, ValueError, "'output' or 'input'"),
        ({"hidden_states": lambda x: x[None]}, ValueError, r"hidden_states \[T, H\]"),
        ({"hidden_states": lambda x: x[:, :24]}, ValueError, r"\[E, 2I, 24\]"),
        ({"gate_up_proj": lambda x: x.transpose(1, 2)}, ValueError, r"\.transpose\(1, 2\)"),
        ({"down_proj": lambda x: x.transpose(1, 2)}, ValueError, r"\.transpose\(1, 2\)"),
        ({"down_proj": lambda x: x[:3]}, ValueError, r"down_proj \[E, 32, I\]"),
        ({"top_k_index": lambda x: x[:3]}, ValueError, r"\[5, K\], one row a token"),
        ({"top_k_index": lambda x: x.float()}, TypeError, "an integer dtype"),
        ({"top_k_weights": lambda x: x[:, :1]}, ValueError, "the shape of top_k_index"),
        ({"top_k_weights": lambda x: x.double()}, TypeError, "float64"),
        ({"hidden_states": lambda x: x.to(torch.int8)}, TypeError, "int8"),
        ({"down_proj": lambda x: x.half()}, TypeError, "the same one of"),
        ({"gate_up_proj": lambda x: x.double()}, TypeError, "float64"),
        ({"down_proj": lambda x: x.to("meta")}, ValueError, "one device"),
        ({"top_k_weights": lambda x: x.to("meta")}, ValueError, "one device, found .*, meta"),
        ({"gate_up_bias": torch.zeros(4, 24)}, ValueError, r"a floating-point \[4, 48\], found"),
        ({"down_bias": torch.zeros(4, 32).int()}, ValueError, "floating-point .* torch.int32"),
        (
            {"down_bias": torch.zeros(4, 32), "weight_on": "input"},
            ValueError,
            "down_bias and weight_on='input' are not computed together",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_refusals_are_one_sentence(device, change, error, says):
    arguments = {**moe(device, torch.float32, **SMALL), "weight_on": "output"}
    for name, value in change.items():
        arguments[name] = value(arguments[name]) if callable(value) else value
    with pytest.raises(error, match=says) as caught:
        fused_experts(**arguments)
    assert str(caught.value).count("\n") == 0


def test_odd_gate_up_is_refused(device):
    arguments = moe(device, torch.float32, **SMALL)
    arguments["gate_up_proj"] = torch.randn(4, 33, 32, device=device)
    arguments["down_proj"] = torch.randn(4, 32, 16, device=device)
    with pytest.raises(ValueError, match="even"):
        fused_experts(**arguments)


def test_no_kernels_on_this_device(monkeypatch):
    from moe_patch import kernels

    monkeypatch.setattr(kernels, "why_not", lambda device_type: f"no kernels on {device_type}")
    arguments = moe(torch.device("cpu"), torch.float32, **SMALL)
    with pytest.raises(RuntimeError, match="no kernels on cpu; moe_patch.reference"):
        fused_experts(**arguments)
