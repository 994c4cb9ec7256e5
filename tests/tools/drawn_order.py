"""Tasks that take turns, and what they have set going, in an order that is drawn."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable

import torch


class Deadlock(AssertionError):
    """Everybody waits, and nothing is on its way."""


class Task:
    """A partition of some warps, or a program's head. One runs at a time, until it lets others go
    on."""

    def __init__(self, world: World, run: Callable[[], None], program: int, warps: int) -> None:
        self.world, self.program, self.warps = world, program, warps
        self.may_go: Callable[[], bool] = lambda: True
        self.doing, self.done = "begins", False
        self.error: BaseException | None = None
        self.shared = 0
        """Bytes of shared memory that it has allocated."""
        self.groups: list[list[Callable[[], None]]] = [[]]
        """Copies by cp.async that are not known to have arrived, by commits."""
        self.stores: list[Callable[[], None]] = []
        """Of TMA, that may not have read shared memory."""
        self.products: list[Callable[[], None]] = []
        """Of wgmma, that may not have been computed, which they are in this order."""
        self.fenced = 0
        """Number of the last write to shared memory before its last fence."""
        self.written: list[tuple[torch.Tensor, int]] = []
        """Writes of its own since then: numbers of the memory, and of the write."""
        self._go, self._back = threading.Semaphore(0), threading.Semaphore(0)
        self._thread = threading.Thread(target=self._run, args=(run,), daemon=True)
        self._thread.start()

    def _run(self, run: Callable[[], None]) -> None:
        self._go.acquire()
        _HERE.task = self
        try:
            run()
            assert not self.stores, "it ends before TMA has read what it stores"
            assert not self.products, "it ends while products run"
        except BaseException as error:  # goes to whoever started all
            self.error = error
        self.done = True
        self._back.release()

    def resume(self) -> None:
        """It runs until it lets others go on. Raises what it raised."""
        self._go.release()
        self._back.acquire()
        if self.error:
            raise self.error

    def multiply(self, left: int = 0) -> None:
        """Products are computed, but for the last `left` of them."""
        while len(self.products) > left:
            self.products.pop(0)()

    def let_others(self, until: Callable[[], bool] = lambda: True, doing: str = "runs") -> None:
        """Goes on some time after `until` holds; `doing` is for a deadlock."""
        self.may_go, self.doing = until, doing
        self._back.release()
        self._go.acquire()


_HERE = threading.local()


def here() -> Task:
    """Return the task that runs."""
    return _HERE.task


def once(call: Callable[[], None]) -> Callable[[], None]:
    """The same, for the first of several to call."""
    called: list[bool] = []

    def run() -> None:
        if not called:
            called.append(True)
            call()

    return run


class World:
    """All programs of a launch, and what is on its way."""

    def __init__(self, seed: int, programs: int, warps: int) -> None:
        self.draw, self.programs, self.warps = random.Random(seed), programs, warps
        self.tasks: list[Task] = []
        self.coming: list[Callable[[], None]] = []
        self.writes = 0
        """Number of writes to shared memory by threads so far."""
        self.named: dict[tuple[int, int], list[int]] = {}
        """Arrivals at a program's barriers with a number, and how often all have arrived."""

    def start(self, run: Callable[[], None], program: int, warps: int = 0) -> Task:
        """A task of a program, which begins some time; 0 warps: as many as its head has."""
        self.tasks.append(Task(self, run, program, warps or self.warps))
        return self.tasks[-1]

    def run(self) -> None:
        """Everything is done when it returns.

        Raises:
            Deadlock: nobody can go on.
        """
        while True:
            self.tasks = [task for task in self.tasks if not task.done]
            able = [task for task in self.tasks if task.may_go()]
            if not self.tasks and not self.coming:
                left = [barrier for barrier, (arrivals, _) in self.named.items() if arrivals]
                assert not left, f"arrivals are left at {left}"
                return
            if not able and not self.coming:
                raise Deadlock("; ".join(f"{t.program}: {t.doing}" for t in self.tasks))
            if self.coming and (not able or self.draw.random() < 0.3):
                self.coming.pop(self.draw.randrange(len(self.coming)))()
            else:
                self.draw.choice(able).resume()
