"""Kernels in hopper/ on a CPU, with copies and warpgroups in an order that is drawn."""

from __future__ import annotations

import itertools
import random
import types
from collections import Counter
from dataclasses import replace

import gluon_on_cpu
import ptx_on_cpu
import pytest
import torch
from drawn_order import Deadlock, here
from gluon_on_cpu import on_cpu
from hopper import answers, copy_as
from ops import drawn_bytes, in_bytes

from moe_patch import reference
from moe_patch.kernels import chips, dgate, dw, fp8_gemm, gate_up, grouped_gemm, tiles
from moe_patch.kernels.activate import Activated
from moe_patch.kernels.hopper import fp8, stores
from moe_patch.kernels.low_rank import LowRank
from moe_patch.kernels.tiles import ROLES, Tile
from moe_patch.ops.grouped import sort

pytestmark = pytest.mark.skipif(not tiles.INTERPRET, reason="is for machines without a GPU")
DTYPE = torch.float16
EPS = torch.finfo(DTYPE).eps


@pytest.fixture(autouse=True)
def few_programs(monkeypatch):
    ptx_on_cpu.known()
    monkeypatch.setattr(chips, "multiprocessors", lambda device: 3)


@pytest.fixture(autouse=True)
def turns_are_counted_from_zero(monkeypatch):
    answers(monkeypatch)


@pytest.fixture
def plans(monkeypatch):
    """Plans of launches, each once; nothing is started."""
    asked, modules = [], (dw, gate_up, grouped_gemm)

    def launch(kernel, PLAN, **constants):
        asked.append(PLAN)
        return lambda grid, *args: None

    for module in modules:
        module._launch_on_hopper.cache_clear()
        monkeypatch.setattr(module, "Launch", launch)
    yield asked
    for module in modules:
        module._launch_on_hopper.cache_clear()


class Rows:
    """Slots in expert order, skewed and some of them dropped; perhaps of few experts among many."""

    def __init__(self, draw: random.Random, listed: int) -> None:
        torch.manual_seed(draw.randrange(1 << 30))
        self.experts, self.top_k = draw.randint(1, 4), draw.choice((1, 2))
        self.tokens = draw.choice((1, 30, 150, 260))
        size = self.tokens, self.top_k
        self.index = (torch.rand(size) ** draw.choice((1, 1, 4)) * self.experts).long()
        if draw.random() < 0.3:  # most experts have no rows
            self.index = torch.tensor(draw.sample(range(12), self.experts))[self.index]
            self.experts = 12
        if draw.random() < 0.4:
            self.index[torch.rand(size) < 0.2] = self.experts
        self._sort(listed)

    @classmethod
    def of(cls, counts: list[int], listed: int) -> Rows:
        """Tokens of one choice, so many for each expert."""
        rows = cls.__new__(cls)
        rows.experts, rows.top_k, rows.tokens = len(counts), 1, sum(counts)
        index = torch.arange(rows.experts).repeat_interleave(torch.tensor(counts))
        rows.index = index[torch.randperm(rows.tokens)][:, None]
        rows._sort(listed)
        return rows

    def _sort(self, listed: int) -> None:
        self.order, _ = sort(self.index, self.experts, DTYPE, listed)
        self.used = int(self.order.expert_offsets[-1])
        self.slot = self.order.row_to_slot[: self.used].long()
        self.expert = self.index.flatten()[self.slot]

    @property
    def slots(self) -> int:
        return self.tokens * self.top_k

    def times(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """x [used, K] times the weight [E, N, K] of each row's expert, in float64."""
        rows = torch.empty(self.used, weight.shape[1], dtype=torch.float64)
        for e in range(self.experts):
            rows[self.expert == e] = x[self.expert == e].double() @ weight[e].double().T
        return rows


def drawn_weight(draw, *size):
    weight = torch.randn(*size).to(DTYPE) * 0.1
    return weight.mT.contiguous().mT if draw.random() < 0.5 else weight


def drawn_tile(draw, listed, columns, scale, stages=None):
    fit = (2, 3, 4) if scale is None else (2, 3)
    return Tile(listed, columns, 64, ROLES, stages or draw.choice(fit), draw.choice((1, 2, 8)))


def drawn_update(draw, rows, n, k):
    """A low-rank update of weights [E, N, K], whose `side` is computed already, or None."""
    if draw.random() < 0.5:
        return None
    rank = 8 * draw.choice((1, 2, 3, 8, 9, 17))
    side = torch.randn(rows.slots, rank).to(DTYPE)
    side[rows.used :] = float("nan")
    a = torch.full((rows.experts, rank, k), float("nan"), dtype=DTYPE)
    return LowRank(a, drawn_weight(draw, rows.experts, n, rank), side)


def updated(rows, x, weight, update):
    """The product of rows x [used, K], in float64."""
    product = rows.times(x, weight)
    if update:
        product += rows.times(update.side[: rows.used], update.b)
    return product


def close(found, truth):
    error = (found.double() - truth).abs()
    return not found.numel() or bool(
        (error <= EPS * (truth.abs() + 0.02 * truth.abs().max())).all()
    )


def drawn_rows(draw, kind):
    """(rows, how high listed tiles are); "tailed": many tiles have 129 to 144 rows."""
    listed = draw.choice((64, 128))
    if kind == "any" or (kind == "turned" and draw.random() < 0.5):
        return Rows(draw, listed), listed
    few, more = draw.randint(130, 143), 256 + draw.randint(1, 32)
    counts = 129, 144, 145, few, more, 288, 289, 384 + draw.randint(1, 48)
    return Rows.of(draw.sample(counts, 3), listed), listed


def gemm(seed, stages=None, kind="any"):
    """(out, truth, the rows); "turned": of e4m3 weights whose columns are contiguous."""
    draw = random.Random(seed)
    rows, listed = drawn_rows(draw, kind)
    n, k = 8 * draw.randint(32, 80), 64 * draw.choice((4, 5, 6, 35))
    x = torch.randn(rows.slots, k).to(DTYPE)
    if kind == "turned":
        n = n // 16 * 16
        weight, scale, wide = in_bytes(draw, torch.randn(rows.experts, k, n).to(DTYPE).mT * 0.1)
    else:
        weight, scale, wide = drawn_bytes(draw, drawn_weight(draw, rows.experts, n, k))
    out = torch.full((rows.slots, n), 7.0, dtype=DTYPE)
    tile = drawn_tile(draw, listed, 256, scale, stages)
    update = drawn_update(draw, rows, n, k)
    with on_cpu(seed) as names:
        assert grouped_gemm._on_hopper(x, weight, rows.order, out, tile, update, scale)
    turned = scale is not None and weight.stride(2) != 1
    assert names == ["gemm_turned_kernel" if turned else "gemm_hopper_kernel"]
    return out, updated(rows, x[: rows.used], wide, update), rows


@pytest.mark.parametrize("kind", ["any", "tailed", "turned"])
@pytest.mark.parametrize("seed", range(12))
def test_gemm(seed, kind):
    out, truth, rows = gemm(seed, kind=kind)
    assert close(out[: rows.used], truth) and bool((out[rows.used :] == 7).all())


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("rank", [4, 20])
def test_a_rank_that_no_box_takes_is_left(rank, turned):
    rows = Rows(random.Random(0), 128)

    def zeros(*size):
        return torch.zeros(*size, dtype=DTYPE)

    x, weight = zeros(rows.slots, 256), zeros(rows.experts, 256, 256)
    a, b, side = zeros(rows.experts, rank, 256), zeros(rows.experts, 256, rank), zeros(len(x), rank)
    weight = weight if turned else weight.mT
    with on_cpu() as names:
        tile, update = Tile(128, 256, 64, ROLES, 4), LowRank(a, b, side)
        assert not grouped_gemm._on_hopper(x, weight, rows.order, x.clone(), tile, update, None)
    assert not names


def test_fp8_weights_that_are_not_widened_on_their_way_are_left():
    """Scales that do not lie as their weight does, and a block of gates and ups."""
    rows = Rows(random.Random(0), 128)
    weight = torch.zeros(rows.experts, 320, 512).to(torch.float8_e4m3fn)
    scale = torch.ones(rows.experts, 4, 3).mT
    x, out = torch.zeros(rows.slots, 512, dtype=DTYPE), torch.zeros(rows.slots, 320, dtype=DTYPE)
    with on_cpu() as names:
        tile = Tile(128, 256, 64, ROLES, 3)
        assert not grouped_gemm._on_hopper(x, weight, rows.order, out, tile, None, scale)
        act = torch.zeros(rows.slots, 160, dtype=DTYPE)
        result = Activated(act, act[:0], None, act, False, "silu None 1.0 0.0 concatenated", False)
        tile, scale = Tile(128, 128, 64, ROLES, 3), scale.contiguous()
        assert not gate_up._on_hopper(x, weight, rows.order, result, tile, None, scale)
    assert not names


@pytest.mark.parametrize("kind", ["any", "tailed"])
@pytest.mark.parametrize("seed", range(12))
def test_gate_up(seed, kind):
    draw = random.Random(100 + seed)
    rows, listed = drawn_rows(draw, kind)
    inner, k = 8 * draw.randint(16, 40), 64 * draw.choice((4, 5, 6, 35))
    x = torch.randn(rows.tokens, k).to(DTYPE)
    inner = draw.choice((inner, 128 * draw.randint(1, 2)))
    weight = drawn_weight(draw, rows.experts, 2 * inner, k)
    weight, scale, wide = drawn_bytes(draw, weight) if inner % 128 == 0 else (weight, None, weight)
    update = drawn_update(draw, rows, 2 * inner, k)
    keep, on_input = draw.random() < 0.7, draw.random() < 0.4
    act = torch.full((rows.slots, inner), 7.0, dtype=DTYPE)
    pre = torch.full((rows.slots if keep else 0, 2 * inner), 7.0, dtype=DTYPE)
    by = torch.rand(rows.tokens, rows.top_k)
    activation = draw.choice(("silu None 1.0 0.0 concatenated", "silu 7.0 1.702 1.0 concatenated"))
    tile = drawn_tile(draw, listed, 128, scale)
    with on_cpu(seed) as names:
        result = Activated(act, pre, None, by, on_input, activation, False)
        assert gate_up._on_hopper(x, weight, rows.order, result, tile, update, scale)
    assert names == ["gate_up_hopper_kernel"]
    truth = updated(rows, x[rows.slot // rows.top_k], wide, update)
    assert not keep or close(pre[: rows.used], truth)
    if on_input:
        truth *= by.flatten()[rows.slot, None].double()
    assert close(act[: rows.used], reference.glu(truth, activation))
    assert bool((act[rows.used :] == 7).all()) and bool((pre[rows.used :] == 7).all())


@pytest.mark.parametrize("rows", [95, 96])
@pytest.mark.parametrize("keep", [False, True])
def test_tiles_have_tails_and_the_pre_activation_is_kept_where_it_is_wanted(plans, rows, keep):
    order, _ = sort(torch.arange(2).repeat_interleave(rows)[:, None], 2, DTYPE, 128)
    x, weight = torch.zeros(2 * rows, 256, dtype=DTYPE), torch.zeros(2, 256, 256, dtype=DTYPE)
    act = torch.zeros(2 * rows, 128, dtype=DTYPE)
    pre = torch.zeros(2 * rows if keep else 0, 256, dtype=DTYPE)
    activation = "silu None 1.0 0.0 concatenated"
    result = Activated(act, pre, None, torch.ones(2 * rows, 1), False, activation, False)
    tile = Tile(128, 128, 64, ROLES, 4)
    assert gate_up._on_hopper(x, weight, order, result, tile, None, None)
    tile, out = replace(tile, bn=256), torch.zeros(2 * rows, 256, dtype=DTYPE)
    assert grouped_gemm._on_hopper(x, weight, order, out, tile, None, None)
    tail = tiles.TAIL if rows == 96 else 0
    first, second = plans
    assert (first.save_pre, first.tail, second.tail) == (keep, tail, tail)


@pytest.mark.parametrize("few", [0, 512])
@pytest.mark.parametrize("seed", range(12))
def test_dw(monkeypatch, seed, few):
    draw = random.Random(200 + seed)
    monkeypatch.setattr(dw, "FEW", few)
    rows = Rows(draw, 128)
    m, n = 8 * draw.randint(1, 50), 8 * draw.randint(1, 50)
    turned = draw.random() < 0.5
    if draw.random() < 0.3:  # more row tiles than walk side by side
        m = 2200
    p, q = torch.randn(rows.tokens, m).to(DTYPE), torch.randn(rows.slots, n).to(DTYPE)
    q[rows.used :] = float("nan")
    p[0] = float("nan")  # of its token's experts alone
    add, kind = draw.random() < 0.3, draw.choice((DTYPE, DTYPE, torch.float32))
    start = torch.randn(rows.experts, m, n).to(kind)
    out, between = copy_as(start, turned, draw.choice((0, 0, 5, 8)))
    tile = Tile(128, 256, 64, ROLES, draw.choice((2, 3, 4)))
    with on_cpu(seed) as names:
        assert dw._on_hopper(p, q, rows.order, rows.top_k, out, add, tile)
    assert names == ["dw_hopper_kernel"] and bool((between == 7).all())
    truth = start.double() if add else torch.zeros(start.shape, dtype=torch.float64)
    for e in range(rows.experts):
        of = rows.expert == e
        token = rows.slot[of] // rows.top_k
        truth[e] += p[token].double().T @ q[: rows.used][of].double()
        if bool((token == 0).any()):
            assert bool(out[e].isnan().all())
        else:
            assert close(out[e], truth[e])


@pytest.mark.parametrize("add", [False, True])
@pytest.mark.parametrize("few", [0, 512])
@pytest.mark.parametrize("used", [(), (3,), (0, 11), (0, 5, 11)])
def test_dw_where_many_experts_have_no_rows(monkeypatch, few, add, used):
    """A program then has several such tiles one after the other."""
    monkeypatch.setattr(dw, "FEW", few)
    monkeypatch.setattr(chips, "multiprocessors", lambda device: 2)
    torch.manual_seed(0)
    index = torch.full((100, 1), 12)
    if used:
        index = torch.tensor(used)[torch.randint(len(used), (100, 1))]
    order, _ = sort(index, 12, DTYPE, 128)
    p, q = torch.randn(100, 200).to(DTYPE), torch.randn(100, 264).to(DTYPE)
    start = torch.randn(12, 200, 264).to(DTYPE)
    out = start.clone()
    with on_cpu():
        assert dw._on_hopper(p, q, order, 1, out, add, Tile(128, 256, 64, ROLES, 3))
    for expert, (begin, end) in enumerate(itertools.pairwise(order.expert_offsets.tolist())):
        truth = start[expert].double() * add
        truth += p[order.row_to_slot[begin:end].long()].double().T @ q[begin:end].double()
        assert close(out[expert], truth) if end > begin else torch.equal(out[expert], truth.half())


@pytest.mark.parametrize("add, few", [(False, 8), (True, 16)])
@pytest.mark.parametrize("boxed", [False, True])
def test_few_rows_of_a_weight_gradient(monkeypatch, plans, add, few, boxed):
    """Twice as many rows are few where the result is read, too; boxes that it is read into take the
    place of a stage."""
    monkeypatch.setattr(dw, "FEW", 8)
    for rows in (few - 1, few):
        index = torch.arange(2).repeat_interleave(rows)[:, None]
        order, _ = sort(index, 2, DTYPE, 128)
        p, q = torch.zeros(2 * rows, 64, dtype=DTYPE), torch.zeros(2 * rows, 256, dtype=DTYPE)
        out, _ = copy_as(torch.zeros(2, 64, 256, dtype=DTYPE), False, 0 if boxed else 8)
        assert dw._on_hopper(p, q, order, 1, out, add, Tile(128, 256, 64, ROLES, 4))
    stages = 3 if add and boxed else 4
    assert [(plan.shared, plan.boxed, plan.stages) for plan in plans] == [
        (True, boxed, stages),
        (False, boxed, stages),
    ]


@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize(
    "rows, columns, turned", [(64, 64, False), (64, 128, False), (64, 64, True), (256, 64, True)]
)
def test_a_row_of_sums_is_written_by_16_bytes(rows, columns, turned, wide):
    """Each sum has one thread, of the warp that computes it. A thread has 16 bytes of a row, and
    the next thread those beside them."""
    by = stores._by_rows(rows, columns, wide, turned)
    bases = [*by.reg_bases, *by.lane_bases, *by.warp_bases]
    row, column = ([each[dim] for each in bases if each[dim]] for dim in (0, 1))
    assert all(0 in each for each in bases)
    assert sorted(row) == [1 << i for i in range(rows.bit_length() - 1)]
    assert sorted(column) == [1 << i for i in range(columns.bit_length() - 1)]
    assert by.warp_bases == ([[0, 16], [0, 32]] if turned else [[16, 0], [32, 0]])
    assert len(by.lane_bases) == 5
    vector = 2 if wide else 3
    assert by.reg_bases[:vector] == [[0, 1 << i] for i in range(vector)]
    assert by.lane_bases[0] == [0, 1 << vector]  # no more of a row than that in one thread


@pytest.mark.parametrize("seed", range(12))
def test_dgate(seed):
    draw = random.Random(300 + seed)
    listed = draw.choice((64, 128))
    rows = Rows(draw, listed)
    inner, hidden = 8 * draw.randint(32, 70), 64 * draw.choice((4, 5, 6, 35))
    d_out = torch.randn(rows.tokens, hidden).to(DTYPE)
    weight, scales, wide = drawn_bytes(draw, drawn_weight(draw, rows.experts, inner, hidden))
    update = drawn_update(draw, rows, inner, hidden)
    pre = torch.randn(rows.slots, 2 * inner).to(DTYPE)
    by, on_input = torch.rand(rows.tokens, rows.top_k), draw.random() < 0.4
    activation = draw.choice(("silu None 1.0 0.0 concatenated", "silu 7.0 1.702 1.0 concatenated"))
    in_place = draw.random() < 0.5
    before = pre.clone()
    made = dgate.Made(
        pre if in_place else torch.full_like(pre, 7.0),
        torch.full((rows.slots, inner), 7.0, dtype=DTYPE),
        torch.full((rows.slots, -(-inner // 256)), 7.0),
    )
    tile = drawn_tile(draw, listed, 256, scales)
    unasked = {name: x.clone() for name, x in made._asdict().items() if draw.random() < 0.3}
    asked = made._replace(**{name: getattr(made, name)[:0] for name in unasked})
    with on_cpu(seed) as names:
        boxes = dgate._boxes(d_out, weight, scales, pre, tile, update)
        dgate._on_hopper(boxes, d_out, weight, rows.order, by, on_input, asked, tile, activation)
    assert names == ["dgate_hopper_kernel"]
    d_act = updated(rows, d_out[rows.slot // rows.top_k], wide, update)
    scale = by.flatten()[rows.slot, None].double().requires_grad_()
    x = before[: rows.used].double().requires_grad_()
    act = reference.glu(x * scale, activation) if on_input else reference.glu(x, activation) * scale
    d_x, d_scale = torch.autograd.grad(act, (x, scale), d_act)
    used = slice(rows.used)
    for name, kept in unasked.items():
        assert torch.equal(getattr(made, name), kept)  # nothing is written behind an empty tensor
    if "d_pre" not in unasked:
        assert close(made.d_pre[used], d_x)
    if "act" not in unasked:
        assert close(made.act[used], act.detach())
    if "d_scale" not in unasked:
        total = made.d_scale[used].double().sum(1)
        most = float(d_x.abs().sum(1).max() if rows.used else 1)
        assert torch.allclose(total, d_scale[:, 0], rtol=1e-3, atol=1e-3 * most)
    assert bool((made.act[rows.used :] == 7).all()) and bool((made.d_scale[rows.used :] == 7).all())


def fp8_on_hopper(monkeypatch, programs):
    """Lets FP8 products run in the kernel for Hopper, on so many programs."""
    hopper = chips.nvidia(90, 232_448)
    monkeypatch.setattr(fp8_gemm, "_hopper", lambda device: True)
    monkeypatch.setattr(chips, "chip", lambda device: hopper)
    monkeypatch.setattr(chips, "multiprocessors", lambda device: programs)


def fp8_operands(slots, experts, n, k):
    """((rows, their scales, a weight, its scales), both as they are in float64)."""
    x, weight = reference.quantize(torch.randn(slots, k)), torch.randn(experts, n, k)
    weight = reference.quantize_weight(weight)
    return (*x, *weight), *(reference.dequantize(*each, torch.float64) for each in (x, weight))


def fp8_close(found, truth):
    return torch.allclose(found.double(), truth, rtol=2**-8, atol=2e-2)


def activated_close(made, rows, truth):
    """Whether e4m3 and scales stand for the activation of what `rows` are before it."""
    found = reference.dequantize(*(each[rows] for each in made), torch.float64)
    return torch.allclose(found, reference.glu(truth), rtol=2**-4 + 2**-7, atol=2e-2)


@pytest.fixture
def loads(monkeypatch, forgetful):
    """Programs that load through TMA, one after the other."""
    found, load = [], gluon_on_cpu.FAKES["async_load"]

    def counted(*arguments, **more):
        found.append(int(here().program))
        load(*arguments, **more)

    monkeypatch.setitem(gluon_on_cpu.FAKES, "async_load", counted)
    gluon_on_cpu.forget()
    return found


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("activated", [False, True])
@pytest.mark.parametrize("masked", [False, True])
def test_fp8(monkeypatch, masked, activated, seed):
    """Tiles follow one another in one program. The last one has columns of both parts or of one."""
    draw = random.Random(4 * seed + 2 * masked + activated)
    torch.manual_seed(0)
    experts, k, n = 3, 384, 512 if activated else draw.choice((296, 424))
    fp8_on_hopper(monkeypatch, (1, 2, 16)[seed])
    if masked:
        slots, order = experts * 200, None
        counts = torch.tensor([0, 77, 200], dtype=torch.int32)
    else:
        rows = Rows(draw, 128)
        experts, slots, order = rows.experts, rows.slots, rows.order
    operands, wide, weights = fp8_operands(slots, experts, n, k)
    how = {"masked_m": counts} if masked else {"order": order}
    pre = torch.full((slots, n), 7.0, dtype=torch.bfloat16) if activated else None
    kind = (torch.bfloat16, torch.float32)[seed % 2]
    out = None if activated else torch.full((slots, n), 7.0, dtype=kind)
    act = "silu" if activated else None
    with on_cpu(5 + seed) as names:
        made = fp8_gemm.fp8_gemm(*operands, pre=pre, out=out, activation=act, **how)
    assert names == ["fp8_hopper_kernel"]
    if masked:
        parts = [(e, slice(200 * e, 200 * e + count)) for e, count in enumerate(counts.tolist())]
    else:
        ends = order.expert_offsets.tolist()
        parts = [(e, slice(*both)) for e, both in enumerate(zip(ends, ends[1:]))]
    for expert, part in parts:
        truth = wide[part] @ weights[expert].T
        assert fp8_close((pre if activated else out)[part], truth)
        if activated:
            assert activated_close(made, part, truth)


@pytest.mark.parametrize(
    "programs, rows, masked, halved",
    [
        (9, [600], False, 1),
        (7, [128, 60, 130], False, 1),
        (10, [520, 0, 40], False, 2),
        (16, [128, 60, 130], False, 8),
        (3, [600], False, 0),
        (15, [128, 60, 130], False, 0),
        (9, [77, 0, 128], True, 4),
        (40, [200, 130, 64], True, 10),
        (19, [200, 130, 64], True, 0),
        (3, [77, 0, 128], True, 4),
        (1, [64, 64, 64], True, 6),
        (3, [77, 0, 129], True, 0),
    ],
)
def test_fp8_halves_tiles(monkeypatch, loads, programs, rows, masked, halved):
    """A last round has one or two tiles, or there are more programs than tiles, or each masked
    expert has one row tile. The last column tile has no right part."""
    torch.manual_seed(0)
    fp8_on_hopper(monkeypatch, programs)
    parts = [[min(128, c - at) for at in range(0, c, 128)] for c in rows]
    # each tile's boxes of rows
    boxes = [-(-high // 64) if masked else 1 for tiles in parts for high in 2 * tiles]
    expert = torch.arange(len(rows)).repeat_interleave(200 if masked else torch.tensor(rows))
    if masked:
        how = {"masked_m": torch.tensor(rows, dtype=torch.int32)}
        inside = torch.arange(200).repeat(len(rows)) < how["masked_m"][expert]
    else:
        order, _ = sort(expert[torch.randperm(len(expert))][:, None], len(rows), DTYPE, 128)
        how, inside = {"order": order}, expert >= 0
    operands, wide, weights = fp8_operands(len(expert), len(rows), 296, 384)
    out = torch.empty(len(expert), 296, dtype=torch.bfloat16)
    truth = torch.einsum("rk,rnk->rn", wide, weights[expert])
    for seed in range(2):
        loads.clear()
        with on_cpu(seed):
            fp8_gemm.fp8_gemm(*operands, out=out.fill_(7.0), **how)
        # rows and two parts of the weight in each of three steps, or rows and one part, twice
        whole = len(boxes) - halved
        of_tiles = [b + 2 for b in boxes[:whole]] + [2 * b + 2 for b in boxes[whole:]]
        assert len(loads) == 3 * sum(of_tiles)
        assert fp8_close(out[inside], truth[inside])
        assert bool((out[~inside] == 7).all())
        assert masked or not order.taken.item()


@pytest.mark.parametrize("seed", range(8))
def test_masked_fp8_of_any_sizes(monkeypatch, seed):
    """Most experts may have no rows, and programs be more than tiles. Counts below zero are none,
    and those past the rows that there are all of them."""
    draw = random.Random(500 + seed)
    torch.manual_seed(seed)
    experts, m_max = draw.choice((1, 3, 20, 33, 64, 90)), draw.choice((1, 60, 128, 130, 300))
    k, n, activated = draw.choice((128, 384)), draw.choice((128, 296, 512)), draw.random() < 0.3
    n = 512 if activated else n
    fp8_on_hopper(monkeypatch, draw.choice((1, 2, 5, 8, 13)))
    kinds = (0, 0, -300, 1, m_max // 2, m_max, m_max + 50)
    some = min(1.0, 6 / experts)
    counts = [draw.choice(kinds) if draw.random() < some else 0 for _ in range(experts)]
    masked_m = torch.tensor(counts, dtype=torch.int32)
    operands, wide, weights = fp8_operands(experts * m_max, experts, n, k)
    found = torch.full((experts * m_max, n), 7.0, dtype=torch.bfloat16)
    how = {"pre": found, "activation": "silu"} if activated else {"out": found}
    with on_cpu(seed) as names:
        made = fp8_gemm.fp8_gemm(*operands, masked_m=masked_m, **how)
    assert names == ["fp8_hopper_kernel"]
    truth = (wide.view(experts, m_max, k) @ weights.mT).flatten(0, 1)
    inside = (torch.arange(m_max) < masked_m[:, None]).flatten()
    assert fp8_close(found[inside], truth[inside])
    assert bool((found[~inside] == 7).all())
    assert not activated or activated_close(made, inside, truth[inside])


@pytest.mark.parametrize("experts", [4, 70])
def test_masked_tiles_are_dealt_evenly(monkeypatch, loads, experts):
    """Four experts with 100 of 200 rows have four halves of tiles each, of which 8 programs have
    two each, whether or not 66 experts before and between them have no rows."""
    torch.manual_seed(0)
    fp8_on_hopper(monkeypatch, 8)
    counts = torch.zeros(experts, dtype=torch.int32)
    counts[:: experts // 4][:4] = 100
    operands, _, _ = fp8_operands(experts * 200, experts, 512, 256)
    out = torch.empty(experts * 200, 512, dtype=torch.bfloat16)
    with on_cpu():
        fp8_gemm.fp8_gemm(*operands, masked_m=counts.flip(0), out=out)
    # two boxes of rows and one part of the weight in each of two steps
    assert Counter(loads) == dict.fromkeys(range(8), 2 * 2 * 3)


@pytest.mark.parametrize("n, programs", [(296, 9), (512, 5), (512, 16)])
def test_a_brief_masked_launch_asks_early(monkeypatch, forgetful, n, programs):
    """Lines asked for are those that a program reads first, if every expert has rows; weights alone
    are brought with the policy of what is read once. Programs may be more than half tiles."""
    fp8_on_hopper(monkeypatch, programs)
    (early, read), ptx, load = ({}, {}), gluon_on_cpu.PTX, gluon_on_cpu.FAKES["async_load"]
    prefetch = ptx[fp8._PREFETCH.value]

    def asks(at):
        early[int(here().program)] = [int(each) for each in gluon_on_cpu.plain(at.at) // 384]
        return prefetch(at)

    def loads(box, at, *rest, **more):
        assert ("cache_policy" in more) == (box.block_shape == (128, 128))
        if box.block_shape == (128, 128):
            read.setdefault(int(here().program), int(at[0]))
        load(box, at, *rest, **more)

    monkeypatch.setattr(fp8, "_READ_ONCE", "policy")
    monkeypatch.setitem(ptx, fp8._PREFETCH.value, asks)
    monkeypatch.setitem(gluon_on_cpu.FAKES, "async_load", loads)
    gluon_on_cpu.forget()
    operands, _, _ = fp8_operands(3 * 200, 3, n, 384)
    out = torch.empty(600, n, dtype=torch.bfloat16)
    with on_cpu():
        fp8_gemm.fp8_gemm(*operands, masked_m=torch.tensor([1, 128, 40]), out=out)
    assert len(early) == min(programs, 4 * 3 * -(-n // 256)) and len(read) >= min(programs, 6)
    for program, line in read.items():
        assert early[program] == [min(line + i, 3 * n - 1) for i in range(128)]


@pytest.mark.parametrize(
    "experts, n, k, brief",
    [
        (4, 4096, 7168, True),
        (16, 4096, 7168, True),
        (17, 4096, 7168, False),
        (1, 128, 256, True),
        (1, 128, 240, False),
    ],
)
def test_which_masked_launches_are_brief(monkeypatch, experts, n, k, brief):
    monkeypatch.setattr(chips, "multiprocessors", lambda device: 132)
    assert fp8_gemm._brief(experts, n, k, None) == brief


@pytest.mark.parametrize("stages, more", [(1, 1), (2, 3), (4, 5)])
def test_halved_masked_tiles_have_a_stage_more(stages, more):
    """They fit into the memory of stages of rows and two column parts. Other launches have one plan
    alone."""
    masked, rows, activated = (
        fp8.plan(4096, 7168, 4, m_max, activate, 16, stages)
        for m_max, activate in ((256, False), (0, False), (256, True))
    )
    assert 2 * more <= 3 * stages, "a stage of rows and one part, or two"
    for brief in (False, True):
        plan = masked._replace(stages=more, column_parts=1, brief=brief)
        assert fp8.deeper(masked, brief) == plan
    assert fp8.deeper(rows, False) is None and fp8.deeper(activated, False) is None


@pytest.mark.parametrize("rows", [[60, 60, 60, 60], [20, 20, 180, 20]], ids=["even", "large"])
def test_dw_shares_its_tiles_where_an_expert_is_large(monkeypatch, rows):
    """Else they are dealt out; in both cases in the order that the sort has listed."""
    taken, language = [], gluon_on_cpu.FAKES["gl"]
    add = language.atomic_add

    def counted(pointer, value, mask=None, sem=""):
        taken.append(mask is None or bool(gluon_on_cpu.plain(mask).any()))
        return add(pointer, value, mask, sem)

    monkeypatch.setattr(language, "atomic_add", counted)
    monkeypatch.setattr(dw, "FEW", 0)
    index = torch.arange(4).repeat_interleave(torch.tensor(rows))[:, None]
    order, _ = sort(index, 4, DTYPE, 128)
    p, q = torch.randn(240, 200).to(DTYPE), torch.randn(240, 264).to(DTYPE)
    out = torch.full((4, 200, 264), 7.0, dtype=DTYPE)
    with on_cpu():
        assert dw._on_hopper(p, q, order, 1, out, False, Tile(128, 256, 64, ROLES, 3))
    tiles, programs = 4 * 2 * 2, 3
    # programs' first tiles are their own; each asks for two that there are not, and leaves
    shared = tiles - programs + 2 * programs + programs
    assert sum(taken) == (shared if rows[2] > 60 else 0)
    with on_cpu():
        again = replace(order, large_first=torch.full_like(order.large_first, 2))
        out.fill_(7)
        assert dw._on_hopper(p, q, again, 1, out, False, Tile(128, 256, 64, ROLES, 3))
    assert [bool((each == 7).all()) for each in out] == [True, True, False, True]


# what it would see


def broken(monkeypatch, name, function):
    """One of the ring's functions is another one."""
    gluon_on_cpu.forget()
    changed = types.SimpleNamespace(**vars(gluon_on_cpu.FAKES[name[0]]))
    setattr(changed, name[1], function)
    monkeypatch.setitem(gluon_on_cpu.FAKES, name[0], changed)


@pytest.fixture
def forgetful():
    yield
    gluon_on_cpu.forget()


def wrong_somewhere(**how):
    for seed in range(12):
        out, truth, rows = gemm(seed, **how)
        if not close(out[: rows.used], truth):
            return True
    return False


@pytest.mark.parametrize("kind", ["any", "turned"])
def test_nobody_waits_for_what_is_coming(monkeypatch, forgetful, kind):
    broken(monkeypatch, ("mbarrier", "wait"), lambda *_, **__: here().let_others())
    with pytest.raises((AssertionError, Deadlock)):
        assert not wrong_somewhere(kind=kind)


@pytest.mark.parametrize("kind", ["any", "turned"])
def test_a_warpgroup_that_releases_nothing_stops_all(monkeypatch, forgetful, kind):
    broken(monkeypatch, ("mbarrier", "arrive"), lambda *_, **__: here().let_others())
    with pytest.raises(Deadlock, match="waits for a barrier"):
        gemm(3, kind=kind)


def test_staged_sums_are_overwritten_before_they_are_stored(monkeypatch, forgetful):
    wait = gluon_on_cpu._store_wait
    broken(
        monkeypatch,
        ("tma", "store_wait"),
        lambda left: here().let_others() if left else wait(left),
    )
    assert wrong_somewhere()


def test_a_program_ends_before_its_sums_are_stored(monkeypatch, forgetful):
    broken(monkeypatch, ("tma", "store_wait"), lambda _: here().let_others())
    with pytest.raises(AssertionError, match="ends before TMA"):
        wrong_somewhere()


@pytest.mark.parametrize("kind", ["any", "turned"])
def test_sums_are_read_before_they_were_waited_for(monkeypatch, forgetful, kind):
    gluon_on_cpu.forget()

    def forgets(left, deps):
        return deps[0] if len(deps) == 1 else tuple(deps)

    monkeypatch.setitem(gluon_on_cpu.FAKES, "warpgroup_mma_wait", forgets)
    with pytest.raises(AssertionError, match="read before"):
        wrong_somewhere(kind=kind)


def test_a_stage_is_released_before_it_was_multiplied(monkeypatch, forgetful):
    """The wait lets all products be outstanding but where sums are read."""
    gluon_on_cpu.forget()
    wait = gluon_on_cpu.FAKES["warpgroup_mma_wait"]

    def late(left, deps):
        return wait(0, deps) if left == 0 else wait(8, deps)

    monkeypatch.setitem(gluon_on_cpu.FAKES, "warpgroup_mma_wait", late)
    assert wrong_somewhere(stages=2)


@pytest.mark.parametrize("run", [gemm, lambda seed: test_gate_up(seed, "tailed")])
def test_nobody_fences_what_threads_wrote(monkeypatch, forgetful, run):
    """Sums on their way to TMA, and rows that cp.async copied for the tensor cores."""
    gluon_on_cpu.forget()
    monkeypatch.setitem(gluon_on_cpu.FAKES, "fence_async_shared", lambda: None)
    with pytest.raises(AssertionError, match="without a fence"):
        run(0)
