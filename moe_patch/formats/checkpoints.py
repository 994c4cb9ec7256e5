"""4-bit weights as checkpoints have them, converted to `Packed` without quantising again.

| layout | source of the layout |
|---|---|
| gpt-oss MXFP4 | transformers, integrations/mxfp4.py, convert_moe_packed_tensors |
| compressed-tensors "pack-quantized" | compressed_tensors, compressors/pack_quantized |
| GPTQ | GPTQModel, utils/model.py, convert_gptq_v1_to_v2_format, and its TorchQuantLinear |
| AWQ "gemm" | AutoAWQ, awq/utils/packing_utils.py |

Where a layout is of one linear layer, `tensors` maps its names in the checkpoint, less the prefix
of the layer, to tensors, and the result is a stack of one expert [1, N, K]; `concat` joins them.
An int32 with its lowest code first is four bytes of `Packed.codes` in little-endian memory.

A group of more than 128 weights, or one scale a row, becomes groups of 128 with repeated scales.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from .packed import Packed, check_packed, pack, unpack

Tensors = Mapping[str, Tensor]
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""Columns, of eight neighbours, that the nibbles of an AWQ word have, from the lowest."""
LARGEST_GROUP = 128


def from_gpt_oss(name: str, blocks: Tensor, scales: Tensor) -> Packed:
    """Return gpt-oss' MXFP4 weights as a stack [E, N, K] that shares their memory.

    Args:
        blocks: `*_blocks`, uint8 [E, N, K / 32, 16], the even k in the low half of a byte.
        scales: `*_scales`, uint8 [E, N, K / 32], the exponent plus 127.

    Raises:
        TypeError: other dtypes.
        ValueError: no scales, or shapes that do not fit.
    """
    _need_dtype(f"{name}_blocks", blocks, torch.uint8)
    if scales is None:
        raise ValueError(f"{name} has no {name}_scales: load them with {name}_blocks.")
    _need_dtype(f"{name}_scales", scales, torch.uint8)
    if blocks.dim() != 4 or blocks.shape[-1] != 16:
        raise ValueError(
            f"{name}_blocks must be [E, N, K / 32, 16], found {list(blocks.shape)}: load a "
            "checkpoint in the layout of gpt-oss."
        )
    packed = Packed(blocks.flatten(-2), scales.view(torch.float8_e8m0fnu), None, "mxfp4")
    check_packed(name, packed)
    return packed


def to_gpt_oss(packed: Packed) -> tuple[Tensor, Tensor]:
    """Return (blocks, scales) of an MXFP4 stack, as :func:`from_gpt_oss` takes them.

    Raises:
        ValueError: another format, or transposed weights.
    """
    if packed.format != "mxfp4":
        raise ValueError(f"the format is {packed.format}: gpt-oss stores mxfp4, quantise to it.")
    check_packed("the stack", packed)
    return packed.codes.unflatten(-1, (-1, 16)), packed.scales.view(torch.uint8)


def from_compressed_tensors(name: str, tensors: Tensors) -> Packed:
    """Return a linear layer of compressed-tensors' "pack-quantized" 4-bit layout, [1, N, K].

    Args:
        tensors: weight_packed int32 [N, K / 8], the lowest code first, stored plus 8;
            weight_scale [N, K / group]; weight_shape [2]: N and K; weight_zero_point, if any,
            int32 [ceil(N / 8), K / group], packed along N and stored plus 8; weight_g_idx, if any.

    Raises:
        TypeError: other dtypes.
        ValueError: NVFP4, tensors missing, shapes that do not fit, other than 4 bits, or act-order.
    """
    _refuse_global_scale(name, tensors)
    words, scales = _need(name, tensors, "weight_packed"), _need(name, tensors, "weight_scale")
    shape = [int(size) for size in _need(name, tensors, "weight_shape")]
    _need_dtype(f"{name}.weight_packed", words, torch.int32)
    if list(words.shape) != [shape[0], shape[-1] // 8] or scales.dim() != 2:
        raise ValueError(
            f"{name}.weight_packed of weights {shape} must be {[shape[0], shape[-1] // 8]} with "
            f"scales [N, K / group], found {list(words.shape)} and {list(scales.shape)}: "
            "only 4-bit weights of linear layers are supported."
        )
    zeros = tensors.get("weight_zero_point")
    if zeros is not None:
        _need_dtype(f"{name}.weight_zero_point", zeros, torch.int32)
        zeros = _nibbles(zeros.mT).mT[: shape[0]]  # [N, K / group]
    _refuse_act_order(name, tensors.get("weight_g_idx"), shape[-1], scales.shape[-1])
    return _one_expert(name, _as_bytes(words), scales, zeros)


def from_gptq(name: str, tensors: Tensors, checkpoint_format: str = "gptq") -> Packed:
    """Return a linear layer of GPTQ's 4-bit layout, [1, N, K].

    Args:
        tensors: qweight int32 [K / 8, N], the lowest code first; qzeros int32 [K / group, N / 8],
            the lowest first; scales [K / group, N]; g_idx, if any, int32 [K].
        checkpoint_format: of the checkpoint's quantization_config. "gptq" stores a zero point less
            one; words are subtracted and added as a whole, so a borrow goes to the next zero point,
            as in GPTQModel. "gptq_v2" stores it as it is.

    Raises:
        TypeError: other dtypes.
        ValueError: another checkpoint_format, NVFP4, tensors missing, shapes that do not fit, other
            than 4 bits, or act-order.
    """
    if checkpoint_format not in ("gptq", "gptq_v2"):
        raise ValueError(
            f"{name} has the checkpoint_format {checkpoint_format!r}: save it as gptq or gptq_v2."
        )
    words, zeros, scales = _three(name, tensors)
    zeros = _nibbles(zeros + 0x11111111 if checkpoint_format == "gptq" else zeros)
    _refuse_act_order(name, tensors.get("g_idx"), 8 * len(words), len(scales))
    return _one_expert(name, _as_bytes(words.mT), scales.mT, zeros.mT)


def from_awq(name: str, tensors: Tensors) -> Packed:
    """Return a linear layer of AWQ's "gemm" layout, [1, N, K].

    Args:
        tensors: qweight int32 [K, N / 8] and qzeros int32 [K / group, N / 8], each eight columns
            in the order of `AWQ_ORDER`, the first in the lowest bits; scales [K / group, N].

    Raises:
        TypeError: other dtypes.
        ValueError: NVFP4, tensors missing, shapes that do not fit, or other than 4 bits.
    """
    words, zeros, scales = _three(name, tensors)
    codes = pack(_awq_columns(words).mT)  # [N, K / 2]
    return _one_expert(name, codes, scales.mT, _awq_columns(zeros).mT)


def concat(parts: list[Packed], dim: int = 0) -> Packed:
    """Concatenate stacks of one format: experts (dim 0), or rows of the same experts (dim 1).

    A stack without zero points among others that have some gets zero points of 8.

    Raises:
        ValueError: nothing to concatenate, mixed formats, groups or dtypes of scales, transposed
            weights, or another dim.
    """
    for number, part in enumerate(parts):
        check_packed(f"stack {number}", part)
    kinds = {(part.format, part.group, part.scales.dtype) for part in parts}
    if len(kinds) != 1:
        found = " and ".join(sorted(f"{f} by {g} with {dtype} scales" for f, g, dtype in kinds))
        raise ValueError(
            f"one stack has one format, found {found or 'nothing'}: convert them alike."
        )
    if dim not in (0, 1):
        raise ValueError(f"dim is {dim}: pass 0 to join experts or 1 to join their rows.")
    zeros = None
    if any(part.zeros is not None for part in parts):
        zeros = torch.cat([_zeros(part) for part in parts], dim)
    codes = torch.cat([part.codes for part in parts], dim)
    scales = torch.cat([part.scales.view(_bits(part.scales)) for part in parts], dim)
    return Packed(codes, scales.view(parts[0].scales.dtype), zeros, parts[0].format)


def drop_zeros(packed: Packed) -> Packed:
    """Return the stack without zero points where all are 8, as in symmetric GPTQ; waits for them.

    Weights are the same, with less to read.
    """
    if packed.zeros is None or not (packed.zeros == 8).all():
        return packed
    return replace(packed, zeros=None)


def _one_expert(name: str, codes: Tensor, scales: Tensor, zeros: Tensor | None) -> Packed:
    """[1, N, K] from codes [N, K / 2], scales and zeros [N, K / group] of any strides."""
    group = 2 * codes.shape[-1] // max(scales.shape[-1], 1)
    repeats = 1 if group % LARGEST_GROUP else max(group // LARGEST_GROUP, 1)
    if zeros is not None and zeros.shape != scales.shape:
        raise ValueError(
            f"the zero points of {name} unpack to {list(zeros.shape)} and its scales are "
            f"{list(scales.shape)}: only 4-bit weights are supported."
        )
    scales, zeros = (
        None if t is None else t.repeat_interleave(repeats, -1)[None].contiguous()
        for t in (scales, zeros)
    )
    packed = Packed(codes[None], scales, zeros, "int4")
    check_packed(name, packed)
    return packed


def _three(name: str, tensors: Tensors) -> tuple[Tensor, Tensor, Tensor]:
    """(qweight, qzeros, scales), each of two dimensions, the first two int32."""
    _refuse_global_scale(name, tensors)
    found = [_need(name, tensors, which) for which in ("qweight", "qzeros", "scales")]
    for which, tensor in zip(("qweight", "qzeros"), found):
        _need_dtype(f"{name}.{which}", tensor, torch.int32)
    if any(tensor.dim() != 2 for tensor in found):
        shapes = ", ".join(str(list(tensor.shape)) for tensor in found)
        raise ValueError(f"{name} must have qweight, qzeros and scales of 2 dims, found {shapes}.")
    return found[0], found[1], found[2]


def _need(name: str, tensors: Tensors, which: str) -> Tensor:
    if tensors.get(which) is None:
        found = ", ".join(tensors) or "nothing"
        raise ValueError(f"{name} has no {which}, found {found}: load a checkpoint that has it.")
    return tensors[which]


def _need_dtype(name: str, tensor: Tensor, dtype: torch.dtype) -> None:
    if tensor.dtype != dtype:
        raise TypeError(f"{name} is {tensor.dtype}: {dtype} is needed.")


def _refuse_global_scale(name: str, tensors: Tensors) -> None:
    if "weight_global_scale" in tensors:
        raise ValueError(
            f"{name} has a weight_global_scale, so it is NVFP4, which is not supported: load a "
            "checkpoint in MXFP4, GPTQ, AWQ or pack-quantized int4."
        )


def _refuse_act_order(name: str, index: Tensor | None, k: int, groups: int) -> None:
    if index is None:
        return
    plain = torch.arange(k, dtype=index.dtype, device=index.device) // (k // max(groups, 1))
    if not torch.equal(index, plain):
        raise ValueError(
            f"the g_idx of {name} is not k // {k // max(groups, 1)} for K = {k}: quantise without "
            "act-order (desc_act=False)."
        )


def _as_bytes(words: Tensor) -> Tensor:
    """Int32 [..., K / 8] -> uint8 [..., K / 2]: eight codes of a word, the lowest first."""
    return words.contiguous().view(torch.uint8)


def _nibbles(words: Tensor) -> Tensor:
    """Int32 [..., N / 8] -> uint8 [..., N], the lowest first."""
    return unpack(_as_bytes(words))


def _awq_columns(words: Tensor) -> Tensor:
    """Int32 [..., N / 8] -> uint8 [..., N], columns in their order."""
    place = [AWQ_ORDER.index(column) for column in range(8)]
    return _nibbles(words).unflatten(-1, (-1, 8))[..., place].flatten(-2)


def _zeros(packed: Packed) -> Tensor:
    if packed.zeros is None:
        return torch.full_like(packed.scales, 8, dtype=torch.uint8)
    return packed.zeros


def _bits(scales: Tensor) -> torch.dtype:
    """A dtype of the same size that every device concatenates."""
    return {1: torch.uint8, 2: torch.int16, 4: torch.int32}[scales.element_size()]
