"""Routing: its shapes, files, and the batches that it becomes."""

from __future__ import annotations

import pytest
import torch

from moe_patch import Routing
from moe_patch.routing.recorded import smallest


def ids(*shape: int) -> torch.Tensor:
    return torch.randint(0, 8, shape, dtype=torch.uint8)


@pytest.mark.parametrize("weights", [False, True])
@pytest.mark.parametrize("masked", [False, True])
def test_a_file_gives_it_back(tmp_path, weights, masked):
    more = {"top_k_weights": torch.rand(6, 3, 2)} if weights else {}
    more |= {"mask": torch.arange(6) > 1} if masked else {}
    routing = Routing(
        ids(6, 3, 2), num_experts=8, layers=("a", "b", "c"), forwards=[(2, 3)], **more
    )
    routing.save(tmp_path / "routing.safetensors")
    found = Routing.load(tmp_path / "routing.safetensors")
    assert torch.equal(found.top_k_index, routing.top_k_index)
    for name in ("mask", "top_k_weights"):
        mine, other = getattr(routing, name), getattr(found, name)
        assert other is None if mine is None else torch.equal(mine, other)
    assert found.num_experts == 8 and found.layers == ("a", "b", "c") and len(found) == 6
    assert found.forwards == [(2, 3)] and repr(found) == repr(routing)


def test_files_that_are_none(tmp_path):
    file = tmp_path / "routing.safetensors"
    with pytest.raises(ValueError, match="cannot be read as safetensors"):
        Routing.load(file)
    file.write_bytes(b"nothing")
    with pytest.raises(ValueError, match="cannot be read as safetensors"):
        Routing.load(file)
    from safetensors.torch import save_file

    save_file({"x": torch.ones(1)}, file)
    with pytest.raises(ValueError, match=r"has no top_k_index: it has \['x'\]"):
        Routing.load(file)


def test_a_generation_becomes_the_batch_of_a_trainer():
    """A prompt of 3 tokens and two steps, of two sequences; the first prompt token is padding."""
    index = torch.arange(10, dtype=torch.uint8).view(10, 1, 1)
    mask = torch.ones(10, dtype=torch.bool)
    mask[0] = False
    whole = Routing(index, mask=mask, forwards=[(2, 3), (2, 1), (2, 1)]).as_batch(6)
    assert whole.forwards == [(2, 6)]
    rows = whole.top_k_index.view(2, 6)
    assert rows.tolist() == [[0, 1, 2, 6, 8, 0], [3, 4, 5, 7, 9, 0]]
    assert whole.mask.view(2, 6).tolist() == [
        [False, True, True, True, True, False], [True, True, True, True, True, False]
    ]  # fmt: skip
    packed = whole.packed()
    assert packed.top_k_index.flatten().tolist() == [1, 2, 6, 8, 3, 4, 5, 7, 9]
    assert packed.mask is None and packed.forwards == [(1, 9)] and packed.packed() is packed


def test_what_an_engine_returns_for_each_sequence():
    sequences = [ids(2, 3, 2), ids(4, 3, 2)]
    left = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]])
    found = Routing.from_sequences(sequences, left, num_experts=8)
    rows, mask = found.top_k_index.view(2, 5, 3, 2), found.mask.view(2, 5)
    assert torch.equal(rows[0, 2:4], sequences[0]) and torch.equal(rows[1, :4], sequences[1])
    assert mask.sum().item() == 6 and not mask[0, :2].any() and not mask[:, 4].any()
    with pytest.raises(ValueError, match="there are 1 sequences, and attention_mask is"):
        Routing.from_sequences(sequences[:1], left)
    with pytest.raises(ValueError, match="sequence 1 has 4 tokens, and its row of .* 2"):
        Routing.from_sequences(sequences, left.new_tensor([[1, 1], [1, 1]]))


@pytest.mark.parametrize(
    "index, more, error, says",
    [
        (ids(4, 2), {}, ValueError, r"must be \[tokens, layers, K\], found shape \(4, 2\)"),
        (torch.rand(4, 2, 2), {}, TypeError, "top_k_index is torch.float32: expert ids are"),
        (ids(4, 2, 2), {"mask": torch.ones(3, dtype=torch.bool)}, ValueError, r"must be \[4\]"),
        (ids(4, 2, 2), {"mask": torch.ones(4)}, TypeError, "mask is torch.float32"),
        (ids(4, 2, 2), {"top_k_weights": torch.ones(4, 2, 1)}, ValueError, "top_k_weights must"),
    ],
    ids=("flat", "floats", "mask", "mask of floats", "weights"),
)
def test_what_does_not_fit_together(index, more, error, says):
    with pytest.raises(error, match=says):
        Routing(index, **more)


def test_batches_that_cannot_be():
    with pytest.raises(ValueError, match="forwards of one number of sequences, found none"):
        Routing(ids(4, 1, 1)).as_batch()
    with pytest.raises(ValueError, match="one number of sequences, found"):
        Routing(ids(4, 1, 1), forwards=[(1, 2), (2, 1)]).as_batch()
    with pytest.raises(ValueError, match="length is 3, and each sequence has 4 tokens"):
        Routing(ids(4, 1, 1), forwards=[(1, 4)]).as_batch(3)


def test_ids_take_the_smallest_integers():
    sizes = {8: torch.uint8, 256: torch.uint8, 257: torch.int16, 1 << 16: torch.int32}
    assert {experts: smallest(experts) for experts in sizes} == sizes
