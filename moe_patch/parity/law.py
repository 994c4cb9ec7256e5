"""The parity law (docs/parity.md): errors against a float64 truth, beside Hugging Face's own.

t is the truth, e(z) = z - t, h the worse of Hugging Face's implementations in the dtype under
test, eps = finfo(dtype).eps. Nothing here knows about blocks or models.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

RMS_FACTOR, MAX_FACTOR = 1.0, 1.5
FLOAT32_FACTOR, FLOAT32_MAX = 2.0, 4.0  # on these: the order of a float32 sum is ours to choose
SANE = 8.0  # h may be this many eps * rms t away from the truth
FLOAT32_SANE = 2.0**10  # the same in float32, where gradients that cancel lose digits: not TF32's
ALIVE = 1e-2  # rms t / rms x of an output
FP8_RMS_FACTOR = 1.05  # ours and HF's round activations to e4m3 at other places, equally well
FP8_SANE = 0.1  # as SANE, in rms t: e4m3's own errors, not those of the dtype
SLACK = 1 / 8  # of an eps of the truth's rms, on rms errors
AUTOCAST_SLACK = 1 / 2  # a float32 tensor that Hugging Face's autocast leaves may be rounded once
AUTOCAST_SANE = 0.1  # as SANE, in rms t: one element that passes a clamp's limit in half precision
MIN_TOKENS = 16  # an expert with fewer is judged with the whole tensor only
MIN_NUMBERS = 128  # with fewer independent errors the factors widen: see `widened`


@dataclass(frozen=True)
class Row:
    """One line of the report. Errors are relative: rms to the truth's rms, max to its largest."""

    tensor: str
    passed: bool
    our_rms: float | None = None
    hf_rms: float | None = None
    our_max: float | None = None
    hf_max: float | None = None
    ratio: float | None = None
    note: str = ""


@dataclass
class Errors:
    """Error sums of one tensor, or of one expert's part of it; parts are merged with `+`.

    `square` and `largest` list (ours, HF's first implementation, HF's second, ...).
    """

    count: int
    truth_square: float
    truth_largest: float
    square: list[float]
    largest: list[float]
    largest_at: tuple[int, ...] | None = None
    masks: list[tuple[int, ...] | None] | None = None  # where ours differs from each of HF's
    stray: tuple[int, ...] | None = None  # a gradient that should be exactly 0 and is not
    truth_fourth: float = 0.0

    def __add__(self, other: Errors) -> Errors:
        if not other.square or not self.square:
            full = self if self.square else other
            return Errors(**{**vars(full), "stray": self.stray or other.stray})
        return Errors(
            count=self.count + other.count,
            truth_square=self.truth_square + other.truth_square,
            truth_largest=max(self.truth_largest, other.truth_largest),
            square=[a + b for a, b in zip(self.square, other.square)],
            largest=[max(a, b) for a, b in zip(self.largest, other.largest)],
            largest_at=max(self, other, key=lambda part: part.largest[0]).largest_at,
            masks=[a if a is not None else b for a, b in zip(self.masks, other.masks)],
            stray=self.stray or other.stray,
            truth_fourth=self.truth_fourth + other.truth_fourth,
        )

    @property
    def numbers(self) -> float:
        """How many numbers of one size would weigh as much: few where some are much the largest.

        Rounding errors are as large as what is rounded, so that this is Satterthwaite's number of
        degrees of freedom of a sum of their squares.
        """
        return _effective(self.truth_square, self.truth_fourth)

    def rms(self, square: float) -> float:
        return math.sqrt(square / max(self.count, 1))

    @property
    def ratio(self) -> float:
        """rms e(ours) / rms e(h)."""
        worst = max(self.square[1:])
        return math.sqrt(self.square[0] / worst) if worst else math.inf if self.square[0] else 1.0


def effective(values: Tensor) -> float:
    """How many numbers of one size weigh as much as `values` do, as `Errors.numbers` says."""
    square = values.detach().double().square()
    return _effective(float(square.sum()), float(square.square().sum()))


def _effective(squares: float, fourths: float) -> float:
    return squares**2 / fourths if fourths else math.inf


def measure(
    ours: Tensor, baselines: Sequence[Tensor], truth: Tensor, *, at: tuple[int, ...] = ()
) -> Errors:
    """Error sums over the elements that are finite in every implementation.

    `at` goes before the indices that the result names: (e,) for the part of expert e.
    """
    truth = truth.double()
    everyone = [ours, *baselines]
    finite = torch.isfinite(truth)
    for tensor in everyone:
        finite = finite & torch.isfinite(tensor)
    all_finite = bool(finite.all())
    square, largest, largest_at = [], [], None
    for tensor in everyone:
        error = (tensor.double() - truth).abs_()
        error = error if all_finite else error.masked_fill_(~finite, 0)
        square.append(float(error.square().sum()))
        largest.append(float(error.max()) if error.numel() else 0.0)
        if largest_at is None and error.numel():
            largest_at = at + _index(int(error.argmax()), error.shape)
    kept = truth if all_finite else truth.masked_fill(~finite, 0)
    return Errors(
        count=int(finite.sum()),
        truth_square=float(kept.square().sum()),
        truth_largest=float(kept.abs().max()) if kept.numel() else 0.0,
        square=square,
        largest=largest,
        largest_at=largest_at,
        masks=[None if all_finite else _differ(ours, hf, at) for hf in baselines],
        truth_fourth=float(kept.square().square().sum()),
    )


def measure_unused(gradient: Tensor, expert: int) -> Errors:
    """The part of an expert without tokens: exactly 0, or the first element that is not."""
    stray = first(gradient != 0, (expert,))
    return Errors(0, 0.0, 0.0, [], [], stray=stray)


def first(mask: Tensor, at: tuple[int, ...] = ()) -> tuple[int, ...] | None:
    """Index of the first true element, or None."""
    if not bool(mask.any()):
        return None
    return at + _index(int(mask.flatten().to(torch.uint8).argmax()), mask.shape)


def _index(flat: int, shape: Sequence[int]) -> tuple[int, ...]:
    index = []
    for size in reversed(shape):
        flat, rest = divmod(flat, size)
        index.append(rest)
    return tuple(reversed(index))


def _differ(ours: Tensor, hf: Tensor, at: tuple[int, ...]) -> tuple[int, ...] | None:
    differ = ours.isnan() != hf.isnan()
    for infinite in (torch.isposinf, torch.isneginf):
        differ |= infinite(ours) != infinite(hf)
    return first(differ, at)


def why_not(
    errors: Errors,
    dtype: torch.dtype,
    *,
    x_rms: float | None = None,
    guards: bool = True,
    fp8: bool = False,
    numbers: float | None = None,
    autocast: bool = False,
) -> list[str]:
    """The rules that `errors` breaks, one phrase each. NaN breaks them all. `fp8`: HF's result, and
    perhaps ours, is of activations in FP8. `numbers`: how many independent errors there are, where
    that is fewer than elements. `autocast`: `dtype` is that of autocast, and others are wider."""
    eps = torch.finfo(dtype).eps
    numbers = min(MIN_NUMBERS if numbers is None else numbers, errors.numbers)
    wide, exact = widened(numbers), dtype == torch.float32
    rms_factor = RMS_FACTOR * wide * (FLOAT32_FACTOR if exact else 1)
    max_factor = MAX_FACTOR * wide * (FLOAT32_MAX if exact else 1)
    sane, slack = (FLOAT32_SANE if exact else SANE) * eps, SLACK
    if autocast:
        sane, slack = AUTOCAST_SANE, AUTOCAST_SLACK
    if fp8:
        rms_factor, max_factor, sane = FP8_RMS_FACTOR, MAX_FACTOR, FP8_SANE
    truth, ours = errors.rms(errors.truth_square), errors.rms(errors.square[0])
    hf, hf_max = errors.rms(max(errors.square[1:])), max(errors.largest[1:])
    broken = []
    if all(where is not None for where in errors.masks):
        broken.append(f"inf or NaN where HF has none, or the reverse, at {list(errors.masks[0])}")
    if not ours <= rms_factor * hf + eps * truth * slack:
        broken.append(f"rms error {_times(ours, hf)} HF's (limit {rms_factor:.3g})")
    if not errors.largest[0] <= max_factor * hf_max + eps * errors.truth_largest:
        broken.append(
            f"largest error {_times(errors.largest[0], hf_max)} HF's (limit {max_factor:.3g}), "
            f"at {list(errors.largest_at or ())}"
        )
    if guards and not hf <= sane * truth:
        relative = hf / truth if truth else math.inf
        broken.append(f"HF's own error is {relative:.1e}: nothing to judge by")
    if x_rms is not None and not truth >= ALIVE * x_rms:
        broken.append(f"a dead output: rms {truth:.1e} from an input of {x_rms:.1e}")
    return broken


def widened(numbers: float) -> float:
    """How much more than the law's factors an honest ratio of two rms may be by luck alone.

    Both are over `numbers` independent errors, so that their squares' ratio follows Fisher's F: the
    power keeps the chance below 1e-6 from 8 numbers on (docs/parity.md).
    """
    return (MIN_NUMBERS / min(max(numbers, 1), MIN_NUMBERS)) ** 0.75


def _times(ours: float, hf: float) -> str:
    return f"{ours / hf:.3g} x" if hf else "inf x"


def row(
    tensor: str,
    parts: Sequence[Errors],
    dtype: torch.dtype,
    *,
    x_rms: float | None = None,
    counts: Sequence[int] | None = None,
    fp8: bool = False,
    numbers: float | None = None,
    autocast: bool = False,
) -> Row:
    """Judges a measured tensor by rules 1 to 4 and, with `counts` of tokens per expert, by 5.

    `parts` is one Errors, or one for each expert in order; `fp8`, `numbers` and `autocast`
    as in `why_not`.
    """
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    broken = why_not(total, dtype, x_rms=x_rms, fp8=fp8, numbers=numbers, autocast=autocast)
    note = ""
    if counts is not None:
        judged = {e: parts[e] for e, count in enumerate(counts) if count >= MIN_TOKENS}
        for expert, part in judged.items():
            why = why_not(part, dtype, guards=False, autocast=autocast)
            if why:
                broken.append(f"expert {expert} ({counts[expert]} tokens): {why[0]}")
                break
        if total.stray is not None:
            expert, *_ = total.stray
            broken.append(f"expert {expert} has no token and a gradient, at {list(total.stray)}")
        if judged:
            worst = max(judged, key=lambda e: judged[e].ratio)
            note = f"{len(judged)} experts apart, worst {judged[worst].ratio:.2f}"
    truth, largest = total.rms(total.truth_square), total.truth_largest
    return Row(
        tensor=tensor,
        passed=not broken,
        our_rms=_finite(total.rms(total.square[0]), truth),
        hf_rms=_finite(total.rms(max(total.square[1:])), truth),
        our_max=_finite(total.largest[0], largest),
        hf_max=_finite(max(total.largest[1:]), largest),
        ratio=_finite(total.ratio, 1.0),
        note="; ".join(broken) or note,
    )


def _finite(value: float, scale: float) -> float | None:
    relative = value / scale if scale else math.inf
    return relative if math.isfinite(relative) else None


def judge(
    tensor: str,
    ours: Tensor,
    baselines: Sequence[Tensor],
    truth: Tensor,
    *,
    dtype: torch.dtype | None = None,
    x_rms: float | None = None,
    counts: Sequence[int] | None = None,
) -> Row:
    """The law on one tensor.

    Args:
        tensor: its name in the report.
        ours, baselines, truth: one shape; `truth` in float64 on the same rounded inputs.
        dtype: whose eps counts; that of `ours` by default.
        x_rms: of the block's input, for an output: demands that the output is alive.
        counts: tokens of each expert, for a weight gradient [E, ...]: adds the rule per expert.
    """
    dtype = dtype or ours.dtype
    if any(z.shape != truth.shape for z in (ours, *baselines)):
        shapes = ", ".join(str(list(z.shape)) for z in (ours, *baselines))
        return Row(tensor, False, note=f"shapes {shapes} beside the truth's {list(truth.shape)}")
    if counts is None:
        return row(tensor, [measure(ours, baselines, truth)], dtype, x_rms=x_rms)
    parts = [
        measure(ours[e], [hf[e] for hf in baselines], truth[e], at=(e,))
        if count
        else measure_unused(ours[e], e)
        for e, count in enumerate(counts)
    ]
    return row(tensor, parts, dtype, x_rms=x_rms, counts=counts)
