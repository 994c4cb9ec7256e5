"""Layouts of 4-bit checkpoints, written bit by bit: of one linear layer, and of whole models."""

from __future__ import annotations

import json

import torch
from safetensors.torch import load_file, save_file
from transformers import BitsAndBytesConfig

from moe_patch.formats.checkpoints import AWQ_ORDER, to_gpt_oss
from moe_patch.formats.packed import dequantize, quantize, unpack
from moe_patch.recognise.parts import up_name


def word(codes):
    """An int32 as Python's integer, from eight codes, the lowest first."""
    bits = "".join(f"{code:04b}" for code in reversed(codes))
    value = int(bits, 2)
    return value - 2**32 if bits[0] == "1" else value


def words_along_rows(matrix):
    """Lists [R][8 * C] -> int32 [R, C]."""
    rows = [[word(row[at : at + 8]) for at in range(0, len(row), 8)] for row in matrix]
    return torch.tensor(rows, dtype=torch.int32)


def transposed(matrix):
    return [list(column) for column in zip(*matrix)]


def gptq(codes, zeros, scales, less=1):
    """GPTQ: codes [N][K], zeros [N][K / group], scales [N, K / group], as below too."""
    stored = [[zero - less for zero in row] for row in zeros]
    return {
        "qweight": words_along_rows(codes).T.contiguous(),
        "qzeros": words_along_rows(transposed(stored)),
        "scales": scales.T.contiguous(),
        "g_idx": torch.arange(len(codes[0]), dtype=torch.int32) * scales.shape[1] // len(codes[0]),
    }


def awq(codes, zeros, scales):
    """AWQ, "gemm"."""

    def interleaved(matrix):  # [R][N]
        return [
            [row[at + column] for at in range(0, len(row), 8) for column in AWQ_ORDER]
            for row in matrix
        ]

    return {
        "qweight": words_along_rows(interleaved(transposed(codes))),
        "qzeros": words_along_rows(interleaved(transposed(zeros))),
        "scales": scales.T.contiguous(),
    }


def compressed(codes, zeros, scales):
    """compressed-tensors, "pack-quantized"; zeros may be None."""
    tensors = {
        "weight_packed": words_along_rows(codes),
        "weight_scale": scales,
        "weight_shape": torch.tensor([len(codes), len(codes[0])]),
    }
    if zeros is not None:
        padded = zeros + [[0] * scales.shape[1]] * (-len(codes) % 8)
        tensors["weight_zero_point"] = words_along_rows(transposed(padded)).T.contiguous()
    return tensors


# Whole checkpoints

WRITERS = {"gptq": gptq, "awq": awq, "compressed-tensors": compressed}


def quantization_config(method, group, zeros, **changes):
    """What such a checkpoint's config.json says, as the libraries write it."""
    weights = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": group}
    scheme = {"targets": ["Linear"], "weights": weights | {"symmetric": not zeros}}
    configs = {
        "gptq": {"bits": 4, "group_size": group, "sym": not zeros, "desc_act": False},
        "awq": {"bits": 4, "group_size": group, "zero_point": True, "version": "gemm"},
        "compressed-tensors": {
            "format": "pack-quantized",
            "config_groups": {"group_0": scheme},
            "ignore": ["lm_head"],
            "quantization_status": "compressed",
        },
        "mxfp4": {"modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]},
    }
    return {"quant_method": method} | configs[method] | changes


def write(model, folder, method, group=32, zeros=False, ends=("_proj",), **changes):
    """Writes a model with its linear layers of these names in 4 bits, and gives it the weights that
    they then stand for. `changes` are entries of its quantization_config."""
    model.save_pretrained(folder)
    weights = load_file(folder / "model.safetensors")
    for name in [name for name in weights if name.endswith(tuple(f"{end}.weight" for end in ends))]:
        packed = quantize(
            weights.pop(name)[None], "int4", group, scale_dtype=torch.float16, zeros=zeros
        )
        points = packed.zeros
        if points is None and method != "compressed-tensors":
            points = torch.full(packed.scales.shape, 8, dtype=torch.uint8)
        parts = WRITERS[method](
            unpack(packed.codes)[0].tolist(),
            points if points is None else points[0].tolist(),
            packed.scales[0],
        )
        for part, tensor in parts.items():
            weights[f"{name.removesuffix('weight')}{part}"] = tensor.contiguous()
        put(model, name.removesuffix(".weight"), dequantize(packed)[0])
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    describe(folder, quantization_config(method, group, zeros, **changes))


def put(model, name, weight):
    """Gives a model the weight [N, K] of a linear layer, or of one expert."""
    before, _, last = name.replace("block_sparse_moe", "mlp").partition(".experts.")
    if not last:
        model.get_parameter(f"{name}.weight").data.copy_(weight)
        return
    expert, which = last.split(".")
    experts = model.get_submodule(f"{before}.experts")
    if which in ("down_proj", "w2"):
        experts.down_proj.data[int(expert)] = weight
    else:
        rows = slice(len(weight)) if which in ("gate_proj", "w1") else slice(len(weight), None)
        experts.gate_up_proj.data[int(expert), rows] = weight


def write_gpt_oss(model, folder, **changes):
    """As `write`, of a gpt-oss: experts alone, in MXFP4."""
    model.save_pretrained(folder)
    weights = load_file(folder / "model.safetensors")
    for name in [name for name in weights if name.endswith(("gate_up_proj", "down_proj"))]:
        packed = quantize(weights.pop(name).mT, "mxfp4")
        weights[f"{name}_blocks"], weights[f"{name}_scales"] = to_gpt_oss(packed)
        model.get_parameter(name).data.copy_(dequantize(packed).mT)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    describe(folder, quantization_config("mxfp4", 32, False, **changes))


def describe(folder, config):
    """Writes the quantization_config of a checkpoint."""
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": config}))


def linear():
    """bitsandbytes' nf4 for linear layers, which transformers makes where that is installed."""
    config = BitsAndBytesConfig(bnb_4bit_quant_type="nf4")
    config._load_in_4bit = True
    return config


def packed_of(experts):
    """Name -> both stacks of 4-bit experts."""
    return {which: experts.packed(which) for which in (up_name(experts), "down_proj")}
