"""What the tests of the stack around us share."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture
def process_group(device):
    """torch.distributed for one rank."""
    store = torch.distributed.HashStore()
    backend = "nccl" if device.type == "cuda" else "gloo"
    torch.distributed.init_process_group(backend, store=store, rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()
