"""What transformers' Trainer calls to log expert load. Imported when asked for: it is slow to."""

from __future__ import annotations

from typing import Any

from transformers import TrainerCallback


class LoadCallback(TrainerCallback):
    """Logs an ExpertLoad."""

    def __init__(self, load: Any, reset: bool) -> None:
        self.load, self.reset = load, reset

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        """Starts counting."""
        self.load.start()

    def on_train_end(self, *_: Any, **__: Any) -> None:
        """Stops counting."""
        self.load.stop()

    def on_log(
        self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **_: Any
    ) -> None:
        """Adds to what is logged."""
        if logs is None or not int(self.load.counts.sum()):
            return
        more = {
            "moe/imbalance": float(self.load.imbalance.mean()),
            "moe/entropy": float(self.load.entropy.mean()),
            "moe/dead_experts": int(self.load.dead.sum()),
            "moe/dropped": int(self.load.dropped.sum()),
        }
        logs.update(more)
        if state.log_history:
            state.log_history[-1].update(more)
        if self.reset:
            self.load.reset()
