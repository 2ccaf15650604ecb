"""What one GPU learns rung by rung, and the Hugging Face Trainer beside it: the subjects of gpu.py."""

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from common.ground import Workload, build_workload, format_accelerator
from common.measuring import compare_times
from common.stage import StepTimer, Subject, TimingOptions
from common.subjects import StepCallback, fit, train_hf
from lightning.pytorch.utilities import move_data_to_device
from memory import CHOICES, OBJECTIVES
from methods import dense_losses

from cpt.trainer.costs import OperationCounter

BF16 = "trainer.precision=bf16-mixed"
FLOAT32 = "trainer.precision=32-true"
UNFUSED = "optim.fused=false"
FUSED = "optim.fused=true"
COMPILED = "trainer.compile=true"
# The overrides of a rung by its name, as the table shows it. The first is what others are compared with.
RUNGS = {
    "32-true": [FLOAT32, UNFUSED],
    "bf16-mixed": [BF16, UNFUSED],
    "+ compile": [BF16, COMPILED, UNFUSED],
    "+ fused AdamW": [BF16, COMPILED, FUSED],
}
DECODER_RUNGS = {
    "bf16-mixed": [BF16, FUSED],
    "+ compile": [BF16, COMPILED, FUSED],
    "bf16-true + compile": ["trainer.precision=bf16-true", COMPILED, FUSED],
}
LORA_RUNGS = {
    "lora, bf16-mixed": [BF16, FUSED],
    "+ compile": [BF16, COMPILED, FUSED],
}
SPARSE = "+ head at the scored places"
HF: dict[str, dict[str, bool]] = {  # the arguments of subjects.train_hf
    "Trainer": {},
    "Trainer, bf16": {"bf16": True},
    "Trainer, bf16, compiled": {"bf16": True, "is_compiled": True},
}


@dataclass(frozen=True)
class Size:
    """A model of memory.SIZES, what it reads in a step and what of it is trained; the rungs, and those
    subjects of the Trainer for which there is memory."""

    model: str
    length: int
    batch: int
    overrides: Sequence[str] = ()
    rungs: Mapping[str, Sequence[str]] = field(default_factory=lambda: RUNGS)
    trainers: Sequence[str] = ("Trainer", "Trainer, bf16")
    target: float | None = None  # tokens per second on one H200

    @property
    def first_rung(self) -> str:
        return next(iter(self.rungs))

    @property
    def last_rung(self) -> str:
        return list(self.rungs)[-1]


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
        yield f"model={CHOICES.get(self.size.model, 'hf')}"
        yield f"model.name_or_path={self.folder}"
        yield f"model.max_seq_length={self.size.length}"
        yield f"trainer.batch_size={self.size.batch}"
        yield f"trainer.steps={self.steps}"
        yield format_accelerator(self.device)
        yield from self.size.overrides


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


def train_hf_rung(timer: StepTimer, *, setup: SizeSetup, name: str) -> dict[str, int]:
    """The same by the Hugging Face Trainer."""
    train_hf(setup, timer, **HF[name])
    return read_peak_device()


def read_peak_device() -> dict[str, int]:
    return {"peak_device": torch.cuda.max_memory_allocated() if torch.cuda.is_initialized() else 0}


def list_rungs(setup: SizeSetup) -> dict[str, Subject]:
    """The subjects of a size."""
    masked = OBJECTIVES[setup.size.model] == "masked"
    ladder = {
        name: partial(train_rung, setup=setup, overrides=overrides, dense=masked)
        for name, overrides in setup.size.rungs.items()
    }
    if masked:  # of a causal model every place is scored
        ladder[SPARSE] = partial(
            train_rung, setup=setup, overrides=setup.size.rungs[setup.size.last_rung], dense=False
        )
    return ladder | {name: partial(train_hf_rung, setup=setup, name=name) for name in setup.size.trainers}


def count_operations(setup: SizeSetup, *, dense: bool) -> int:
    """Operations of a step, forward and backward, counted on one sample, on the device: on a CPU a billion
    weights take minutes."""
    workload = setup.build_workload("trainer.batch_size=1", BF16)
    workload.module.to(setup.device)
    batch = move_data_to_device(next(iter(workload.loader())), torch.device(setup.device))
    losses = partial(dense_losses, workload.module) if dense else workload.module.losses
    with OperationCounter() as counter, torch.autocast(setup.device, torch.bfloat16):
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
    first_walls = [chunk["wall"] for chunk in run["chunks"][setup.size.first_rung]]
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
