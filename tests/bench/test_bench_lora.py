"""The LoRA rows: the same adapters both ways, judged before they are timed."""

from __future__ import annotations

import pytest
import torch

from moe_patch.__main__ import main
from moe_patch.bench import lora as bench_lora
from moe_patch.bench.block import OURS
from moe_patch.models import decorated
from moe_patch.shapes import build


def inputs(block, device, dtype):
    hidden = block.experts.gate_up_proj.shape[2]
    return (torch.randn(64, hidden, device=device).to(dtype) for _ in range(2))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_rows_are_of_the_law(device, dtype):
    block = build("tiny_qwen3", dtype=dtype, device=device)
    blocks = bench_lora.adapted(block, 4)
    assert list(blocks) == [bench_lora.FROZEN, bench_lora.PEFT, OURS]
    rows = bench_lora.check(block, blocks, *inputs(block, device, dtype))
    assert len(rows) == 6 and all(row.passed for row in rows), rows
    assert rows[0].ratio != 1  # not PEFT's own way twice
    trained = [[n for n, p in b.named_parameters() if p.requires_grad] for b in blocks.values()]
    assert trained[0] == [] and len(trained[1]) == 4 and trained[1] == trained[2]


@pytest.mark.parametrize("what", ["gate_up_low_rank", "down_low_rank"])
def test_a_forgotten_adapter_fails(device, monkeypatch, what):
    block = build("tiny_qwen3", device=device)
    blocks = bench_lora.adapted(block, 4)
    fused = decorated.fused_experts

    def broken(*args, **options):
        a, b = options[what]
        return fused(*args, **options | {what: (a, 0.99 * b)})

    monkeypatch.setattr(decorated, "fused_experts", broken)
    rows = bench_lora.check(block, blocks, *inputs(block, device, torch.float32))
    assert not any(row.passed for row in rows if row.tensor == "output")


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["--shape", "llama4_scout"], "grouped_mm, which llama4_scout has not"),
        (["--mode", "forward"], "leave out --mode"),
        (["--graph"], "leave out --mode and --graph"),
    ],
)
def test_usage(capsys, monkeypatch, arguments, words):
    monkeypatch.setattr("moe_patch.commands.running.device", lambda: "cuda")
    assert main(["bench", "--lora", *arguments]) == 2
    error = capsys.readouterr().err
    assert words in error and error.count("\n") == 1


@pytest.mark.gpu
def test_times_and_memory():
    result = bench_lora.bench_lora("qwen3_30b", 64, budget_ms=200)
    assert result.report.passed, result.report
    found = {t.implementation: t for t in result.timings}
    assert found[OURS].speedup == 1 and found[OURS].peak_mb < found[bench_lora.PEFT].peak_mb
