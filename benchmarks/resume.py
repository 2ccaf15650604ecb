"""Seconds from the start of `fit` to the first batch, at the start of a long domain and far into it.

The checkpoints are real: one is saved after step 2, and its counters are then moved on. That this gives what
training would have given is checked against a checkpoint saved after step 4, and the first batch after each
resume against the batch of that number. The Hugging Face Trainer does the same at a smaller scale."""

import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from ground import Ground, arguments, ground
from lightning.pytorch.callbacks import Callback
from measuring import busy, rotated, save, spread, wait_until_quiet
from transformers import DataCollatorForLanguageModeling, Trainer, TrainerCallback, TrainingArguments

from cpt.optim.nan_guard import NanGuard
from cpt.trainer.lightning import make_trainer
from cpt.trainer.step_checkpoint import StepCheckpoint

PLACES = (0.0, 0.1, 0.5, 0.9)  # of the domain
SAVED = 2  # the earliest step at which every counter is above 0
CHECKED = 4  # a step that is trained to, not only moved to
HF_CHECKPOINT = "checkpoint-1"
TARGET_S = 2.0


class Reached(Exception):  # noqa: N818  (it is no error)
    """A fit has come as far as it should."""


class FirstBatch(Callback):
    """Ends a fit where its first training step would begin."""

    def __init__(self) -> None:
        self.batch: dict[str, torch.Tensor] = {}
        self.number = self.step = -1

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, number: int) -> None:
        self.batch, self.number, self.step = batch, number, trainer.global_step
        raise Reached


class After(Callback):
    """Ends a fit after so many steps."""

    def __init__(self, steps: int) -> None:
        self.steps = steps

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        if trainer.global_step == self.steps:
            raise Reached


def until_reached(work: Callable[[], Any]) -> float:
    """Seconds until work raises Reached."""
    start_time = time.perf_counter()
    try:
        work()
    except Reached:
        return time.perf_counter() - start_time
    raise RuntimeError("the fit went past its end")


def fit(workload: Ground, callbacks: list[Callback], *, resumed: Path | None) -> float:
    """Seconds that cpt's fit of the current domain takes until a callback ends it."""
    fitting = make_trainer(
        workload.machine.lightning_arguments(workload.plan.trainer),
        label="resume",
        steps=workload.steps,
        callbacks=callbacks,
    )
    path = str(resumed) if resumed else None
    return until_reached(
        lambda: fitting.fit(workload.module, datamodule=workload.data, ckpt_path=path, weights_only=True)
    )


def checkpoint(workload: Ground, folder: Path, *, step: int) -> Path:
    """What cpt saves after a step."""
    path = folder / f"{step}.ckpt"
    fit(workload, [StepCheckpoint(path, every=step, guard=NanGuard()), After(step)], resumed=None)
    return path


def moved(path: Path, *, step: int) -> Path:
    """A copy of the first checkpoint whose counters say `step`."""
    state = torch.load(path, weights_only=True)
    forward(state["loops"]["fit_loop"], by=step - SAVED)
    state["global_step"] = step
    for scheduler in state["lr_schedulers"]:
        scheduler["last_epoch"] += step - SAVED
        scheduler["_step_count"] += step - SAVED
    torch.save(state, path.with_name(f"{step}-moved.ckpt"))
    return path.with_name(f"{step}-moved.ckpt")


def forward(counters: dict[str, Any], *, by: int) -> None:
    """Moves on all that counts batches or steps in a loop's state, but not epochs."""
    for name, value in counters.items():
        if isinstance(value, dict) and name != "epoch_progress":
            forward(value, by=by)
        elif isinstance(value, int) and not isinstance(value, bool) and value > 0:
            counters[name] = value + by


def check_moved(workload: Ground, first: Path) -> None:
    """Raises RuntimeError unless the moved counters are those of a run that was trained so far."""
    trained_state = torch.load(checkpoint(workload, first.parent, step=CHECKED), weights_only=True)
    moved_state = torch.load(moved(first, step=CHECKED), weights_only=True)
    schedules = [
        [
            {name: scheduler[name] for name in ("last_epoch", "_step_count")}
            for scheduler in state["lr_schedulers"]
        ]
        for state in (trained_state, moved_state)
    ]
    is_same = (
        trained_state["loops"] == moved_state["loops"]
        and trained_state["global_step"] == moved_state["global_step"]
    )
    if not is_same or schedules[0] != schedules[1]:
        raise RuntimeError(
            f"moved: {moved_state['loops']} {schedules[1]}, trained: {trained_state['loops']} {schedules[0]}"
        )


def resumed_at(workload: Ground, path: Path | None, *, step: int) -> float:
    """Seconds to the first batch; raises RuntimeError if it is not the batch of that step."""
    first = FirstBatch()
    seconds = fit(workload, [first], resumed=path)
    expected = workload.stream()[step]
    if (first.number, first.step) != (step, step) or not torch.equal(
        first.batch["input_ids"], expected["input_ids"]
    ):
        raise RuntimeError(f"resumed at batch {first.number}, step {first.step}, not at {step}")
    return seconds


def ours(workload: Ground, folder: Path, *, repeats: int, patience: float) -> dict[str, Any]:
    """Seconds by place in the domain, in turns; `fresh` starts without a checkpoint."""
    first = checkpoint(workload, folder, step=SAVED)
    check_moved(workload, first)
    steps = {f"{share:.0%}": max(SAVED, round(share * workload.steps)) for share in PLACES}
    starts = {name: (moved(first, step=step), step) for name, step in steps.items()} | {"fresh": (None, 0)}
    seconds: dict[str, list[float]] = {name: [] for name in starts}
    for number in range(repeats + 1):  # the first round is not counted
        patience -= wait_until_quiet(patience)
        for name in rotated(list(starts), number):
            seconds[name].append(resumed_at(workload, starts[name][0], step=starts[name][1]))
    return {
        name: {**spread(durations[1:]), "all": durations[1:], "step": starts[name][1]}
        for name, durations in seconds.items()
    }


class FirstStep(TrainerCallback):
    """Ends a Hugging Face run where its first step begins."""

    def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
        raise Reached


def hf(workload: Ground, rows: Any, folder: Path, *, steps: int, resumed: bool) -> float:
    """Seconds of the Hugging Face Trainer until its first step begins, or of its first step."""
    settings = TrainingArguments(
        output_dir=str(folder),
        max_steps=steps if resumed else 1,
        per_device_train_batch_size=workload.plan.trainer.batch_size,
        save_steps=1,
        save_strategy="no" if resumed else "steps",
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
    )
    trainer = Trainer(
        model=workload.module.model,
        args=settings,
        train_dataset=rows,
        data_collator=DataCollatorForLanguageModeling(workload.start.tokenizer),
        callbacks=[FirstStep()] if resumed else [],
    )
    path = str(folder / HF_CHECKPOINT) if resumed else None
    if not resumed:
        trainer.train()
        return 0.0
    return until_reached(lambda: trainer.train(resume_from_checkpoint=path))


def move_hf(folder: Path, *, step: int) -> None:
    """Sets the step of a Hugging Face checkpoint."""
    path = folder / HF_CHECKPOINT / "trainer_state.json"
    state = json.loads(path.read_text())
    path.write_text(json.dumps({**state, "global_step": step}))


def theirs(workload: Ground, folder: Path, *, steps: int, streamed: bool, repeats: int) -> dict[str, Any]:
    """Seconds of the Hugging Face Trainer at step 1 and at 90 % of one epoch of `steps` batches."""
    size = workload.plan.trainer.batch_size
    text = workload.stream().texts[0].rows.select_columns(["ids"]).rename_column("ids", "input_ids")
    rows: Dataset = text.select([number % len(text) for number in range(steps * size)])
    rows = rows.to_iterable_dataset() if streamed else rows
    hf(workload, rows, folder, steps=steps, resumed=False)
    seconds: dict[int, list[float]] = {1: [], round(0.9 * steps): []}
    for _ in range(repeats):
        for step, durations in seconds.items():
            move_hf(folder, step=step)
            durations.append(hf(workload, rows, folder, steps=steps, resumed=True))
    (first_seconds, late_seconds) = seconds.values()
    per_step = (min(late_seconds) - min(first_seconds)) / (round(0.9 * steps) - 1)
    return {
        "steps": steps,
        "0%": spread(first_seconds),
        "90%": spread(late_seconds),
        "s_per_million_steps": 1e6 * per_step,
    }


def main() -> None:
    parser = arguments(__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, default=2_000_000, help="steps of the domain")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--hf-steps", type=int, default=100_000, help="the same for the Hugging Face Trainer")
    parser.add_argument("--hf-streamed-steps", type=int, default=2_000, help="and with a streamed data set")
    chosen = parser.parse_args()
    torch.set_num_threads(chosen.threads)
    sizes = ("model.max_seq_length=128", "trainer.batch_size=16", f"trainer.steps={chosen.steps}")
    workload = ground(chosen.cache, *sizes)
    before, start_time = busy(), time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        seconds = ours(workload, Path(folder), repeats=chosen.repeats, patience=chosen.patience)
        scales = {"map": (chosen.hf_steps, False), "streamed": (chosen.hf_streamed_steps, True)}
        hf_seconds = {
            name: theirs(workload, Path(folder) / name, steps=steps, streamed=streamed, repeats=3)
            for name, (steps, streamed) in scales.items()
        }
    cost = seconds["90%"]["median"] - seconds["0%"]["median"]
    settings = {name: value for name, value in vars(chosen).items() if name not in ("cache", "out")}
    results = {
        "options": settings,
        "cpt": seconds,
        "cost_of_90%": cost,
        "target_s": TARGET_S,
        "hf": hf_seconds,
    }
    print(json.dumps(results, indent=1))
    print(f"the machine used {(busy() - before) / (time.perf_counter() - start_time):.2f} cores")
    save("resume", results, out=chosen.out)


if __name__ == "__main__":
    main()
