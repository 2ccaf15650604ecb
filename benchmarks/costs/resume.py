"""Seconds from the start of `fit` to the first batch, at the start of a long domain and far into it.

The checkpoints are real: one is saved after step 2, and its counters are then moved on. That this gives what
training would have given is checked against a checkpoint saved after step 4, and the first batch after each
resume against the batch of that number. The Hugging Face Trainer does the same at a smaller scale."""

import json
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.callbacks import Callback
from transformers import DataCollatorForLanguageModeling, Trainer, TrainerCallback, TrainingArguments

from cpt.optim.nan_guard import NanGuard
from cpt.trainer.lightning import make_trainer
from cpt.trainer.step_checkpoint import StepCheckpoint

sys.path.insert(0, str(Path(__file__).parents[1]))  # benchmarks/
from common.ground import Workload, build_workload, make_parser
from common.measuring import read_busy_seconds, rotate, save, summarize_times, wait_until_quiet

RESUME_SHARES = (0.0, 0.1, 0.5, 0.9)  # of the domain
SAVED_STEP = 2  # the earliest step at which every counter is above 0
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
        self.batch = batch
        self.number = number
        self.step = trainer.global_step
        raise Reached


class After(Callback):
    """Ends a fit after so many steps."""

    def __init__(self, steps: int) -> None:
        self.steps = steps

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        if trainer.global_step == self.steps:
            raise Reached


def time_until_reached(work: Callable[[], Any]) -> float:
    """Seconds until work raises Reached."""
    start_time = time.perf_counter()
    try:
        work()
    except Reached:
        return time.perf_counter() - start_time
    raise RuntimeError("the fit went past its end")


def fit(workload: Workload, callbacks: list[Callback], *, resumed: Path | None) -> float:
    """Seconds that cpt's fit of the current domain takes until a callback ends it."""
    fitting = make_trainer(
        workload.machine.lightning_arguments(workload.plan.trainer),
        label="resume",
        steps=workload.steps,
        callbacks=callbacks,
    )
    path = str(resumed) if resumed else None
    return time_until_reached(
        lambda: fitting.fit(workload.module, datamodule=workload.data, ckpt_path=path, weights_only=True)
    )


def write_checkpoint(workload: Workload, folder: Path, *, step: int) -> Path:
    """What cpt saves after a step."""
    path = folder / f"{step}.ckpt"
    fit(workload, [StepCheckpoint(path, interval=step, guard=NanGuard()), After(step)], resumed=None)
    return path


def write_moved(path: Path, *, step: int) -> Path:
    """A copy of the first checkpoint whose counters say `step`."""
    state = torch.load(path, weights_only=True)
    advance_counters(state["loops"]["fit_loop"], by=step - SAVED_STEP)
    state["global_step"] = step
    for scheduler in state["lr_schedulers"]:
        scheduler["last_epoch"] += step - SAVED_STEP
        scheduler["_step_count"] += step - SAVED_STEP
    torch.save(state, path.with_name(f"{step}-moved.ckpt"))
    return path.with_name(f"{step}-moved.ckpt")


def advance_counters(counters: dict[str, Any], *, by: int) -> None:
    """Moves on all that counts batches or steps in a loop's state, but not epochs."""
    for name, value in counters.items():
        if isinstance(value, dict) and name != "epoch_progress":
            advance_counters(value, by=by)
        elif isinstance(value, int) and not isinstance(value, bool) and value > 0:
            counters[name] = value + by


def check_moved(workload: Workload, first: Path) -> None:
    """Raises RuntimeError unless the moved counters are those of a run that was trained so far."""
    trained_state = torch.load(write_checkpoint(workload, first.parent, step=CHECKED), weights_only=True)
    moved_state = torch.load(write_moved(first, step=CHECKED), weights_only=True)
    counters_trained = list_schedules(trained_state)
    counters_moved = list_schedules(moved_state)
    is_same = (
        trained_state["loops"] == moved_state["loops"]
        and trained_state["global_step"] == moved_state["global_step"]
    )
    if not is_same or counters_trained != counters_moved:
        raise RuntimeError(
            f"moved: {moved_state['loops']} {counters_moved}, "
            f"trained: {trained_state['loops']} {counters_trained}"
        )


def list_schedules(state: dict[str, Any]) -> list[dict[str, Any]]:
    """The counters of each schedule in a checkpoint."""
    return [
        {"last_epoch": scheduler["last_epoch"], "_step_count": scheduler["_step_count"]}
        for scheduler in state["lr_schedulers"]
    ]


def time_resume(workload: Workload, path: Path | None, *, step: int) -> float:
    """Seconds to the first batch; raises RuntimeError if it is not the batch of that step."""
    first = FirstBatch()
    seconds = fit(workload, [first], resumed=path)
    expected = workload.stream()[step]
    is_at_step = (first.number, first.step) == (step, step)
    if not is_at_step or not torch.equal(first.batch["input_ids"], expected["input_ids"]):
        raise RuntimeError(f"resumed at batch {first.number}, step {first.step}, not at {step}")
    return seconds


def measure_cpt(workload: Workload, folder: Path, *, repeats: int, patience: float) -> dict[str, Any]:
    """Seconds by position in the domain, in turns; `fresh` starts without a checkpoint."""
    first = write_checkpoint(workload, folder, step=SAVED_STEP)
    check_moved(workload, first)
    starts: dict[str, tuple[Path | None, int]] = {}
    for share in RESUME_SHARES:
        step = max(SAVED_STEP, round(share * workload.steps))
        starts[f"{share:.0%}"] = (write_moved(first, step=step), step)
    starts["fresh"] = (None, 0)

    seconds: dict[str, list[float]] = {name: [] for name in starts}
    for number in range(repeats + 1):
        patience -= wait_until_quiet(patience)
        for name in rotate(list(starts), number):
            path, step = starts[name]
            seconds[name].append(time_resume(workload, path, step=step))

    results = {}
    for name, durations in seconds.items():
        counted = durations[1:]  # the first round warms up
        results[name] = {**summarize_times(counted), "all": counted, "step": starts[name][1]}
    return results


class FirstStep(TrainerCallback):
    """Ends a Hugging Face run where its first step begins."""

    def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
        raise Reached


def run_hf(workload: Workload, rows: Any, folder: Path, *, steps: int, resumed: bool) -> float:
    """Seconds of the Hugging Face Trainer until its first step begins; 0 where it is not resumed, but makes
    its first step and saves it."""
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
    if not resumed:
        trainer.train()
        return 0.0
    path = str(folder / HF_CHECKPOINT)
    return time_until_reached(lambda: trainer.train(resume_from_checkpoint=path))


def move_hf(folder: Path, *, step: int) -> None:
    """Sets the step of a Hugging Face checkpoint."""
    path = folder / HF_CHECKPOINT / "trainer_state.json"
    state = json.loads(path.read_text())
    path.write_text(json.dumps({**state, "global_step": step}))


def measure_hf(
    workload: Workload, folder: Path, *, steps: int, streamed: bool, repeats: int
) -> dict[str, Any]:
    """Seconds of the Hugging Face Trainer at step 1 and at 90 % of one epoch of `steps` batches."""
    size = workload.plan.trainer.batch_size
    text = workload.input_ids()
    rows: Any = text.select([number % len(text) for number in range(steps * size)])
    if streamed:
        rows = rows.to_iterable_dataset()

    run_hf(workload, rows, folder, steps=steps, resumed=False)
    late_step = round(0.9 * steps)
    seconds: dict[int, list[float]] = {1: [], late_step: []}
    for _ in range(repeats):
        for step, durations in seconds.items():
            move_hf(folder, step=step)
            durations.append(run_hf(workload, rows, folder, steps=steps, resumed=True))

    first_seconds, late_seconds = seconds.values()
    per_step = (min(late_seconds) - min(first_seconds)) / (late_step - 1)
    return {
        "steps": steps,
        "0%": summarize_times(first_seconds),
        "90%": summarize_times(late_seconds),
        "s_per_million_steps": 1e6 * per_step,
    }


def main() -> None:
    parser = make_parser(__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, default=2_000_000, help="steps of the domain")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--hf-steps", type=int, default=100_000, help="the same for the Hugging Face Trainer")
    parser.add_argument("--hf-streamed-steps", type=int, default=2_000, help="and with a streamed data set")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    sizes = ("model.max_seq_length=128", "trainer.batch_size=16", f"trainer.steps={options.steps}")
    workload = build_workload(options.cache, *sizes)

    busy_before = read_busy_seconds()
    start_time = time.perf_counter()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        seconds = measure_cpt(workload, folder, repeats=options.repeats, patience=options.patience)
        hf_seconds = {
            "map": measure_hf(workload, folder / "map", steps=options.hf_steps, streamed=False, repeats=3),
            "streamed": measure_hf(
                workload, folder / "streamed", steps=options.hf_streamed_steps, streamed=True, repeats=3
            ),
        }
    results = {
        "options": {name: value for name, value in vars(options).items() if name not in ("cache", "out")},
        "cpt": seconds,
        "cost_of_90%": seconds["90%"]["median"] - seconds["0%"]["median"],
        "target_s": TARGET_S,
        "hf": hf_seconds,
    }
    print(json.dumps(results, indent=1))
    cores = (read_busy_seconds() - busy_before) / (time.perf_counter() - start_time)
    print(f"the machine used {cores:.2f} cores")
    save("resume", results, out=options.out)


if __name__ == "__main__":
    main()
