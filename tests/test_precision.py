"""Both of torch's switches of TF32: asked without raising, and put back exactly."""

from __future__ import annotations

import itertools

import pytest
import torch
from tiny import tiny_block, tiny_model, tokens

import moe_patch
from moe_patch.kernels.tiling import dot_precision
from moe_patch.parity.shadow import plain_arithmetic
from moe_patch.precision import allows_tf32, ieee_products

PLACES = [
    (backend, operator)
    for backend in ("generic", "cuda", "mkldnn")
    for operator in ("all", "matmul", "conv", "rnn")
    if backend != "generic" or operator == "all"
]
get, put = torch._C._get_fp32_precision_getter, torch._C._set_fp32_precision_setter


def enable_tf32(enable):
    """As transformers' function of that name, which does nothing without a GPU."""
    torch.backends.fp32_precision = "tf32" if enable else "ieee"


def allow(value):
    torch.backends.cuda.matmul.allow_tf32 = value


STEPS = {
    "highest": lambda: torch.set_float32_matmul_precision("highest"),
    "high": lambda: torch.set_float32_matmul_precision("high"),
    "medium": lambda: torch.set_float32_matmul_precision("medium"),
    "allowed": lambda: allow(True),
    "not allowed": lambda: allow(False),
    **{
        f"{place} {value}": lambda place=place, value=value: put(*place, value)
        for place in (("generic", "all"), ("cuda", "all"), ("cuda", "matmul"))
        for value in ("tf32", "ieee", "none")
    },
    "cpu bf16": lambda: put("mkldnn", "matmul", "bf16"),
    "cpu all bf16": lambda: put("mkldnn", "all", "bf16"),
}


@pytest.fixture(autouse=True)
def fresh_settings():
    """As a process starts with, before and after."""

    def reset():
        torch.set_float32_matmul_precision("highest")
        for place in PLACES:
            put(*place, "tf32" if place in (("cuda", "conv"), ("cuda", "rnn")) else "none")

    reset()
    yield
    reset()


def answer(ask):
    try:
        return ask()
    except RuntimeError as error:
        return type(error)


def everything():
    """What either API answers now, and what the new one would after each change above a place."""
    found = [answer(torch.get_float32_matmul_precision)]
    found += [answer(lambda: torch.backends.cuda.matmul.allow_tf32)]
    found += [get(*place) for place in PLACES]
    for place in (("generic", "all"), ("cuda", "all"), ("mkldnn", "all")):
        kept = raw(place)
        for value in ("tf32", "ieee", "none"):
            put(*place, value)
            found += [get(*other) for other in PLACES]
            found += [answer(torch.get_float32_matmul_precision)]
        put(*place, kept)
    return found


def raw(place):
    """What was set there: the generic setting is all that it can follow."""
    generic = get("generic", "all")
    if place == ("generic", "all"):
        return generic
    seen = set()
    for value in ("ieee", "tf32"):
        put("generic", "all", value)
        seen.add(get(*place))
    put("generic", "all", generic)
    return seen.pop() if len(seen) == 1 else "none"


@pytest.mark.parametrize("steps", list(itertools.permutations(STEPS, 2)), ids="; ".join)
def test_every_order_of_settings(steps):
    for step in steps:
        STEPS[step]()
    before = everything()
    assert allows_tf32() == (get("cuda", "matmul") == "tf32")
    assert dot_precision(torch.float32) == ("tf32" if allows_tf32() else "ieee")
    assert dot_precision(torch.float16) == "ieee"
    with ieee_products():
        assert not allows_tf32() and dot_precision(torch.float32) == "ieee"
        assert get("cuda", "matmul") == get("mkldnn", "matmul") == "ieee"
        assert torch.get_float32_matmul_precision() == "highest"
        assert not torch.backends.cuda.matmul.allow_tf32
    assert everything() == before


def test_put_back_after_an_error():
    enable_tf32(True)
    before = everything()
    with pytest.raises(ZeroDivisionError), plain_arithmetic():
        raise ZeroDivisionError
    assert everything() == before and allows_tf32()


def test_a_patched_float32_model_trains_as_the_trainer_asks(device):
    """TrainingArguments(tf32=True) calls enable_tf32."""
    enable_tf32(True)
    with pytest.raises(RuntimeError, match="mix of the legacy and new APIs"):
        _ = torch.backends.cuda.matmul.allow_tf32  # else this test shows nothing
    model = tiny_model("qwen3_moe", device)
    moe_patch.patch(model)
    ids = tokens(device)
    model(ids, labels=ids).loss.backward()
    with torch.no_grad():
        model(ids[:, :1])


@pytest.mark.parametrize("dtype", (torch.float32, torch.float16), ids=str)
def test_check_parity_leaves_the_switch_alone(device, dtype):
    block = tiny_block("qwen3_moe", device).to(dtype)
    for enable in (True, False):
        enable_tf32(enable)
        before = everything()
        assert moe_patch.check_parity(block, tokens=(4,), backward=False).passed
        assert everything() == before
        assert allows_tf32() == enable
