"""The model of expert parallelism on more GPUs: volumes by hand, and what it refuses."""

from __future__ import annotations

import pytest

from moe_patch.bench import scaling
from moe_patch.bench.distributed import Measured
from moe_patch.bench.kind import write_csv
from moe_patch.shapes import find


@pytest.fixture
def file(tmp_path):
    """As if two GPUs ran: products in 2 ms, an all-reduce in 1, at 100 and 200 GB/s."""

    def row(task, ms, **more):
        return Measured(task, "qwen3_30b", "5.17.0", 2, 1, 8192, ms, **more)

    rows = [row("ep block forward", 3.0), row("all_reduce", 1.0, gb_s=100.0)]
    write_csv([*rows, row("all_to_all", 1.0, gb_s=200.0)], path := tmp_path / "rates.csv")
    return path


def test_volumes_and_times_by_hand(file):
    found = {(layer.way, layer.ranks): layer for layer in scaling.layers(scaling.read(file))}
    mb = 8192 * 2048 * 2 / 1e6  # hidden states
    two = found["all-reduce", 2]
    assert two.compute_ms == pytest.approx(2.0) and two.moved_mb == pytest.approx(mb)
    assert two.network_mb == 0 and two.comm_ms == pytest.approx(mb / 100)
    assert two.tokens_s == pytest.approx(8192e3 / (2 + mb / 100))
    assert found["all-reduce", 8].compute_ms == pytest.approx(0.5)
    many = found["all-reduce", 64]  # 8 hosts of 8: an eighth goes around 8 hosts
    assert many.network_mb == pytest.approx(2 * mb / 8 * 7 / 8)
    assert many.moved_mb == pytest.approx(2 * mb * 7 / 8 + many.network_mb)
    assert many.comm_ms == pytest.approx(2 * mb * 7 / 8 / 100 + many.network_mb / 50)
    own = found["all-to-all", 64]  # 8 slots a token, there and back, 56 of 64 to other hosts
    assert own.compute_ms == pytest.approx(4.0)
    assert own.network_mb == pytest.approx(16 * mb * 56 / 64)
    assert own.comm_ms == pytest.approx(16 * mb * 7 / 64 / 200 + own.network_mb / 50)
    assert 0.5 < own.share < 1
    most = found["all-to-all", 512]  # 128 experts: four copies
    assert most.group == 128 and most.tokens_s < 8 * own.tokens_s


def test_rates_are_of_the_products(file):
    rates = scaling.read(file)
    assert rates.flops_ms * 2.0 == pytest.approx(find("qwen3_30b").flops(8192) / 2)
    assert scaling.checked(rates, [rates])[0][2] == 3.0


def test_a_file_cut_short_is_refused(file, tmp_path):
    lines = file.read_text().splitlines()
    (tmp_path / "short.csv").write_text("\n".join(lines[:-1]) + "\n")
    for name, word in (("short.csv", "all_to_all"), ("none.csv", "none.csv")):
        with pytest.raises(ValueError, match=word):
            scaling.read(tmp_path / name)


def test_command_prints_the_tables(file, capsys):
    from moe_patch.__main__ import main

    assert main(["bench", "--scaling", str(file), str(file), "--network", "25"]) == 0
    out = capsys.readouterr().out
    assert "25 GB/s" in out and "2 GPUs: model" in out and "measured 3.000" in out
