"""FP8 with block scales: how many blocks, and each thing that check_scaled refuses."""

from __future__ import annotations

import pytest
import torch

from moe_patch.formats.scaled import E4M3, SCALES, blocks, check_scaled

NAMES = ("gate_up_proj", "gate_up_scale_inv")


def weight(experts=2, n=136, k=256):
    return torch.zeros(experts, n, k).to(E4M3)


def check(weight, scale):
    name, scale_name = NAMES
    check_scaled(name, weight, scale, scale_name)


def test_blocks_are_rounded_up():
    assert [blocks(n) for n in (1, 127, 128, 129, 256, 257)] == [1, 1, 1, 2, 2, 3]


@pytest.mark.parametrize("dtype", SCALES, ids=str)
def test_a_scale_for_each_block_is_taken(dtype):
    scale = torch.ones(2, 2, 2).to(dtype)
    assert check(weight(), scale) is None
    with pytest.raises(ValueError, match=r"must be \[2, 2, 1\]"):
        check(weight(k=128), scale)


@pytest.mark.parametrize(
    "change, error, says",
    [
        ({"weight": torch.zeros(2, 136, 256)}, TypeError, "gate_up_proj is torch.float32: with"),
        ({"scale": None}, ValueError, "has no scales: pass gate_up_scale_inv"),
        ({"scale": torch.ones(2, 2, 2).half()}, TypeError, "gate_up_scale_inv is torch.float16"),
        ({"scale": torch.ones(2, 1, 2)}, ValueError, r"must be \[2, 2, 2\].*found \[2, 1, 2\]"),
        ({"scale": torch.ones(2, 2)}, ValueError, r"must be \[2, 2, 2\].*found \[2, 2\]"),
        ({"scale": torch.ones(2, 2, 2, device="meta")}, ValueError, "is on cpu and .* on meta"),
        (
            {"scale": torch.ones(2, 2, 2, requires_grad=True)}, ValueError,
            r"pass gate_up_scale_inv.detach\(\)",
        ),
        ({"weight": weight().requires_grad_()}, ValueError, r"pass gate_up_proj.detach\(\)"),
    ],
    ids=lambda part: part if isinstance(part, str) else "",
)  # fmt: skip
def test_refusals(change, error, says):
    given = {"weight": weight(), "scale": torch.ones(2, 2, 2)} | change
    with pytest.raises(error, match=says) as caught:
        check(**given)
    assert "\n" not in str(caught.value)


def test_without_gradients_nobody_wants_one():
    wanting = torch.ones(2, 2, 2, requires_grad=True)
    with torch.no_grad():
        assert check(weight().requires_grad_(), wanting) is None
