"""What one GPU learns rung by rung, and the Hugging Face Trainer beside it: the subjects of gpu.py."""

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from ground import Workload, build_workload, format_accelerator
from measuring import compare_times
from memory import CHOICES, OBJECTIVES
from methods import dense_losses
from stage import StepTimer, Subject, TimingOptions
from subjects import StepCallback, fit, train_hf

from cpt.trainer.costs import OperationCounter

BF16 = "trainer.precision=bf16-mixed"
FLOAT32 = "trainer.precision=32-true"
UNFUSED = "optim.fused=false"
FUSED = "optim.fused=true"
COMPILED = "trainer.compile=true"
FIRST_RUNG = "32-true"
LAST_RUNG = "+ fused AdamW"
RUNGS = {  # the overrides of a rung by its name, as the table shows it
    FIRST_RUNG: [FLOAT32, UNFUSED],
    "bf16-mixed": [BF16, UNFUSED],
    "+ compile": [BF16, COMPILED, UNFUSED],
    LAST_RUNG: [BF16, COMPILED, FUSED],
}
SPARSE = "+ head at the scored places"
HF = {"Trainer": False, "Trainer, bf16": True}


@dataclass(frozen=True)
class Size:
    """A model of memory.SIZES, and what it reads in a step; both subjects of the Trainer where there is
    memory for them."""

    model: str
    length: int
    batch: int
    trainers: Sequence[str] = tuple(HF)


@dataclass(frozen=True)
class SizeSetup(TimingOptions):
    """What the subjects of one size run."""

    cache: str
    size: Size
    folder: str
    # What subjects.train_hf reads of a subjects.TrainingSetup:
    equal: bool = False
    shape: str = "given"

    @property
    def batch(self) -> int:
        return self.size.batch

    def build_workload(self, *overrides: str) -> Workload:
        return build_workload(self.cache, *self.overrides(), *overrides, shape="given")

    def overrides(self) -> Iterator[str]:
        yield f"model={CHOICES[self.size.model]}"
        yield f"model.name_or_path={self.folder}"
        yield f"model.max_seq_length={self.size.length}"
        yield f"trainer.batch_size={self.size.batch}"
        yield f"trainer.steps={self.steps}"
        yield format_accelerator(self.device)


def train_rung(
    timer: StepTimer, *, setup: SizeSetup, overrides: Sequence[str], dense: bool
) -> dict[str, int]:
    """A rung: the training of `python run.py method=ncl`; gives the bytes that it needs on the device."""
    workload = setup.build_workload(*overrides)
    if dense:
        workload.module.losses = partial(dense_losses, workload.module)
    timer.wait_for_warm_up()
    fit(workload, workload.data.domain, steps=workload.steps, callbacks=[StepCallback(timer)])
    return read_peak_device()


def train_hf_rung(timer: StepTimer, *, setup: SizeSetup, bf16: bool) -> dict[str, int]:
    """The same by the Hugging Face Trainer."""
    train_hf(setup, timer, bf16=bf16)
    return read_peak_device()


def read_peak_device() -> dict[str, int]:
    return {"peak_device": torch.cuda.max_memory_allocated() if torch.cuda.is_initialized() else 0}


def list_rungs(setup: SizeSetup) -> dict[str, Subject]:
    """The subjects of a size."""
    masked = OBJECTIVES[setup.size.model] == "masked"
    ladder = {
        name: partial(train_rung, setup=setup, overrides=overrides, dense=masked)
        for name, overrides in RUNGS.items()
    }
    if masked:  # of a causal model every place is scored
        ladder[SPARSE] = partial(train_rung, setup=setup, overrides=RUNGS[LAST_RUNG], dense=False)
    return ladder | {name: partial(train_hf_rung, setup=setup, bf16=HF[name]) for name in setup.size.trainers}


def count_operations(setup: SizeSetup, *, dense: bool) -> int:
    """Operations of a step, forward and backward, counted on one sample."""
    workload = setup.build_workload("trainer.batch_size=1", "trainer.accelerator=cpu")
    batch = next(iter(workload.loader()))
    losses = partial(dense_losses, workload.module) if dense else workload.module.losses
    with OperationCounter() as counter:
        losses(batch)["lm"].backward()
    return counter.total * setup.batch


def describe_subject(
    name: str,
    run: Mapping[str, Any],
    *,
    setup: SizeSetup,
    counts: Mapping[str, int],
    peaks: Mapping[str, float],
) -> dict[str, Any]:
    chunks = run["chunks"][name]
    report = run["reports"][name]
    steps: list[float] = []
    for chunk in chunks:
        steps.extend(chunk["steps"])
    walls = [chunk["wall"] for chunk in chunks]
    first_walls = [chunk["wall"] for chunk in run["chunks"][FIRST_RUNG]]
    step_seconds = statistics.median(walls) / setup.chunk

    is_sparse = name == SPARSE or OBJECTIVES[setup.size.model] == "causal"
    num_operations = counts["executed" if is_sparse else "dense"]
    peak = peaks.get("bf16-mixed", peaks["32-true"])
    return {
        "step_s": step_seconds,
        "p50_s": float(np.percentile(steps, 50)),
        "p95_s": float(np.percentile(steps, 95)),
        "tokens_per_s": setup.batch * setup.size.length / step_seconds,
        "mfu_executed": num_operations / step_seconds / peak,
        "mfu_dense_equivalent": counts["dense"] / step_seconds / peak,
        "faster_than_first": compare_times(walls, first_walls),
        "peak_device": report["peak_device"],
        "scored_tokens": sum(report["scored"]),
        "mean_loss": statistics.mean(report["losses"]),
    }
