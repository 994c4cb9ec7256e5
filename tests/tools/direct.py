"""Direct launches hand the driver the same bytes as Triton's own, and kernels are compiled before
their call launches them, without a GPU: `python tests/tools/direct.py`. With `time`, what a block
costs the host instead.

The kernels are compiled for sm_90; stub_cuda.c stands in for the driver. Tensors are the CPU's, and
nothing is computed.
"""

from __future__ import annotations

import collections
import ctypes
import functools
import gc
import importlib.util
import os
import subprocess
import sys
import tempfile
import threading
import timeit
import warnings
from pathlib import Path

os.environ.pop("TRITON_INTERPRET", None)
folder = Path(tempfile.mkdtemp())
os.environ["TRITON_CACHE_DIR"] = str(folder / "cache")
os.environ["TRITON_LIBCUDA_PATH"] = str(folder)


def program(name: str, text: str) -> str:
    """Path of a script for sh."""
    file = folder / name
    file.write_text(f"#!/bin/sh\n{text}\n")
    file.chmod(0o755)
    return str(file)


if sys.argv[1:] != ["time"]:  # no kernel is run: none is assembled, and little is optimised
    triton_at = Path(importlib.util.find_spec("triton").origin).parent
    text = f'[ "$1" = --version ] && exec {triton_at}/backends/nvidia/bin/ptxas --version\n'
    nothing = program("ptxas", text + 'while [ "$1" != -o ]; do shift; done; echo > "$2"')
    os.environ |= {
        "TRITON_PTXAS_PATH": nothing,
        "TRITON_PTXAS_BLACKWELL_PATH": nothing,  # Triton 3.9 takes that one for Hopper, too
        "DISABLE_LLVM_OPT": "1",
        "TRITON_DISABLE_LINE_INFO": "1",
        "CC": program("cc", 'exec gcc "$@" -O0'),
    }

import torch
import triton
from triton.backends.nvidia import driver as nvidia

subprocess.run(
    [
        "gcc",
        "-shared",
        "-fPIC",
        "-Wl,-soname,libcuda.so.1",
        "-I",
        str(Path(nvidia.__file__).parent / "include"),
    ]
    + [str(Path(__file__).with_name("stub_cuda.c")), "-o", str(folder / "libcuda.so.1")],
    check=True,
)
(folder / "libcuda.so").symlink_to("libcuda.so.1")
stub = ctypes.CDLL(str(folder / "libcuda.so.1"), ctypes.RTLD_GLOBAL)
log = ctypes.create_string_buffer(1 << 16)

torch._C._cuda_getDevice = torch.cuda.current_device = lambda: 0
torch._C._cuda_getCurrentRawStream = lambda device: 1234
torch.cuda.get_device_capability = lambda *device: (9, 0)
available, torch.cuda.is_available = torch.cuda.is_available, lambda: True
triton.runtime.driver.set_active(nvidia.CudaDriver())
torch.cuda.is_available = available

from ops import in_4_bits, in_fp8, moe
from triton.runtime.jit import JITFunction

from moe_patch import kernels, patch
from moe_patch.kernels import chips, launch
from moe_patch.ops import experts, fp8, routing
from moe_patch.ops.operands import Inputs, Projection
from moe_patch.shapes import build, find

gc.disable()
kernels.why_not = functools.cache(lambda device_type: None)
chips.chip = lambda device: chips.nvidia(90, 232_448)
chips.name = lambda device: "NVIDIA H200"


def parameter_sizes(signature, boxes):
    """Bytes of each parameter of a kernel, the two for scratch memory at the end."""
    boxes = iter(boxes or ())
    for kind in signature.values():
        if kind.startswith("tensordesc"):
            next(boxes)
            rank = kind.split("]")[0].count(",") + 1  # Gluon's have a layout behind the shape
            yield from (128, *[4] * rank, *[8] * rank)
        elif kind != "constexpr":
            yield 8 if kind[0] == "*" or kind.endswith("64") else 4
    yield from (8, 8)


class Launcher(nvidia.CudaLauncher):
    def __init__(self, src, metadata):
        boxes = getattr(metadata, "tensordesc_meta", None)
        sizes = [*parameter_sizes(src.signature, boxes)]
        stub.stub_expect(len(sizes), (ctypes.c_int * len(sizes))(*sizes))
        super().__init__(src, metadata)


triton.runtime.driver.active.launcher_cls = Launcher


compared: dict[str, int] = {}


def both_ways(self, grid, *args):
    """Stands in for Launch.__call__."""

    def told() -> bytes:
        start(self, grid, *args)
        size = stub.stub_take(log)
        assert 0 < size <= len(log)
        return log.raw[:size]

    launch.DIRECT = False
    by_triton = told(), told()
    launch.DIRECT = True
    told()  # finds the binary
    run, JITFunction.run = JITFunction.run, None
    assert by_triton == (told(), told()), f"{self.kernel.__name__}: the driver is told other things"
    JITFunction.run = run
    boxes = sum(hasattr(arg, "block_shape") for arg in args)
    name = f"{self.kernel.__name__}, {boxes} descriptors"
    compared[name] = compared.get(name, 0) + 1


start = launch.Launch.__call__


def compare() -> None:
    """Every kernel, with and without descriptors, and of two dtypes one after the other."""
    stub.stub_take(log)
    launch.Launch.__call__ = both_ways
    run_all()
    run_masked()
    for name, count in sorted(compared.items()):
        print(f"{name}: {count} launches are told to the driver as by Triton")


def compile_ahead() -> None:
    """Prints where each kernel was compiled; fails if a call was not rehearsed."""
    launch.DIRECT, seen = True, []
    run_masked()  # alone in its call, so nothing is compiled beside it

    def listen(src, metadata, metadata_group, times, cache_hit):
        on = threading.current_thread() is threading.main_thread()
        seen.append((src.name, "in its turn" if on else "ahead"))

    triton.knobs.compilation.listener = listen
    given = moe("cpu", torch.bfloat16, 90, 128, 64, 2, 1, grad=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run_all()
        experts.fused_experts(**given)
        triton.knobs.compilation.listener = None
        trained = moe("cpu", torch.float16, 90, 128, 64, 2, 1)
        leaves = [t for t in trained.values() if t.requires_grad]
        for leaf in leaves:
            leaf.grad = torch.zeros_like(leaf)
        before = [leaf.grad for leaf in leaves]
        experts.fused_experts(**trained).sum().backward()
        assert all(leaf.grad is grad for leaf, grad in zip(leaves, before, strict=True))
    launch.compile_call = None  # nothing is missing any more, and what is unaligned stays Triton's
    given["hidden_states"] = torch.zeros(90 * 128 + 1, dtype=torch.bfloat16)[1:].view(90, 128)
    experts.fused_experts(**given)
    for (name, when), count in sorted(collections.Counter(seen).items()):
        print(f"{name} {when}: {count}")


def run_all() -> None:
    """Forwards and backwards that launch every kernel."""
    bf16, half = torch.bfloat16, torch.float16
    many, few = (256, 384), (128, 64)  # with and without kernels in hopper/
    runs = (
        (1100, many, bf16, False), (1100, many, half, False), (90, few, bf16, True),
        (1, few, bf16, False),
    )  # fmt: skip
    for tokens, (hidden, inner), dtype, transposed in runs:
        arguments = moe("cpu", dtype, tokens, hidden, inner, 2, 1, transposed=transposed)
        x, gate_up, down, index, weights = (t.detach() for t in arguments.values())
        factors = ((8, hidden), (2 * inner, 8), (8, inner), (hidden, 8))
        factors = [torch.zeros(2, *size, dtype=dtype) for size in factors]
        for low in ([None] * 4, factors)[: 1 if dtype == half else 2]:
            up, low_down = Projection(gate_up, None, *low[:2]), Projection(down, None, *low[2:])
            inputs = Inputs(x, weights, up, low_down).flat()
            # else torch would index by what no kernel wrote
            on_input = transposed or up.a is not None
            options = index, on_input, "silu", ""
            experts._experts_inference(*inputs, *options)
            out, *made = experts._experts_forward(*inputs, *options)
            need = [each is not None for each in inputs]
            experts._experts_backward(*inputs, *options, *made, out, need)
        if dtype == bf16 and not transposed:
            scaled = in_fp8(moe("cpu", dtype, tokens, hidden, 2 * inner, 2, 1))
            experts.fused_experts(**scaled).sum().backward()
            with torch.no_grad():
                experts.fused_experts(**scaled)
            format = "nf4" if tokens > 1 else "int4"  # looked up, or with zero points
            plain = moe("cpu", dtype, tokens, hidden, inner, 2, 1)
            packed = in_4_bits(plain, format, group=32, zeros=format == "int4")
            experts.fused_experts(**packed).sum().backward()
            with torch.no_grad():
                experts.fused_experts(**packed)
        logits = torch.randn(tokens, 2, requires_grad=True)
        routing.select_experts(logits, 1)[1].sum().backward()


def run_masked() -> None:
    """A masked product in FP8, which is no part of a forward."""
    rows, weight = (torch.zeros(2, size, 256).to(torch.float8_e4m3fn) for size in (200, 512))
    scales = torch.ones(2, 200, 2), torch.ones(2, 4, 2)
    counts = torch.zeros(2, dtype=torch.int32)
    fp8.masked_grouped_gemm(rows, scales[0], weight, scales[1], counts)


def time_host() -> None:
    """Microseconds of one eager forward of a patched block."""
    launch.DIRECT = True
    block = build(find("tiny_qwen3"), dtype=torch.bfloat16, device="cpu")
    patch(block)
    torch.set_num_threads(1)
    for tokens in (1, 64):
        x = torch.randn(1, tokens, block.gate.weight.shape[1], dtype=torch.bfloat16)
        with torch.no_grad():
            router = functools.partial(torch.nn.functional.linear, x, block.gate.weight)
            costs = [
                min(timeit.repeat(call, number=100, repeat=20)) * 1e4
                for call in (functools.partial(block, x), router)
            ]
        print(f"{tokens} tokens: {costs[0] - costs[1]:.1f} us besides the router's matmul")


if __name__ == "__main__":
    if sys.argv[1:] == ["time"]:
        time_host()
    else:
        compile_ahead()
        compare()
