"""What it costs to look at every loss and gradient before the optimizer does: its share of a training step.

    python benchmarks/costs/guard.py

With clipping the norm is there anyway, and what is timed is the guard alone; without it the norm is the
guard's cost too. Median of the steps' shares, so that a busy machine slows both sides."""

import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.callbacks import Callback

from cpt.optim.nan_guard import NanGuard
from cpt.trainer.lightning import make_trainer

sys.path.insert(0, str(Path(__file__).parents[1]))  # benchmarks/
from common.ground import build_workload
from common.ground import make_parser as common_arguments
from common.measuring import RESULTS

SHAPES = {
    "4 x 256, 32 x 128 tokens": ["model.max_seq_length=128", "trainer.batch_size=32"],
    "2 x 128, 32 x 64 tokens (the default's size)": [
        "model.config.hidden_size=128",
        "model.config.intermediate_size=512",
        "model.config.num_hidden_layers=2",
        "model.vocab_size=2048",
    ],
}


class Timed(Callback):
    """Seconds of each step, and of what the guard did in it."""

    def __init__(self, module: Any, *, clipped: bool) -> None:
        self.steps: list[float] = []
        self.guarding: list[float] = []
        self.guard_seconds = 0.0  # of the current step
        self.start_time = 0.0
        self.module = module
        self.guard = NanGuard()
        for name in ("see", "allows"):
            self.time(self.guard, name)
        if not clipped:
            self.time(module, "configure_gradient_clipping")

    def time(self, owner: Any, name: str) -> None:
        """Has the seconds of a method's calls added to those of the guard."""
        call = getattr(owner, name)

        def timed(*args: Any, **kwargs: Any) -> Any:
            start_time = time.perf_counter()
            try:
                return call(*args, **kwargs)
            finally:
                self.guard_seconds += time.perf_counter() - start_time

        object.__setattr__(owner, name, timed)

    def on_train_batch_start(self, *args: Any) -> None:
        self.start_time = time.perf_counter()
        self.guard_seconds = 0.0

    def on_train_batch_end(self, *args: Any) -> None:
        self.steps.append(time.perf_counter() - self.start_time)
        self.guarding.append(self.guard_seconds)


def measure(cache: str, shape: list[str], *, clipped: bool, steps: int) -> dict[str, float]:
    clip = [] if clipped else ["trainer.gradient_clip_val=null"]
    workload = build_workload(cache, *shape, f"trainer.steps={steps}", *clip)
    workload.module.activate(0)
    timed = Timed(workload.module, clipped=clipped)
    fitting = make_trainer(
        workload.machine.lightning_arguments(workload.plan.trainer),
        label="guard",
        steps=steps,
        callbacks=[timed.guard, timed],
    )
    fitting.fit(workload.module, datamodule=workload.data)
    shares = [
        guard_seconds / step_seconds
        for guard_seconds, step_seconds in zip(timed.guarding, timed.steps, strict=True)
    ][steps // 5 :]
    return {
        "share": statistics.median(shares),
        "guard_ms": 1000 * statistics.median(timed.guarding),
        "step_ms": 1000 * statistics.median(timed.steps),
    }


def main() -> None:
    parser = common_arguments(__doc__)
    parser.add_argument("--steps", type=int, default=50)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    results = {}
    for name, shape in SHAPES.items():
        for clipped in (True, False):
            label = f"{name}, {'clipped' if clipped else 'not clipped'}"
            results[label] = measure(options.cache, shape, clipped=clipped, steps=options.steps)
            print(label, json.dumps(results[label]), flush=True)
    Path(options.out or RESULTS / "guard.json").write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
