"""Properties of cards by which kernels choose."""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch

from ..compat import has_tensor_descriptor, interpreted


class Chip(NamedTuple):
    """Properties of one device."""

    arch: str
    """sm_90, gfx942; empty where there is no card."""
    shared: int
    """Bytes of shared memory that a program may use."""
    tma: bool = False
    """Boxes of a tensor travel through the Tensor Memory Accelerator."""
    wgmma: bool = False
    """Products of a warpgroup, which Hopper alone has."""
    fp8: bool = False
    """Products of e4m3, and its conversion to other dtypes."""
    ptx: bool = False
    """Kernels may hold PTX: the chip is NVIDIA's, and they are not interpreted."""

    @property
    def small(self) -> bool:
        """Whether tiles have to do with the 64 to 100 KB of consumer cards and of CDNA."""
        return self.shared < 160_000


def nvidia(capability: int, shared: int) -> Chip:
    """Chip of compute capability 8.0, 9.0 ..., given as 80, 90 ..."""
    return Chip(
        f"sm_{capability}",
        shared,
        tma=capability >= 90 and has_tensor_descriptor(),
        wgmma=capability == 90,
        fp8=capability >= 89,
        ptx=not interpreted(),
    )


def amd(arch: str) -> Chip:
    """Chip of an architecture as gfx942. Triton's AMD backend has neither descriptors nor e4m3."""
    return Chip(arch, 64 * 1024)


def _card(device: torch.device) -> torch.device | None:
    """The card of a device, if it has one; of meta, where calls are rehearsed, the current card. It
    is asked once: where cards differ, some of what is compiled ahead is not needed."""
    if device.type == "meta" and torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return device if device.type == "cuda" else None


@functools.cache
def chip(device: torch.device) -> Chip:
    """Chip of a device; a machine may have several kinds."""
    card = _card(device)
    if card is None:
        return Chip("", 1 << 20)
    found = torch.cuda.get_device_properties(card)
    if torch.version.hip:
        return amd(found.gcnArchName.split(":")[0])
    return nvidia(10 * found.major + found.minor, found.shared_memory_per_block_optin)


@functools.cache
def multiprocessors(device: torch.device) -> int:
    """How many programs run at a time that fill one each; 1 where kernels are only compiled."""
    if device.type != "cuda":
        return 1
    return torch.cuda.get_device_properties(device).multi_processor_count


def programs(device: torch.device, tiles: int) -> tuple[int]:
    """Grid of a kernel whose programs take tiles until none is left."""
    return (min(multiprocessors(device), tiles),)


def name(device: torch.device) -> str:
    """The card's, as its maker calls it; empty where there is no card."""
    card = _card(device)
    return torch.cuda.get_device_name(card) if card else ""
