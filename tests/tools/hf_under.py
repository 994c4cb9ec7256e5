"""Puts moe_patch under Hugging Face's suites, and counts; the plugin of hf_suites.py.

In the folder that hf_suites.py lays out the package `tests` imports this, so that it is there in
every process, those that tensor parallelism starts too.
"""

from __future__ import annotations

import json
import os
import random
import sys
from pathlib import Path

import pytest
import torch

WAY = os.environ["HF_SUITES_WAY"]
TWINS = os.environ["HF_SUITES_TWINS"] == "1"
RESULTS = Path(os.environ["HF_SUITES_RESULTS"])  # a JSON line a test
ELSEWHERE = RESULTS.with_suffix(".launched")  # a byte a process that launched a kernel
UNFUSED = RESULTS.with_suffix(".unfused")  # a line a block that stayed Hugging Face's
launches = {"count": 0, "process": None}


def install() -> None:
    """Before any test module is imported: they take functions of transformers by name."""
    if WAY == "unpatched":
        return
    from moe_patch.kernels.launch import Launch

    Launch.__call__ = counted(Launch.__call__)
    if TWINS:
        plain_pytorch()
    {"experts": in_place_of_grouped_mm, "patch": patch_every_model}[WAY]()


@torch.compiler.disable
def count() -> None:
    launches["count"] += 1
    if launches["process"] != os.getpid():
        launches["process"] = os.getpid()
        with ELSEWHERE.open("a") as file:
            file.write(".")


def counted(function):
    def call(*args, **kwargs):
        if not torch.compiler.is_compiling():
            count()
        return function(*args, **kwargs)

    return call


def plain_pytorch() -> None:
    """Instead of the kernels, which the interpreter runs a hundred times slower."""
    from moe_patch import reference
    from moe_patch.models import decorated, llama4, qwen3_moe
    from moe_patch.recognise import parts, routers

    def product(x, weight, top_k_index, *, gather=False, scatter=False):
        chosen = top_k_index.flatten().clamp(0, len(weight) - 1)
        rows = x.repeat_interleave(top_k_index.shape[1], 0) if gather else x
        return torch.bmm(weight[chosen], rows[..., None])[..., 0]

    def experts(
        x, gate_up, down, top_k_index, top_k_weights, weight_on="output", activation="silu",
        gate_up_bias=None, down_bias=None,
    ):  # fmt: skip
        dtype, device = gate_up.dtype, x.device.type
        if torch.is_autocast_enabled(device):
            dtype = torch.get_autocast_dtype(device)
        valid = (top_k_index >= 0) & (top_k_index < len(gate_up))
        weights = top_k_weights.masked_fill(~valid, 0).flatten()[:, None]
        rows = x.to(dtype).repeat_interleave(top_k_index.shape[1], 0)
        if weight_on == "input":
            rows = (rows * weights).to(dtype)
        rows = product(rows, gate_up.to(dtype), top_k_index)
        if gate_up_bias is not None:
            rows = bias(rows, gate_up_bias.to(dtype), top_k_index)
        rows = product(reference.glu(rows, activation), down.to(dtype), top_k_index)
        if down_bias is not None:
            rows = bias(rows, down_bias.to(dtype), top_k_index)
        if weight_on == "output":
            rows = rows.float() * weights
        return rows.view(*top_k_index.shape, -1).sum(1).to(x.dtype)

    def bias(rows, bias, top_k_index, order=None, scattered=False):
        return rows + bias[top_k_index.flatten().clamp(0, len(bias) - 1)]

    decorated.fused_experts = llama4.fused_experts = counted(experts)
    parts.expert_order = lambda top_k_index, *_: top_k_index
    parts.grouped_gemm, parts.add_bias = counted(product), bias
    for module in (llama4, qwen3_moe, routers):
        module.select_experts = reference.select_experts
    llama4.sigmoid_scores = reference.sigmoid_scores


def in_place_of_grouped_mm() -> None:
    """Our experts function is what transformers takes for its own two."""
    from transformers.integrations import moe

    from moe_patch.models import decorated

    theirs = moe.grouped_mm_experts_forward
    decorated._hf_forward = lambda experts, *args: theirs(experts, *args)
    for name in ("grouped_mm", "batched_mm"):  # generate() takes the latter on a GPU
        moe.ExpertsInterface.register(name, decorated.experts_forward)
        setattr(moe, f"{name}_experts_forward", decorated.experts_forward)


def patch_every_model() -> None:
    """`moe_patch.patch` on every model that is built, and the hook for those that are loaded."""
    from transformers import PreTrainedModel

    import moe_patch

    post_init = PreTrainedModel.post_init

    def patched(self):
        post_init(self)
        report = moe_patch.patch(self, strict=False)
        left = [f"{cls}: {why}\n" for _, cls, why in report.skipped if "meta device" not in why]
        if left:
            with UNFUSED.open("a") as file:
                file.writelines(left)

    PreTrainedModel.post_init = patched
    moe_patch.enable()


def launched() -> int:
    """Kernel launches so far, or processes where there were some."""
    return launches["count"] + (ELSEWHERE.stat().st_size if ELSEWHERE.exists() else 0)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item):
    import numpy

    common = sys.modules.get("tests.test_modeling_common")
    for generator in (random, *([common.global_rng] if common else [])):  # the same inputs each way
        generator.seed(0)
    numpy.random.seed(0)
    torch.manual_seed(0)
    before = launched()
    try:
        return (yield)
    finally:
        item.user_properties.append(("launches", launched() - before))


def pytest_runtest_logreport(report) -> None:
    if report.when != "call" and report.passed:
        return
    sub = type(report) is not pytest.TestReport  # a subtest; its test has a report of its own
    if (sub and not report.failed) or "_INSIDE_SUB_PROCESS" in os.environ:
        return
    name = report.nodeid.split("::", 1)[-1]
    more = {"launches": dict(report.user_properties).get("launches", 0)}
    write(name, report.outcome, why(report), seconds=round(report.duration, 2), **more)


def pytest_collectreport(report) -> None:
    if report.failed:
        write("(collection)", "failed", why(report))


def why(report) -> str:
    """One line: the reason of a skip, the message of a failure."""
    if report.passed:
        return ""
    if hasattr(report, "wasxfail"):
        return f"expected to fail: {report.wasxfail}"
    found = report.longrepr
    if isinstance(found, tuple):
        return found[2].removeprefix("Skipped: ")
    lines = getattr(getattr(found, "reprcrash", None), "message", str(found)).strip().splitlines()
    return (lines if hasattr(found, "reprcrash") else lines[-1:])[0][:300] if lines else ""


def write(test: str, outcome: str, reason: str, **more) -> None:
    if "PYTEST_XDIST_WORKER" in os.environ:
        return
    with RESULTS.open("a") as file:
        file.write(json.dumps({"test": test, "outcome": outcome, "why": reason, **more}) + "\n")


install()
