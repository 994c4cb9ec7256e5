"""Kernels in Gluon on a CPU, as Triton's interpreter runs those in Triton: whole tensors at a time.

    with on_cpu(seed=3):
        launch((programs,), *arguments)      # of a `kernels.launch.Launch`

What a GPU does asynchronously happens here in an order that is drawn: copies by TMA and by cp.async
arrive some time before they are waited for, stores through TMA read shared memory some time after
they are begun, and programs and their warpgroups take turns wherever one of them waits or begins
something. So a box that is read before it came, or overwritten before it was read, gives wrong
numbers with some seed, and barriers that nobody releases are a `Deadlock`. Tensor cores and TMA
that read what threads wrote, without a fence between, are an error. A product is computed
some time before it is waited for, from what its operands in shared memory are then. Shared memory
is NaN, or nonsense, until it is written. Reading or writing past a tensor's memory is an error.

Not seen: what threads of one warpgroup do to each other, layouts, swizzles, registers. Assembly
needs a function in Python, by its text: `PTX`.
"""

from __future__ import annotations

import contextlib
import ctypes
import types
from collections.abc import Callable, Iterator
from operator import mul, sub
from typing import Any

import torch
import triton.language as tl
from drawn_order import Task, World, here, once
from triton.experimental.gluon import language as gl

from moe_patch.kernels.launch import Launch

PTX: dict[str, Callable[..., Any]] = {}
"""What a text in assembly computes: (arguments as tensors) -> a tensor or a tuple of them."""
NAMES = {
    getattr(torch, name): getattr(tl, name)
    for name in (
        "int8", "uint8", "int16", "int32", "int64", "float16", "bfloat16", "float32", "float64"
    )
}  # fmt: skip
NAMES[torch.float8_e4m3fn] = tl.float8e4nv
SHARED = 232_448
"""Bytes of shared memory that a program has on Hopper."""
DTYPES = {found.name: dtype for dtype, found in NAMES.items()} | {"int1": torch.bool}
DTYPES |= {"uint16": torch.int16, "uint32": torch.int32}  # bits


# Values


def plain(value: Any) -> Any:
    return value.v if isinstance(value, T) else value


class Type:
    """What `x.type` and `pointer.dtype` are asked."""

    def __init__(self, layout: Any = None, element_ty: Any = None) -> None:
        self.layout, self.element_ty = layout, element_ty


class _Held:
    """What tensors in registers and in shared memory are asked."""

    v: torch.Tensor

    @property
    def shape(self) -> list[int]:
        return list(self.v.shape)

    @property
    def dtype(self) -> Any:
        return NAMES[self.v.dtype]


class T(_Held):
    """A tensor in registers, or a number."""

    def __init__(self, v: torch.Tensor, layout: Any = None) -> None:
        self.v, self.layout = v, layout

    @property
    def type(self) -> Type:
        return Type(self.layout)

    def __index__(self) -> int:
        return int(self.v)

    def __bool__(self) -> bool:
        return bool(self.v)

    def to(self, dtype: Any, bitcast: bool = False) -> T:
        kind = DTYPES[dtype.name]
        return T(self.v.view(kind) if bitcast else self.v.to(kind), self.layout)

    def reshape(self, *shape: Any) -> T:
        shape = shape[0] if len(shape) == 1 else shape
        return T(self.v.reshape([int(n) for n in shape]))

    def permute(self, order: Any) -> T:
        return T(self.v.permute(tuple(order)))

    def split(self) -> tuple[T, T]:
        return T(self.v[..., 0]), T(self.v[..., 1])


def _binary(name: str, compute: Callable[[Any, Any], Any]) -> None:
    def forward(self: T, other: Any) -> Any:
        if isinstance(other, P):
            return NotImplemented
        found = compute(self.v, plain(other))
        return T(found, self.layout or getattr(other, "layout", None))

    def backward(self: T, other: Any) -> Any:
        return T(compute(torch.as_tensor(plain(other)), self.v), self.layout)

    setattr(T, f"__{name}__", forward)
    if name not in ("lt", "le", "gt", "ge", "eq", "ne"):
        setattr(T, f"__r{name}__", backward)


for _name, _compute in {
    "add": lambda a, b: a + b, "sub": lambda a, b: a - b, "mul": lambda a, b: a * b,
    "truediv": lambda a, b: a / b, "mod": lambda a, b: a % b,
    "floordiv": lambda a, b: torch.div(a, b, rounding_mode="floor"),
    "and": lambda a, b: a & b, "or": lambda a, b: a | b, "xor": lambda a, b: a ^ b,
    "lshift": lambda a, b: a << b, "rshift": lambda a, b: a >> b,
    "lt": lambda a, b: a < b, "le": lambda a, b: a <= b, "gt": lambda a, b: a > b,
    "ge": lambda a, b: a >= b, "eq": lambda a, b: a == b, "ne": lambda a, b: a != b,
}.items():  # fmt: skip
    _binary(_name, _compute)
T.__neg__ = lambda self: T(-self.v, self.layout)  # type: ignore[attr-defined]


def _bits(v: torch.Tensor) -> torch.Tensor:
    """FP8 as bytes, which torch can index."""
    return v.view(torch.uint8) if v.dtype == torch.float8_e4m3fn else v


def number(value: Any, dtype: torch.dtype = torch.int32) -> T:
    return T(torch.tensor(value, dtype=dtype))


class P:
    """A pointer, or a tensor of pointers, into the memory of one tensor."""

    def __init__(self, memory: torch.Tensor, at: Any = 0) -> None:
        self.memory, self.at = memory, at

    @property
    def dtype(self) -> Type:
        return Type(element_ty=NAMES[self.memory.dtype])

    def __add__(self, by: Any) -> P:
        return P(self.memory, by if isinstance(self.at, int) and self.at == 0 else self.at + by)

    __radd__ = __add__

    def to(self, dtype: Any, bitcast: bool = False) -> P:
        assert bitcast
        kind = DTYPES[dtype.element_ty.name]
        ratio = kind.itemsize // self.memory.dtype.itemsize
        usable = self.memory[: len(self.memory) // ratio * ratio]
        at = self.at // ratio if isinstance(self.at, (int, T)) else self.at
        return P(usable.view(kind), at)

    def places(self, mask: Any, shape: list[int] | None = None) -> tuple[torch.Tensor, Any]:
        at = torch.as_tensor(plain(self.at)).long()
        inside = torch.as_tensor(True if mask is None else plain(mask))
        shape = shape or list(torch.broadcast_shapes(at.shape, inside.shape))
        at, inside = at.expand(shape), inside.expand(shape)
        used = at[inside]
        assert not used.numel() or (int(used.min()) >= 0 and int(used.max()) < len(self.memory)), (
            f"element {int(used.min())} to {int(used.max())} of {len(self.memory)}"
        )
        return torch.where(inside, at, 0), inside

    def load(self, mask: Any = None, other: Any = None) -> T:
        at, inside = self.places(mask)
        layout = getattr(self.at, "layout", None)
        if not len(self.memory):
            return T(torch.zeros(at.shape, dtype=self.memory.dtype), layout)
        found = _bits(self.memory)[at]
        left = torch.as_tensor(plain(other) if other is not None else 0).to(found.dtype)
        return T(torch.where(inside, found, left).view(self.memory.dtype), layout)

    def store(self, value: Any, mask: Any = None) -> None:
        value = torch.as_tensor(plain(value)).to(self.memory.dtype)
        at, inside = self.places(mask, list(torch.as_tensor(plain(self.at)).shape))
        value = _bits(value.contiguous()).expand(at.shape)
        _bits(self.memory)[at[inside]] = value[inside]


class Shared(_Held):
    """Shared memory: a view of a tensor.

    `writes` has the number of the write by threads that each element is from, 0 for one by TMA.
    Tensor cores and TMA see what threads wrote if these, or whoever reads it, have fenced since.
    """

    def __init__(self, v: torch.Tensor, layout: Any, writes: torch.Tensor) -> None:
        self.v, self.layout, self.writes = v, layout, writes

    def _view(self, of: Callable[[torch.Tensor], torch.Tensor]) -> Shared:
        return Shared(of(self.v), self.layout, of(self.writes))

    def index(self, i: Any) -> Shared:
        return self._view(lambda v: v[int(i)])

    def slice(self, start: Any, length: Any, dim: int = 0) -> Shared:
        assert int(start) + int(length) <= self.v.shape[dim]
        return self._view(lambda v: v.narrow(dim, int(start), int(length)))

    def reshape(self, shape: Any) -> Shared:
        return self._view(lambda v: v.view(*map(int, shape)))

    def permute(self, order: Any) -> Shared:
        return self._view(lambda v: v.permute(tuple(order)))

    def by_threads(self, task: Task) -> None:
        """Says that these threads have just written its elements."""
        world = task.world
        world.writes += 1
        self.writes.fill_(world.writes)
        task.written.append((self.writes, world.writes))

    def is_seen(self) -> None:
        """Asserts that tensor cores and TMA see what it holds."""
        assert int(self.writes.max()) <= here().fenced, "what threads wrote is read without a fence"

    def load(self, layout: Any = None) -> T:
        return T(self.v.clone(), layout)

    def store(self, value: T) -> None:
        assert list(value.v.shape) == self.shape and value.v.dtype == self.v.dtype
        self.v.copy_(value.v)
        self.by_threads(here())


class Barrier:
    """An mbarrier."""

    def __init__(self, count: int) -> None:
        self.count = self.left = count
        self.bytes = self.phase = 0

    def arrive(self, count: int = 1) -> None:
        self.left -= count
        assert self.left >= 0, "more arrivals than the barrier counts"
        self._turn()

    def expect(self, size: int) -> None:
        self.bytes += size
        self.arrive()

    def came(self, size: int) -> None:
        self.bytes -= size
        self._turn()

    def _turn(self) -> None:
        if not self.left and not self.bytes:
            self.left, self.phase = self.count, self.phase + 1

    def passed(self, parity: int) -> bool:
        """Whether the phase of this parity is over."""
        return self.phase % 2 != parity % 2


class Barriers:
    """Shared memory that has mbarriers."""

    def __init__(self, count: int) -> None:
        self.each: list[Barrier | None] = [None] * count
        self.at = 0

    @property
    def shape(self) -> list[int]:
        return [len(self.each) - self.at, 1]

    def index(self, i: Any) -> Barriers:
        """One of them; what asks for a barrier takes the first."""
        found = Barriers(0)
        found.each, found.at = self.each, self.at + int(i)
        return found


class Box:
    """A descriptor: boxes in memory; addresses are counted modulo 2^64 bytes, as hardware does."""

    def __init__(self, found: Any) -> None:
        self.shape, self.strides = tuple(found.shape), tuple(found.strides)
        self.pointer, self.dtype = found.base.data_ptr(), NAMES[found.base.dtype]
        self.block_shape, self.layout = tuple(found.block_shape), found.layout
        self.kind = found.base.dtype

    def lies_as(self, shared: Shared) -> bool:
        """Whether TMA swizzles it as a kernel does."""
        return all(
            getattr(self.layout, field) == getattr(shared.layout, field)
            for field in ("swizzle_byte_width", "element_bitwidth")
        )

    def _inside(self, at: list[int]) -> tuple[torch.Tensor, tuple[slice, ...]] | None:
        """Part of a box that is inside the tensor, in memory and in the box; None: no part."""
        assert min(at) >= 0
        sizes = [max(0, min(each)) for each in zip(self.block_shape, map(sub, self.shape, at))]
        if not all(sizes):
            return None
        begin = self.pointer + sum(map(mul, at, self.strides)) * self.kind.itemsize
        begin %= 2**64
        count = 1 + sum((size - 1) * stride for size, stride in zip(sizes, self.strides))
        flat = _bits(_memory(begin, self.kind, count))
        return flat.as_strided(sizes, self.strides), tuple(map(slice, sizes))

    def read(self, at: list[int], to: torch.Tensor) -> None:
        to, found = _bits(to), self._inside(at)
        to.zero_()
        if found:
            to[found[1]] = found[0]

    def write(self, at: list[int], what: torch.Tensor) -> None:
        found = self._inside(at)
        if found:
            found[0].copy_(what[found[1]])


def _memory(pointer: int, dtype: torch.dtype, count: int) -> torch.Tensor:
    raw = (ctypes.c_char * (count * dtype.itemsize)).from_address(pointer)
    return torch.frombuffer(raw, dtype=dtype, count=count)


# The language


class Language(types.SimpleNamespace):
    """`gl` and `tl`: what kernels call; layouts and dtypes are Gluon's."""

    def __getattr__(self, name: str) -> Any:
        return getattr(gl, name) if hasattr(gl, name) else getattr(tl, name)


def _where(condition: Any, a: Any, b: Any) -> Any:
    a_v, b_v = plain(a), plain(b)
    if not isinstance(condition, T):
        return a if condition else b
    tensors = [v for v in (a_v, b_v) if isinstance(v, torch.Tensor)]
    dtype = tensors[0].dtype if tensors else torch.int32
    if len(tensors) == 2:
        dtype = torch.promote_types(a_v.dtype, b_v.dtype)
    a_v, b_v = (torch.as_tensor(v).to(dtype) for v in (a_v, b_v))
    layout = next((x.layout for x in (a, b, condition) if isinstance(x, T) and x.layout), None)
    return T(torch.where(condition.v, a_v, b_v), layout)


def _check(holds: Any) -> None:
    assert holds


def _full(shape: Any, value: Any, dtype: Any, layout: Any = None) -> T:
    made = torch.full([int(n) for n in shape], plain(value), dtype=DTYPES[dtype.name])
    return T(made, layout)


def _zeros(shape: Any, dtype: Any, layout: Any = None) -> T:
    return _full(shape, 0, dtype, layout)


def _pairwise(compute: Callable[..., torch.Tensor]) -> Callable[[Any, Any], T]:
    def call(a: Any, b: Any) -> T:
        tensors = [torch.as_tensor(plain(each)) for each in (a, b)]
        return T(compute(*tensors), getattr(a, "layout", None) or getattr(b, "layout", None))

    return call


def _arange(start: int, end: int, layout: Any = None) -> T:
    return T(torch.arange(start, end, dtype=torch.int32), layout)


def _expand_dims(x: T, axis: int) -> T:
    return T(x.v.unsqueeze(axis), getattr(x.layout, "parent", None))


def _convert(x: T, layout: Any, assert_trivial: bool = False) -> T:
    return T(x.v, layout)


def _allocate(dtype: Any, shape: Any, layout: Any) -> Any:
    if type(layout).__name__ == "MBarrierLayout":
        return Barriers(int(shape[0]))
    kind = DTYPES[dtype.name]
    v = torch.empty([int(n) for n in shape], dtype=kind)
    here().shared += v.numel() * v.element_size()
    assert here().shared <= SHARED, f"{here().shared} bytes of shared memory"
    _bits(v).fill_(float("nan") if _bits(v).dtype.is_floating_point else 0x7F)
    return Shared(v, layout, torch.zeros(v.shape, dtype=torch.int32))


def _atomic_add(pointer: P, value: Any, mask: Any = None, sem: str = "") -> T:
    here().let_others(doing="atomic_add")
    old = pointer.load()
    pointer.store(old + value, mask)
    return old


def _asm(text: Any, constraints: Any, arguments: Any, dtype: Any, pure: bool, pack: int) -> Any:
    found = PTX[getattr(text, "value", text)](*(map(plain, arguments)))
    first = next((each for each in arguments if isinstance(each, T)), None)
    layout = first.layout if first is not None else None
    made = [
        T(f, layout) if isinstance(f, torch.Tensor) else f
        for f in (found if isinstance(found, tuple) else (found,))
    ]
    return tuple(made) if isinstance(found, tuple) else made[0]


class Ended(BaseException):
    """Warps leave the program."""


def _specialize(functions: Any, warps: Any, registers: Any) -> None:
    task, ended = here(), []

    def play(role: Any, arguments: Any) -> None:
        try:
            role(*arguments)
        except Ended:
            ended.append(role)

    others = [
        task.world.start(lambda f=f, a=a: play(f, a), task.program, n)
        for (f, a), n in zip(functions[1:], warps, strict=True)
    ]
    task.let_others(doing="begins")
    play(*functions[0])
    task.let_others(lambda: all(each.done for each in others), "waits for its other warpgroups")
    if ended:
        assert len(ended) == len(functions), "a role waits for others that have ended"
        added = (task.warps + sum(warps)) % 4
        assert not added, "warps that Triton adds wait for roles that have ended"


LANGUAGE = Language(
    program_id=lambda axis: number(here().program),
    num_programs=lambda axis: number(here().world.programs),
    num_warps=lambda: here().warps,
    arange=_arange, where=_where, expand_dims=_expand_dims, convert_layout=_convert,
    zeros=_zeros, full=_full,
    to_tensor=lambda value: value if isinstance(value, T) else T(torch.tensor(value)),
    minimum=_pairwise(torch.minimum), maximum=_pairwise(torch.maximum),
    fma=lambda a, b, c: a * b + c,
    exp=lambda x: T(x.v.exp(), x.layout), abs=lambda x: T(x.v.abs(), x.layout),
    max=lambda x, axis: T(x.v.amax(axis)), sum=lambda x, axis: T(x.v.sum(axis)),
    cumsum=lambda x, axis: T(x.v.cumsum(axis)),
    zeros_like=lambda x: T(torch.zeros_like(x.v), x.layout),
    join=lambda a, b: T(torch.stack((a.v, b.v), -1)),
    load=lambda p, mask=None, other=None, **_: p.load(mask, other),
    store=lambda p, value, mask=None, **_: p.store(value, mask),
    atomic_add=_atomic_add, static_range=lambda *a: range(*(int(n) for n in a)),
    allocate_shared_memory=_allocate, inline_asm_elementwise=_asm, warp_specialize=_specialize,
    static_assert=_check,
    constexpr=lambda value: value,
)  # fmt: skip


def _range(*bounds: Any) -> Iterator[T]:
    return map(number, range(*(int(bound) for bound in bounds)))


class Later(T):
    """Sums that are computed some time before they are waited for."""

    def __init__(self, layout: Any) -> None:
        self.found: torch.Tensor | None = None
        self.layout = layout

    @property
    def v(self) -> torch.Tensor:
        assert self.found is not None, "sums are read before they were waited for"
        return self.found


def _mma(a: Any, b: Shared, acc: T, *, use_acc: bool = True, is_async: bool = False) -> T:
    task, sums = here(), Later(acc.layout)
    for operand in (a, b):
        if isinstance(operand, Shared):
            operand.is_seen()

    def multiplies() -> None:
        product = a.v.float() @ b.v.float()
        sums.found = product + acc.v if use_acc else product

    task.products.append(multiplies)
    task.world.coming.append(lambda: task.multiply(max(0, len(task.products) - 1)))
    if not is_async:
        task.multiply()
    return sums


def _mma_wait(outstanding: int, deps: Any) -> Any:
    here().multiply(int(outstanding))
    here().let_others(doing="multiplies")
    return deps[0] if len(deps) == 1 else tuple(deps)


def _barrier(where: Barriers) -> Barrier:
    found = where.each[where.at]
    assert found is not None, "the barrier was not initialised"
    return found


def _init(where: Barriers, count: int) -> None:
    where.each[where.at] = Barrier(int(count))


def _wait(where: Any, parity: Any, pred: Any = True) -> None:
    barrier, parity, waits = _barrier(where), int(parity), bool(pred)
    here().let_others(
        lambda: not waits or barrier.passed(parity), f"waits for a barrier, parity {parity}"
    )


def _arrive(where: Any, count: int = 1, pred: Any = True) -> None:
    if pred:
        _barrier(where).arrive(int(count))
    here().let_others(doing="arrives")


def _expect(where: Any, size: Any, pred: Any = True) -> None:
    _barrier(where).expect(int(size))


def _tma_load(
    box: Box, at: Any, where: Any, to: Shared, pred: Any = True, cache_policy: Any = None
) -> None:
    assert box.block_shape == tuple(to.shape), (box.block_shape, to.shape)
    assert box.kind == to.v.dtype, (box.kind, to.v.dtype)
    assert box.lies_as(to), (box.layout, to.layout)
    barrier, at = _barrier(where), [int(each) for each in at]

    def comes() -> None:
        box.read(at, to.v)
        to.writes.zero_()
        barrier.came(to.v.numel() * to.v.element_size())

    here().world.coming.append(comes)
    here().let_others(doing="loads by TMA")


def _tma_store(box: Box, at: Any, what: Shared) -> None:
    assert box.block_shape == tuple(what.shape), (box.block_shape, what.shape)
    assert box.kind == what.v.dtype, (box.kind, what.v.dtype)
    assert box.lies_as(what), (box.layout, what.layout)
    what.is_seen()
    task, at = here(), [int(each) for each in at]
    goes = once(lambda: box.write(at, what.v))
    task.stores.append(goes)
    task.world.coming.append(goes)
    task.let_others(doing="stores by TMA")


def _store_wait(left: int) -> None:
    """All but the last `left` that were begun have read shared memory."""
    task = here()
    while len(task.stores) > left:
        task.stores.pop(0)()
    task.let_others(doing="waits for its stores")


def _copy(to: Shared, pointer: P, mask: Any = None) -> None:
    task, (at, inside) = here(), pointer.places(mask, to.shape)

    def comes() -> None:
        to.v.copy_(torch.where(inside, pointer.memory[at], torch.zeros((), dtype=to.v.dtype)))
        to.by_threads(task)

    copied = once(comes)
    task.groups[-1].append(copied)
    task.world.coming.append(copied)


def _fence() -> None:
    task = here()
    task.fenced = task.world.writes
    for writes, number in task.written:
        writes[writes == number] = 0
    task.written.clear()


def _copies_arrive(where: Any, increment_count: bool = True) -> None:
    """The partition's threads arrive once what they copied so far is there."""
    barrier, task = _barrier(where), here()
    before = [copy for group in task.groups for copy in group]  # they stay in their groups

    def comes() -> None:
        for copy in before:
            copy()
        barrier.arrive(32 * task.warps)

    task.world.coming.append(comes)
    task.let_others(doing="copies")


def _wait_group(left: int) -> None:
    task = here()
    while len(task.groups) - 1 > left:
        for copy in task.groups.pop(0):
            copy()


FAKES: dict[str, Any] = {
    "gl": LANGUAGE, "tl": LANGUAGE, "async_load": _tma_load, "async_store": _tma_store,
    "copy": _copy, "barrier": lambda: None, "fence_async_shared": _fence,
    "warpgroup_mma": _mma, "warpgroup_mma_wait": _mma_wait,
    "tma": types.SimpleNamespace(store_wait=_store_wait),
    "async_copy": types.SimpleNamespace(
        mbarrier_arrive=_copies_arrive, commit_group=lambda: here().groups.append([]),
        wait_group=_wait_group,
    ),
}  # fmt: skip


def _real_barriers() -> Any:
    from triton.experimental.gluon.language.nvidia.hopper import mbarrier

    return types.SimpleNamespace(
        init=_init, wait=_wait, arrive=_arrive, expect=_expect,
        MBarrierLayout=mbarrier.MBarrierLayout,
    )  # fmt: skip


FAKES["mbarrier"] = _real_barriers()


# Kernels as functions


_KNOWN: dict[int, Any] = {}


def python(function: Any) -> Any:
    """A jit function as one of Python, with this file's language."""
    raw = getattr(function, "fn", function)
    if id(raw) not in _KNOWN:
        own: dict[str, Any] = {}
        _KNOWN[id(raw)] = made = types.FunctionType(
            raw.__code__, own, raw.__name__, raw.__defaults__, raw.__closure__
        )
        made.__kwdefaults__ = raw.__kwdefaults__
        own["range"] = _range
        for name, value in raw.__globals__.items():
            own[name] = FAKES[name] if name in FAKES else _replaced(value)
    return _KNOWN[id(raw)]


def forget() -> None:
    """Functions are made anew, as after a change of `FAKES`."""
    _KNOWN.clear()


def _replaced(value: Any) -> Any:
    if isinstance(value, (gl.constexpr, tl.constexpr)):
        return value.value
    kind = type(value).__name__
    if kind in ("GluonJITFunction", "InterpretedFunction", "JITFunction"):
        return lambda *a, **k: python(value)(*map(_constant, a), **k)
    if kind == "ConstexprFunction":
        return value.fn
    return value


def _constant(value: Any) -> Any:
    """A NamedTuple of constants with jit functions in it, as kernels call them."""
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_replaced(each) for each in value))
    return value


def _argument(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        value = value.detach()  # kernels know nothing of autograd
        flat = value if value.is_contiguous() else value.as_strided((_extent(value),), (1,))
        return P(flat.view(-1))
    if hasattr(value, "block_shape"):
        return Box(value)
    return number(value) if isinstance(value, int) else value


def _extent(tensor: torch.Tensor) -> int:
    return 1 + sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride()))


@contextlib.contextmanager
def on_cpu(seed: int = 0) -> Iterator[list[str]]:
    """Inside, launches of kernels in Gluon run here; their names are in the list that it gives."""
    original, names = Launch.__call__, []

    def call(self: Launch, grid: tuple[int, ...], *arguments: Any) -> None:
        if type(self.kernel).__name__ != "GluonJITFunction":
            original(self, grid, *arguments)
            return
        names.append(self.kernel.fn.__name__)
        world = World(seed, grid[0], self.constants.get("num_warps", 4))
        options = ("num_warps", "num_stages", "enable_fp_fusion", "launch_pdl")
        constants = {n: _constant(v) for n, v in self.constants.items() if n not in options}
        given, kernel = [_argument(each) for each in arguments], python(self.kernel)
        for program in range(grid[0]):
            world.start(lambda: kernel(*given, **constants), program)
        world.run()

    Launch.__call__ = call  # type: ignore[method-assign]
    try:
        yield names
    finally:
        Launch.__call__ = original  # type: ignore[method-assign]
