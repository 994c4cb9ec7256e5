"""Choices of experts that a bench imposes; a random router's are nearly even."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from ..shapes import Shape

UNIFORM = "uniform"
NAMES = (UNIFORM, "zipf", "hot")
KEY = "top_k_index"


def check(how: str) -> None:
    """Raises ValueError unless `how` is one of NAMES or a file."""
    if how not in NAMES and not Path(how).is_file():
        raise ValueError(f"--routing is {how!r}, neither a file nor one of {', '.join(NAMES)}")


def choices(how: str, shape: Shape, tokens: int, *, seed: int = 0) -> Tensor:
    """Expert ids [T, K] int64 on the CPU, each token's best choice first and none twice.

    "zipf": popularity of the r-th expert is 1 / r (draws without replacement, by Gumbel's noise).
    "hot": the first expert is in every token's choice, the others are even. Else a safetensors file
    with `top_k_index` [tokens, K] or [tokens, layers, K], of which the first layer counts; its
    tokens are repeated as often as it takes.

    Raises:
        ValueError: the file has no such tensor, another K, ids outside 0 .. E - 1, or one twice.
    """
    experts, top_k = shape.num_experts, shape.top_k
    if how not in NAMES:
        found = _read(how, shape)
        return found.repeat(-(-tokens // len(found)), 1)[:tokens]
    draw = torch.Generator().manual_seed(seed)
    noise = -torch.log(-torch.log(torch.rand(tokens, experts, generator=draw)))
    if how == "zipf":
        noise -= torch.arange(1, experts + 1).log()
    if how == "hot":
        noise[:, 0] = torch.inf
    return noise.topk(top_k, -1).indices


def _read(path: str, shape: Shape) -> Tensor:
    try:
        with safe_open(path, "pt") as file:
            if KEY not in file.keys():  # noqa: SIM118, it is no dict
                names = ", ".join(file.keys()) or "nothing"
                raise ValueError(f"{path} has no {KEY}: it has {names}")
            found = file.get_tensor(KEY).long()
    except (OSError, SafetensorError) as error:
        raise ValueError(f"{path} cannot be read as safetensors: {error}") from error
    if found.dim() == 3:
        found = found[:, 0]
    if found.dim() != 2 or found.shape[1] != shape.top_k or not len(found):
        raise ValueError(
            f"{KEY} of {path} is {list(found.shape)}: [tokens, {shape.top_k}] is needed, or "
            f"[tokens, layers, {shape.top_k}]"
        )
    if int(found.min()) < 0 or int(found.max()) >= shape.num_experts:
        raise ValueError(
            f"{KEY} of {path} has ids from {int(found.min())} to {int(found.max())}, and the block "
            f"has {shape.num_experts} experts"
        )
    ordered = found.sort(1).values
    if bool((ordered[:, 1:] == ordered[:, :-1]).any()):
        raise ValueError(f"{KEY} of {path} names an expert twice for one token")
    return found


@torch.no_grad()
def impose(block: nn.Module, x: Tensor, index: Tensor) -> None:
    """Makes the block's router choose `index` [T, K] for x [1, T, H]; both are changed in place.

    Logits become the first E columns of x: 4 for a token's best choice, down to more than 2 for its
    last, and at most 1 for the others.

    Raises:
        ValueError: the block has no router weight [E, H], or more than one, or H is below E.
    """
    (_, tokens, hidden), top_k = x.shape, index.shape[1]
    routers = [
        p for name, p in block.named_parameters()
        if name in ("gate.weight", "router.weight") and p.dim() == 2 and p.shape[1] == hidden
    ]  # fmt: skip
    if len(routers) != 1 or len(routers[0]) > hidden:
        raise ValueError(f"{type(block).__name__} has no router whose choice can be imposed")
    (weight,) = routers
    experts = len(weight)
    weight.copy_(torch.eye(experts, hidden))
    logits = x[0, :, :experts].clamp(max=1)
    best = 4 - 2 / top_k * torch.arange(top_k, device=x.device).expand(tokens, top_k)
    x[0, :, :experts] = logits.scatter(1, index.to(x.device), best.to(x.dtype))


def load(index: Tensor, experts: int) -> float:
    """Rows of the busiest expert beside the mean."""
    counts = torch.bincount(index.flatten(), minlength=experts)
    return float(counts.max() / counts.float().mean())
