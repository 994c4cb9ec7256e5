"""Stacks of expert weights in 4 bits: packed, unpacked, quantised, dequantised, checked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from .format import Chosen, Format
from .int4 import INT4
from .mxfp4 import MXFP4
from .nf4 import NF4

FORMATS = {format.name: format for format in (NF4, MXFP4, INT4)}


@dataclass(frozen=True, eq=False)
class Packed:
    """A stack of weights [E, N, K] in 4 bits; each `group` of weights along K shares a scale."""

    codes: Tensor
    """uint8 [E, N, K / 2]: a byte has the code of k = 2j in its low half, 2j + 1 in its high."""
    scales: Tensor
    """[E, N, K / group], of a dtype that the format allows."""
    zeros: Tensor | None
    """uint8 [E, N, K / group]: the codes that stand for zero. int4 only; None: code 8."""
    format: str
    """A name in FORMATS."""
    turned: bool = False
    """Whether these are the transposes, weights [E, K, N], of the same tensors."""

    @property
    def shape(self) -> tuple[int, int, int]:
        """(E, N, K)."""
        experts, n, half = self.codes.shape
        return (experts, 2 * half, n) if self.turned else (experts, n, 2 * half)

    @property
    def mT(self) -> Packed:  # noqa: N802 (as a Tensor's)
        """The transposed weights, of the same memory."""
        return replace(self, turned=not self.turned)

    def __len__(self) -> int:
        return len(self.codes)

    def __getitem__(self, experts: slice) -> Packed:
        """Some of the experts, of the same memory."""
        zeros = None if self.zeros is None else self.zeros[experts]
        return replace(self, codes=self.codes[experts], scales=self.scales[experts], zeros=zeros)

    @property
    def group(self) -> int:
        """Weights along K that share a scale."""
        return 2 * self.codes.shape[-1] // self.scales.shape[-1]

    @property
    def device(self) -> torch.device:
        """Where the codes are."""
        return self.codes.device


def pack(codes: Tensor) -> Tensor:
    """Pack codes below 16, uint8 [..., K], into contiguous bytes [..., K / 2], even k in the low
    half.

    Raises:
        TypeError: codes that are not uint8.
        ValueError: an odd K.
    """
    if codes.dtype != torch.uint8:
        raise TypeError(f"codes are {codes.dtype}: pass them as torch.uint8.")
    if codes.shape[-1] % 2:
        raise ValueError(f"{codes.shape[-1]} codes in a row: two make a byte, pad K to an even K.")
    return (codes[..., ::2] | codes[..., 1::2] << 4).contiguous()


def unpack(packed: Tensor) -> Tensor:
    """Unpack bytes, uint8 [..., K / 2], into codes [..., K]."""
    return torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2)


def find_format(format: str) -> Format:
    """Return the format of a name.

    Raises:
        ValueError: there is none.
    """
    if format not in FORMATS:
        raise ValueError(f"format {format!r} is unknown: use one of {', '.join(FORMATS)}.")
    return FORMATS[format]


@torch.no_grad()
def quantize(
    weight: Tensor,
    format: str = "nf4",
    group: int | None = None,
    *,
    scale_dtype: torch.dtype | None = None,
    zeros: bool = False,
) -> Packed:
    """Quantise weights [E, N, K] of any float dtype and strides, in float32, expert by expert.

    `group` and `scale_dtype` are the format's own unless given; with `zeros` (int4) each group has
    a zero point.

    Raises:
        TypeError: weights that are not floats.
        ValueError: another number of dimensions, a K that groups do not divide, NaN or infinity,
            scales that overflow, or a format, group, dtype of scales or zero points that there
            are not.
    """
    found, group, scale_dtype = find_options(format, group, scale_dtype, zeros)
    _check_weight(weight, format, group)
    packed = empty_packed(
        weight.shape, format, group, scale_dtype=scale_dtype, zeros=zeros, device=weight.device
    )
    for expert in range(len(weight)):
        chosen = _quantize_one(weight, expert, found, group, scale_dtype, zeros)
        packed.codes[expert] = pack(chosen[0].flatten(-2))
        packed.scales[expert] = chosen[1]
        if packed.zeros is not None:
            packed.zeros[expert] = chosen[2]
    return packed


def empty_packed(
    shape: Sequence[int],
    format: str = "nf4",
    group: int | None = None,
    *,
    scale_dtype: torch.dtype | None = None,
    zeros: bool = False,
    device: torch.device | str | None = None,
) -> Packed:
    """Return a stack [E, N, K] whose tensors nobody has written yet, on any device, meta too.

    Options as in `quantize`.

    Raises:
        ValueError: another number of dimensions, a K that groups do not divide, or a format, group,
            dtype of scales or zero points that there are not.
    """
    _, group, scale_dtype = find_options(format, group, scale_dtype, zeros)
    _check_shape(shape, format, group)
    experts, n, k = shape
    codes = torch.empty(experts, n, k // 2, dtype=torch.uint8, device=device)
    scales = torch.empty(experts, n, k // group, dtype=scale_dtype, device=device)
    points = torch.empty_like(scales, dtype=torch.uint8) if zeros else None
    return Packed(codes, scales, points, format)


def find_options(
    format: str, group: int | None, scale_dtype: torch.dtype | None, zeros: bool
) -> tuple[Format, int, torch.dtype]:
    """Return the format of a name, with its own group and dtype of scales unless given.

    Raises:
        ValueError: the format does not exist, or does not have one of the options.
    """
    found = find_format(format)
    group = found.group if group is None else group
    scale_dtype = found.scale_dtype if scale_dtype is None else scale_dtype
    _check_options(found, group, scale_dtype, zeros)
    return found, group, scale_dtype


def _quantize_one(
    weight: Tensor, expert: int, format: Format, group: int, scale_dtype: torch.dtype, zeros: bool
) -> Chosen:
    rows = weight[expert].float().contiguous()  # [N, K]
    if not rows.isfinite().all():
        raise ValueError(
            f"the weight of expert {expert} has NaN or infinity, which {format.name} cannot store: "
            "load weights that are finite."
        )
    chosen = format.quantize(rows.unflatten(-1, (-1, group)), scale_dtype, zeros)
    if not chosen[1].float().isfinite().all():
        raise ValueError(
            f"the weight of expert {expert} is too large for scales in {scale_dtype}: pass a "
            "scale_dtype with a wider range."
        )
    return chosen


def dequantize(packed: Packed, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return the weights [E, N, K] in `dtype`.

    values[code] * scale, or (code - zero) * scale, computed in float32 (float64 for float64) and
    then rounded to `dtype`, expert by expert.
    """
    wide = torch.promote_types(dtype, torch.float32)
    values = torch.tensor(find_format(packed.format).values, dtype=wide, device=packed.device)
    experts, n, half = packed.codes.shape
    weight = torch.empty(experts, n, 2 * half, dtype=dtype, device=packed.device)
    for expert, packed_codes in enumerate(packed.codes):
        codes = unpack(packed_codes).unflatten(-1, (-1, packed.group))  # [N, K / group, group]
        if packed.zeros is None:
            steps = values[codes.int()]
        else:
            steps = codes.to(wide) - packed.zeros[expert, ..., None].to(wide)
        weight[expert] = (steps * packed.scales[expert, ..., None].to(wide)).flatten(-2)
    return weight.mT if packed.turned else weight


def check_packed(name: str, packed: Packed) -> None:
    """Check that the tensors of a stack are what its format needs.

    Raises:
        TypeError: a dtype that the format does not have.
        ValueError: an unknown format, scales missing, zero points in a format that has none, shapes
            that do not fit, a group that is not allowed, several devices, transposed weights, or
            scales that want a gradient.
    """
    if packed.format not in FORMATS:
        raise ValueError(
            f"{name} has the format {packed.format!r}: use one of {', '.join(FORMATS)}."
        )
    format = FORMATS[packed.format]
    _check_dtypes(name, packed, format)
    _check_shapes(name, packed, format)
    if packed.turned:
        raise ValueError(f"{name} is turned: pass weights [E, N, K] whose codes lie along K.")
    if torch.is_grad_enabled() and packed.scales.requires_grad:
        raise ValueError(
            f"the scales of {name} want a gradient, and 4-bit weights are frozen: pass "
            "scales.detach()."
        )


def _check_dtypes(name: str, packed: Packed, format: Format) -> None:
    if packed.scales is None:
        raise ValueError(f"{name} has no scales: pass one for each group of {format.name} weights.")
    if packed.zeros is not None and not format.has_zeros:
        raise ValueError(f"{name} has zeros, and {format.name} has no zero points: pass None.")
    for which in ("codes", "zeros"):
        tensor = getattr(packed, which)
        if tensor is not None and tensor.dtype != torch.uint8:
            raise TypeError(f"the {which} of {name} are {tensor.dtype}: pass them as torch.uint8.")
    if packed.scales.dtype not in format.scale_dtypes:
        raise TypeError(
            f"the scales of {name} are {packed.scales.dtype}: {format.name} needs "
            f"{_listed(format.scale_dtypes)}."
        )


def _check_shapes(name: str, packed: Packed, format: Format) -> None:
    codes, scales = list(packed.codes.shape), list(packed.scales.shape)
    if len(codes) != 3:
        raise ValueError(f"the codes of {name} must be [E, N, K / 2], found {codes}.")
    k = 2 * codes[-1]
    group = k // scales[-1] if scales and scales[-1] else 0
    if group not in format.groups or scales != [*codes[:2], k // group] or k % group:
        raise ValueError(_misfit(name, packed, format))
    if packed.zeros is not None and packed.zeros.shape != packed.scales.shape:
        raise ValueError(
            f"the zeros of {name} must be {scales}, as its scales are, found "
            f"{list(packed.zeros.shape)}."
        )
    for which in ("scales", "zeros"):
        tensor = getattr(packed, which)
        if tensor is not None and tensor.device != packed.codes.device:
            raise ValueError(
                f"the codes of {name} are on {packed.device} and its {which} on {tensor.device}: "
                "move them to one device."
            )


def _misfit(name: str, packed: Packed, format: Format) -> str:
    experts, n, half = packed.codes.shape
    k, groups = 2 * half, _listed(format.groups)
    needed = [[experts, n, k // group] for group in format.groups if not k % group]
    if not needed:
        return f"K = {k} of {name} is not a multiple of {groups}: {format.name} cannot store it."
    return (
        f"the scales of {name} must be {_listed(needed)} for weights "
        f"{[experts, n, k]} in groups of {groups}, found {list(packed.scales.shape)}."
    )


def _check_options(format: Format, group: int, scale_dtype: torch.dtype, zeros: bool) -> None:
    if group not in format.groups:
        raise ValueError(f"group {group}: {format.name} has groups of {_listed(format.groups)}.")
    if scale_dtype not in format.scale_dtypes:
        raise ValueError(
            f"scale_dtype {scale_dtype}: {format.name} needs {_listed(format.scale_dtypes)}."
        )
    if zeros and not format.has_zeros:
        raise ValueError(f"zeros=True: {format.name} has no zero points, pass zeros=False.")


def _check_weight(weight: Tensor, format: str, group: int) -> None:
    if not weight.is_floating_point():
        raise TypeError(f"the weight is {weight.dtype}: pass floats to quantise to {format}.")
    _check_shape(weight.shape, format, group)


def _check_shape(shape: Sequence[int], format: str, group: int) -> None:
    if len(shape) != 3:
        raise ValueError(f"the weight must be [E, N, K], found {list(shape)}.")
    if shape[-1] % group:
        raise ValueError(
            f"K = {shape[-1]} of the weight {list(shape)} is not a multiple of {group}: choose "
            "another group or format."
        )


def _listed(choices: tuple | list) -> str:
    return " or ".join(str(choice) for choice in choices)
