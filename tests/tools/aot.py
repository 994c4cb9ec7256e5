"""Compiles every kernel ahead of time: `python tests/tools/aot.py sm_90 gfx942`, without a GPU.

The launchers run on meta tensors with the launch itself intercepted, so what is compiled is what
they would launch at the real shapes: tiles, descriptors, alignment and all. Prints a line a kernel
with its registers, spills (bytes; vector registers on AMD), shared memory and a digest of the
binary: that of another checkout, named in PYTHONPATH, runs the same code where digests are equal.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import hashlib
import io
import itertools
import os
import re
import sys
import tempfile
import time
import traceback

os.environ.pop("TRITON_INTERPRET", None)
os.environ["TRITON_DUMP_PTXAS_LOG"] = "1"
os.environ["TRITON_DISABLE_LINE_INFO"] = "1"  # a binary does not tell where its source was
cache = tempfile.TemporaryDirectory()
os.environ["TRITON_CACHE_DIR"] = cache.name

import torch
import triton
from texts import asks_late, forgets_steps, unread_barriers
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor as GluonDescriptor
from triton.runtime.jit import JITFunction
from triton.tools.tensor_descriptor import TensorDescriptor

from moe_patch import kernels
from moe_patch.activation import parse
from moe_patch.kernels import chips
from moe_patch.kernels import launch as launcher
from moe_patch.ops import experts, routing
from moe_patch.ops import fp8 as products
from moe_patch.ops.operands import Inputs, Projection

gc.disable()
launcher.DIRECT = False  # on a machine with a GPU, too
launcher.THREAD.ready = True  # nothing starts, so no thread needs CUDA's context

CHIPS = {
    "sm_80": (GPUTarget("cuda", 80, 32), chips.nvidia(80, 166_912)),
    "sm_86": (GPUTarget("cuda", 86, 32), chips.nvidia(86, 101_376)),
    "sm_89": (GPUTarget("cuda", 89, 32), chips.nvidia(89, 101_376)),
    "sm_90": (GPUTarget("cuda", 90, 32), chips.nvidia(90, 232_448)),
    "sm_100": (GPUTarget("cuda", 100, 32), chips.nvidia(100, 232_448)),
    "sm_103": (GPUTarget("cuda", 103, 32), chips.nvidia(103, 232_448)),
    "sm_120": (GPUTarget("cuda", 120, 32), chips.nvidia(120, 101_376)),
    "sm_121": (GPUTarget("cuda", 121, 32), chips.nvidia(121, 101_376)),
    "gfx942": (GPUTarget("hip", "gfx942", 64), chips.amd("gfx942")),
    "gfx950": (GPUTarget("hip", "gfx950", 64), chips.amd("gfx950")),
}
OPTIONS = {"num_warps": 4, "num_stages": 3, "enable_fp_fusion": True}
TYPES = {
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float32: "fp32",
    torch.int32: "i32",
    torch.int64: "i64",
    torch.float8_e4m3fn: "fp8e4nv",
    torch.uint8: "u8",
}


def specialise(value):
    """(signature entry, constant or None, divisible by 16)."""
    if value is None:
        return "constexpr", None, False
    if isinstance(value, torch.Tensor):
        return "*" + TYPES[value.dtype], None, True
    if isinstance(value, GluonDescriptor):
        shape = ",".join(map(str, value.block_shape))
        dtype = TYPES[value.base.dtype]
        return f"tensordesc<{dtype}[{shape}],{value.layout!r}>", None, False
    if isinstance(value, TensorDescriptor):
        shape = ",".join(map(str, value.block_shape))
        return f"tensordesc<{TYPES[value.base.dtype]}[{shape}]>", None, False
    if value == 1:
        return "constexpr", 1, False
    return ("i32" if abs(value) < 2**31 else "i64"), None, value % 16 == 0


def record(launches):
    """Stands in for JITFunction.run."""

    def run(kernel, *args, grid, warmup, **constants):
        options = {name: constants.pop(name, default) for name, default in OPTIONS.items()}
        names = [parameter.name for parameter in kernel.params]
        signature, values, attrs = {}, dict(constants), {}
        for i, (name, value) in enumerate(zip(names, args)):
            signature[name], constant, divisible = specialise(value)
            if isinstance(value, int) and kernel.params[i].do_not_specialize:
                signature[name], constant, divisible = "i32", None, False
            if constant is not None or value is None:
                values[name] = constant
            if divisible:
                attrs[(i,)] = [["tt.divisibility", 16]]
        signature |= {name: "constexpr" for name in constants}
        signature = {name: signature[name] for name in names}
        launches.append((kernel, signature, values, attrs, options))

    return run


def moe_launches(
    tokens, hidden, inner, num_experts, top_k, dtype, llama4=False, rank=0, act="silu",
    biased=False, fp8=False, packed=""
):  # fmt: skip
    """Every launch of one forward and backward, routing included, and of weight gradients that are
    added to what is there."""
    launches = []
    original, JITFunction.run = JITFunction.run, record(launches)
    dw = kernels.dw.dw

    def both(*args, add=False, **others):
        dw(*args, add=True, **others)
        return dw(*args, add=False, **others)

    kernels.dw.dw = both
    try:
        with torch.device("meta"):
            logits = torch.empty(tokens, num_experts, dtype=dtype)
            groups = 1 if num_experts % 8 else 8  # DeepSeek-V3's router, then DeepSeek-V2's
            for x, bias, *options in (
                (logits.float(), logits[0].float(), True, True, 2.5, 1e-20, groups, 1, 2),
                (logits.float(), None, False, False, 16.0, 0.0, groups, 1, 1),
                (logits, None, llama4, not llama4, 1.0, 0.0, 1, 1, 2),
            ):
                options.append(float("-inf"))
                index, weights = routing._select_experts(x, None, bias, top_k, x.dtype, *options)
                if x is logits:
                    routing._select_experts(x, index, bias, top_k, x.dtype, *options)  # replayed
                routing._select_experts_backward(x, index, weights, *options[:4])
            x = torch.empty(tokens, hidden, dtype=dtype)
            width = parse(act).rows(inner)
            if llama4 or biased:
                w1 = torch.empty(num_experts, hidden, width, dtype=dtype).transpose(1, 2)
                w2 = torch.empty(num_experts, inner, hidden, dtype=dtype).transpose(1, 2)
            else:
                w1 = torch.empty(num_experts, width, hidden, dtype=dtype)
                w2 = torch.empty(num_experts, hidden, inner, dtype=dtype)
            up, down, weights_frozen = Projection(w1), Projection(w2), bool(rank or fp8 or packed)
            if rank:

                def factor(*size):
                    return torch.empty(num_experts, *size, dtype=dtype)

                up = Projection(w1, None, factor(rank, hidden), factor(2 * inner, rank))
                down = Projection(w2, None, factor(rank, inner), factor(hidden, rank))
            if fp8:
                w1, w2 = (w.to(torch.float8_e4m3fn) for w in (w1, w2))
                scales = [
                    torch.empty(w.shape[0], *(-(-n // 128) for n in w.shape[1:])) for w in (w1, w2)
                ]
                up, down = (
                    each._replace(weight=w, scale=s)
                    for each, w, s in zip((up, down), (w1, w2), scales)
                )
                if kernels.fp8_gemm.runs(x.device):  # rows that are FP8 already
                    q, x_scale = x.to(torch.float8_e4m3fn), torch.empty(tokens, -(-hidden // 128))
                    products.experts(q, w1, w2, index, weights, *scales, x_scale, act)
                    masked = torch.empty(num_experts * 192, hidden, dtype=w1.dtype)
                    by, counts = torch.empty(len(masked), x_scale.shape[1]), index[:, 0].int()
                    kernels.fp8_gemm.fp8_gemm(masked, by, w1, scales[0], masked_m=counts)
            if packed:
                up, down = (each._replace(**in_4_bits(each.weight, packed)) for each in (up, down))
                w1, w2 = up.weight, down.weight
            if biased:
                up, down = (
                    each._replace(bias=torch.empty(num_experts, size, dtype=dtype))
                    for each, size in ((up, width), (down, hidden))
                )
            inputs = Inputs(x, weights, up, down).flat()
            arguments = (*inputs, index, llama4, act, packed.split()[0] if packed else "")
            frozen = (w1, w2, *up[4:], *down[4:]) if weights_frozen else ()
            need = [each is not None and all(each is not f for f in frozen) for each in inputs]
            experts._experts_inference(*arguments)
            _, *made = experts._experts_forward(*arguments)
            experts._experts_backward(*arguments, *made, x, need)
    finally:
        JITFunction.run, kernels.dw.dw = original, dw
    return launches


def in_4_bits(weight, packed):
    """Fields of a Projection; `packed` is a format, a group and, if there are any, "zeros"."""
    format, group, *zeros = packed.split()
    experts, n, k = weight.shape
    dtype = torch.float8_e8m0fnu if format == "mxfp4" else torch.float32
    scale = torch.empty(experts, n, k // int(group), dtype=dtype)
    return {
        "weight": torch.empty(experts, n, k // 2, dtype=torch.uint8),
        "scale": scale,
        "zeros": scale.to(torch.uint8) if zeros else None,
    }


def build(target, launch):
    """(compiled kernel, what ptxas printed)."""
    kernel, signature, values, attrs, options = launch
    log = io.StringIO()
    with contextlib.redirect_stdout(log):
        compiled = triton.compile(
            (GluonASTSource if kernel.is_gluon() else ASTSource)(kernel, signature, values, attrs),
            target=target,
            options=options,
        )
    return compiled, log.getvalue()


SHAPES = {  # tokens, hidden, inner, experts, top_k
    "qwen3_30b": (16384, 2048, 768, 128, 8),
    "dsv3_ep32": (4096, 7168, 2048, 32, 8),
    "llama4_scout": (4096, 5120, 8192, 16, 1),
    "odd": (100, 97, 41, 7, 3),
    "short": (64, 2048, 768, 128, 8),
    "decode": (1, 2048, 768, 128, 8),
    "one_token": (1, 5120, 8192, 16, 1),
    "lora": (8192, 2048, 768, 128, 8),
    "lora_short": (64, 2048, 768, 128, 8),
    "lora_wide": (8192, 2048, 768, 128, 8),
    "lora_turned": (8192, 2048, 768, 128, 8),
    "middle": (1024, 2048, 768, 128, 8),
    "gpt_oss": (4096, 2880, 2880, 32, 4),
    "gpt_oss_decode": (1, 2880, 2880, 32, 4),
    "nemotron_h": (4096, 2688, 1856, 128, 6),
    "nemotron_h_decode": (1, 2688, 1856, 128, 6),
    "fp8_dsv3": (4096, 7168, 2048, 32, 8),
    "fp8_qwen3": (1024, 2048, 768, 128, 8),
    "fp8_short": (64, 2048, 768, 128, 8),
    "fp8_seam": (4096, 2880, 1000, 32, 4),
    "fp8_odd": (100, 97, 41, 7, 3),
    "fp8_decode": (1, 2048, 768, 128, 8),
    "fp8_lora": (4096, 2048, 768, 128, 8),
    "nf4": (1024, 2048, 768, 128, 8),
    "nf4_many": (4096, 2048, 768, 128, 8),
    "nf4_lora": (8192, 2048, 768, 128, 8),
    "nf4_short": (64, 2048, 768, 128, 8),
    "nf4_decode": (1, 2048, 768, 128, 8),
    "mxfp4": (4096, 2880, 2880, 32, 4),
    "mxfp4_decode": (1, 2880, 2880, 32, 4),
    "int4_short": (256, 2048, 768, 128, 8),
    "int4_decode": (1, 2048, 768, 128, 8),
}
PACKED = {"nf4": "nf4 64", "mxfp4": "mxfp4 32", "int4": "int4 128 zeros"}
RANKS = {
    "lora": 16, "lora_short": 16, "nf4_lora": 16, "fp8_lora": 16,
    "lora_wide": 256, "lora_turned": 72,
}  # fmt: skip
TURNED = ("llama4_scout", "one_token", "lora_turned")
ACTS = {
    "gpt_oss": "silu 7.0 1.702 1.0 interleaved",
    "mxfp4": "silu 7.0 1.702 1.0 interleaved",
    "nemotron_h": "relu2 None 1.0 0.0 ungated",
}
ROUTING = {"topk_kernel", "topk_backward_kernel", "count_kernel", "place_kernel"}


def compile_for(chip, shapes, dtypes, without, routed):
    """Prints a line a kernel; those of routing for the shapes in `routed` alone."""
    target, found = CHIPS[chip]
    chips.chip = lambda device: found
    chips.name = lambda device: ""  # not this machine's card
    done = set()
    for shape, dtype in itertools.product(shapes, dtypes):
        arguments = (
            *SHAPES[shape],
            getattr(torch, dtype),
            shape in TURNED,
            RANKS.get(shape, 0),
            ACTS.get(shape.removesuffix("_decode"), "silu"),
            shape.startswith(("gpt_oss", "mxfp4")),
            shape.startswith("fp8"),
            PACKED.get(shape.partition("_")[0], ""),
        )
        for launch in moe_launches(*arguments):
            name = launch[0].__name__
            key = repr((name, *launch[1:]))
            left_out = name in without or (name in ROUTING and shape not in routed)
            if key not in done and not left_out:
                done.add(key)
                print(f"{chip} {shape} {dtype} {line(target, launch)}", flush=True)


def line(target, launch):
    """Kernel, tile, warps, stages: registers, spills, shared memory (what is declared in PTX, too),
    the binary's digest, seconds."""
    start = time.time()
    compiled, log = build(target, launch)
    if "amdgcn" in compiled.asm:
        log = compiled.asm["amdgcn"]
        registers = re.findall(r"\.vgpr_count:\s+(\d+)", log)
        spills = re.findall(r"\.vgpr_spill_count:\s+(\d+)", log)
    else:
        registers = re.findall(r"Used (\d+) registers", log)
        spills = re.findall(r"(\d+) bytes spill stores", log)
    declared = sum(map(int, re.findall(r"(\d+) bytes smem", log)))
    kernel, _, values, _, how = launch
    tile = values["TILE"]._asdict() if "TILE" in values else values
    tile = {name.upper(): size for name, size in tile.items()}
    tile = "x".join(str(tile[name]) for name in ("BM", "BN", "BK") if name in tile)
    digest = hashlib.sha256(compiled.kernel).hexdigest()[:12]
    return (
        f"{kernel.__name__} {tile or '-'} w{how['num_warps']} s{how['num_stages']}: "
        f"registers {','.join(registers) or '-'}, spills {','.join(spills) or '-'}, "
        f"shared {compiled.metadata.shared + declared}, binary {digest}, "
        f"{time.time() - start:.1f} s"
        + (" SERIALISED" if "instructions are serialized" in log else "")
        + (" UNREAD BARRIER" if unread_barriers(compiled.asm.get("ttgir", "")) else "")
        + (" FORGETS STEPS" if forgets_steps(compiled.asm.get("ttgir", "")) else "")
        + (" NAMES ITS SOURCE" if b".py" in compiled.kernel else "")
        + (" ASKS LATE" if asks_late(kernel.__name__, compiled.asm.get("ptx", "")) else "")
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("chips", nargs="+", choices=CHIPS)
    parser.add_argument("--shape", nargs="+", choices=SHAPES, default=["qwen3_30b", "llama4_scout"])
    parser.add_argument("--dtype", nargs="+", default=["bfloat16"])
    parser.add_argument("--without", nargs="+", default=[], metavar="KERNEL")
    parser.add_argument("--routing", nargs="*", choices=SHAPES, metavar="SHAPE", default=SHAPES)
    options = parser.parse_args()
    failed = 0
    for chip in options.chips:  # in a process of its own: launchers keep what they chose for one
        sys.stdout.flush()
        if child := os.fork():
            failed |= os.waitpid(child, 0)[1]
            continue
        code = 1
        try:
            compile_for(chip, options.shape, options.dtype, options.without, options.routing)
            code = 0
        except Exception:
            traceback.print_exc()
        os._exit(code)
    sys.exit(failed != 0)


if __name__ == "__main__":
    main()
