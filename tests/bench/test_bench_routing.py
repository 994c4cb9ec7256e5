"""Routing that a bench imposes: who chooses whom, through Hugging Face's own routers."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import save_file

from moe_patch.__main__ import main
from moe_patch.bench import block as bench
from moe_patch.bench import routing
from moe_patch.shapes import build, find


def chosen(block, x, experts):
    """Ids that the block's own router chooses, best first."""
    router = block.gate if hasattr(block, "gate") else block.router
    found = []
    hook = router.register_forward_hook(lambda module, arguments, out: found.append(out))
    with torch.no_grad():
        block(x)
    hook.remove()
    logits = next(t for t in found[0] if t.shape[-1] == experts)
    return logits.float().reshape(-1, experts)


@pytest.mark.parametrize("how", routing.NAMES)
@pytest.mark.parametrize("name", ["tiny_qwen3", "tiny_llama4"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_router_chooses_what_is_imposed(name, how, dtype):
    size, tokens = find(name), 200
    block = build(size, dtype=dtype)
    x = torch.randn(1, tokens, size.hidden_size).to(dtype)
    index = routing.choices(how, size, tokens)
    routing.impose(block, x, index)
    assert torch.equal(chosen(block, x, size.num_experts).topk(size.top_k).indices, index)


def test_how_skewed_they_are():
    size, tokens = find("qwen3_30b"), 4096
    counts = {
        how: torch.bincount(routing.choices(how, size, tokens).flatten(), minlength=128)
        for how in routing.NAMES
    }
    assert all(int(count.sum()) == tokens * 8 for count in counts.values())
    assert int(counts["hot"][0]) == tokens  # 16 times the mean of 8 choices among 128
    assert routing.load(routing.choices("hot", size, tokens), 128) == 16
    assert 190 < int(counts["hot"][1:].float().mean()) < 260
    zipf = counts["zipf"].float()
    assert zipf[0] > 2 * zipf[7] > 4 * zipf[60] > 0
    assert counts["uniform"].float().std() < 30
    for how in routing.NAMES:
        index = routing.choices(how, size, 50).sort(1).values
        assert bool((index[:, 1:] > index[:, :-1]).all()), "none twice"
    assert routing.load(torch.tensor([[0, 1], [0, 2]]), 4) == 2.0


def test_a_file(tmp_path):
    size, path = find("tiny_qwen3"), str(tmp_path / "routing.safetensors")
    index = torch.tensor([[3, 1], [0, 7], [5, 2]], dtype=torch.uint8)
    save_file({"top_k_index": index}, path)
    assert routing.choices(path, size, 7).tolist() == [*index.tolist(), *index.tolist(), [3, 1]]
    save_file({"top_k_index": torch.stack([index, index.flip(1)], 1)}, path)  # two layers
    assert routing.choices(path, size, 2).tolist() == index[:2].tolist()


@pytest.mark.parametrize(
    "tensors, sentence",
    [
        ({"index": torch.zeros(3, 2)}, "has no top_k_index: it has index"),
        ({"top_k_index": torch.zeros(3, 3)}, r"is \[3, 3\]: \[tokens, 2\] is needed"),
        ({"top_k_index": torch.zeros(0, 2)}, r"is \[0, 2\]"),
        ({"top_k_index": torch.tensor([[0, 8]])}, "ids from 0 to 8, and the block has 8 experts"),
        ({"top_k_index": torch.tensor([[0, -1]])}, "ids from -1 to 0"),
        ({"top_k_index": torch.tensor([[4, 4]])}, "names an expert twice for one token"),
    ],
)
def test_files_that_do_not_fit(tmp_path, tensors, sentence):
    path = str(tmp_path / "routing.safetensors")
    save_file(tensors, path)
    with pytest.raises(ValueError, match=sentence):
        routing.choices(path, find("tiny_qwen3"), 4)


def test_what_is_no_routing(tmp_path, capsys):
    path = tmp_path / "text"
    path.write_text("nothing of the kind")
    with pytest.raises(ValueError, match="cannot be read as safetensors"):
        routing.choices(str(path), find("tiny_qwen3"), 4)
    assert main(["bench", "block", "--shape", "tiny_qwen3", "--routing", "even"]) == 2
    said = capsys.readouterr().err
    assert "'even', neither a file nor one of uniform, zipf, hot" in said and said.count("\n") == 1
    with pytest.raises(ValueError, match="Linear has no router"):
        routing.impose(torch.nn.Linear(4, 4), torch.zeros(1, 2, 4), torch.zeros(2, 1).long())


def test_tables_and_rows_say_which_routing():
    rows = [
        bench.Timing("tiny", 4, "float32", "forward", name, 1, 1, 1, 1, 1, 1, routing=how)
        for how in ("uniform", "zipf")
        for name in ("moe_patch", "HF grouped_mm")
    ]
    titles = [table.title for table in bench.timing_tables(rows)]
    assert [title.endswith("zipf routing") for title in titles] == [False, True]


@pytest.mark.gpu
@pytest.mark.parametrize("how", ["zipf", "hot"])
def test_bench_runs_with_it(how):
    found = bench.bench("tiny_qwen3", 512, routing=how, compiled=False, budget_ms=20)
    assert found.report.passed and {t.routing for t in found.timings} == {how}
    assert "x the mean" in found.notes[0]
