"""Every kernel compiles for every architecture that is promised, fits its memory, without a GPU."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from texts import forgets_steps

ROOT = Path(__file__).resolve().parents[2]
ROUTING = {"topk_kernel", "topk_backward_kernel", "count_kernel", "place_kernel"}
DECODE = {"decode_gate_up_kernel", "decode_down_kernel"}
DECODE_4_BITS = {"decode_gate_up_kernel", "decode_down_packed_kernel"}
GROUPED = {"gate_up_kernel", "grouped_gemm_kernel", "dgate_kernel", "dw_kernel"}
KERNELS = ROUTING | DECODE | GROUPED | {"combine_kernel", "sum_partials_kernel"}
HOPPER = {f"{name}_hopper_kernel" for name in ("fp8", "gate_up", "gemm", "dgate", "dw")}
HOPPER |= {"quantize_kernel"}
TURNED = {"gemm_turned_kernel"}
PACKED = GROUPED - {"dw_kernel"} | {"unpack_kernel"}
IN_REGISTERS = {
    f"{product}_{how}_kernel"
    for product in ("gate_up", "gemm")
    for how in ("packed", "packed_roles", "pairs")
} | {"in_steps_kernel"}
FP8 = {"fp8_gemm_kernel", "quantize_kernel", "dequantize_kernel"}
BASIC, IN_4_BITS = "qwen3_30b decode", "nf4_short nf4_many int4_short int4_decode"
LINE = re.compile(
    r"(\w+) (\w+) \w+ (\w+) .*: registers .*, spills ([\d,-]+), shared (\d+), binary (\w{12}),"
)


def elsewhere(*case):
    """A case for machines with a GPU, which have the cores for it."""
    return pytest.param(*case, marks=pytest.mark.gpu)


@pytest.mark.long
@pytest.mark.parametrize(
    "chips, shapes, kernels",
    [
        ("sm_100 gfx950", "middle", KERNELS - ROUTING - DECODE),
        elsewhere("sm_86 sm_89 sm_103 sm_121", "middle", KERNELS - ROUTING - DECODE),
        ("sm_80 gfx942", BASIC, KERNELS),
        ("sm_80", "lora_turned", GROUPED),
        elsewhere("sm_80 sm_86 sm_120", "lora lora_wide lora_turned", GROUPED),
        ("sm_89", "nf4_lora mxfp4_decode int4_short", PACKED | DECODE_4_BITS),
        elsewhere("gfx942", "nf4_lora mxfp4_decode int4_short", PACKED | DECODE_4_BITS),
        ("sm_120", "lora fp8_dsv3", GROUPED | FP8),
        (
            "sm_90",
            f"{BASIC} gpt_oss_decode fp8_decode fp8_short {IN_4_BITS} fp8_lora",
            KERNELS | HOPPER | TURNED | IN_REGISTERS | DECODE_4_BITS | {"row_sums_kernel"},
        ),
        elsewhere(
            "sm_90", "lora_wide", {"grouped_gemm_kernel"} | HOPPER - FP8 - {"fp8_hopper_kernel"}
        ),
        elsewhere("sm_90", "gpt_oss llama4_scout one_token nemotron_h mxfp4 lora_turned", GROUPED),
    ],
    ids=lambda part: part if isinstance(part, str) else "",
)
def test_compiles_ahead_of_time(chips, shapes, kernels):
    from moe_patch.kernels import chips as known

    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    environment.pop("TRITON_INTERPRET", None)
    command = [sys.executable, str(ROOT / "tests/tools/aot.py"), *chips.split()]
    command += ["--shape", *shapes.split()]
    # routing is in every shape, alike but for numbers; chips compile it as their neighbours do
    command += ["--routing", *(shape for shape in shapes.split() if shape in BASIC.split())]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "SERIALISED" not in done.stdout, "ptxas serialised the tensor-core instructions"
    assert "UNREAD BARRIER" not in done.stdout, "its memory is given to something else"
    assert "FORGETS STEPS" not in done.stdout, "each tile begins at the first stage again"
    assert "NAMES ITS SOURCE" not in done.stdout, "its digest is that of this folder alone"
    assert "ASKS LATE" not in done.stdout, "a token waits for x before it asks for weights"
    found = [LINE.match(line).groups() for line in done.stdout.splitlines()]
    for chip in chips.split():
        compiled = {kernel for name, _, kernel, *_ in found if name == chip}
        assert compiled >= kernels, chip
    assert len({digest for *_, digest in found}) > len(found) // 2
    limits = {"sm_80": 166_912, "sm_90": 232_448, "sm_100": 232_448, "sm_103": 232_448}
    for chip, shape, kernel, spills, shared, _ in found:
        limit = known.amd(chip).shared if chip.startswith("gfx") else limits.get(chip, 101_376)
        assert int(shared) <= limit, (chip, kernel)
        # bytes, outside the loop: docs/kernels.md
        large = shape.startswith("fp8") and kernel.endswith("hopper_kernel")
        clamped = {"gpt_oss": 192, "mxfp4": 200} if kernel == "dgate_kernel" else {}
        most = 448 if large else clamped.get(shape, 128)
        assert all(int(each) < most for each in spills.split(",") if each != "-"), (chip, kernel)


TILES = """
  scf.for %at = %first to %total step %programs {carry} : i32 {{
    scf.for %i = %c0 to %c16 step %c1 : i32 {{
      ttng.wait_barrier %full, %phase : !ttg.memdesc<1xi64>
    }} loc(#1)
  }} loc(#2)
"""


def test_a_step_that_no_tile_hands_to_the_next_is_found():
    """As in the kernel's IR, of Triton 3.6 and 3.7, that gave the tool its reason."""
    assert forgets_steps(TILES.format(carry=""))
    assert not forgets_steps(TILES.format(carry="iter_args(%step = %c0) -> (i32)"))
    assert not forgets_steps(TILES.format(carry="").replace("ttng.wait", "ttng.arrive"))
