"""What is seen of a stage while it is tried: seconds, operations, bytes."""

from __future__ import annotations

import tempfile
import time
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from lightning import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode
from transformers import PreTrainedModel

from cpt.adapters.bank import in_memory, resting_in
from cpt.core.memory import forget_peak, peak
from cpt.methods.base import ContinualModule
from cpt.models.units import blocks
from cpt.training.costs import count_operations
from cpt.training.forecast.live import Live, bytes_of
from cpt.training.sharding import shareable

WATCHED = 2  # steps of a stage: of the first its optimizer's state is new


@dataclass
class Phase:
    """What happens before a domain's first step, in a step, or after the last."""

    seconds: float = 0.0
    flops: int = 0


@dataclass
class Tried:
    """What was seen of a stage, 0: the base. Bytes by part are those between two steps; of `others`, what
    stands in no buffer."""

    before: Phase = field(default_factory=Phase)
    step: Phase = field(default_factory=Phase)
    after: Phase = field(default_factory=Phase)
    parts: dict[str, int] = field(default_factory=dict)
    shareable: dict[str, int] = field(default_factory=dict)  # of these, what strategy=fsdp shares out
    gathered: int = 0  # bytes of the largest part of the model that is whole at once then
    mapped: int = 0  # bytes of what lies in a stage's file
    host: int = 0  # of what rests in the host's memory, beside an accelerator
    peak: int = 0  # of tensors
    held: int = 0  # of the process, on a processor
    trained: int = 0
    stored: int = 0  # beside the model's own weights, as scores.json has it
    state: int = 0  # bytes of the stage's file
    checkpoint: int = 0  # bytes of the trainer's
    checkpoint_s: float = 0.0
    seen: Phase = field(default_factory=Phase)  # per token of a text that was learned
    unseen: Phase = field(default_factory=Phase)  # of another
    scoring_peak: int = 0
    writing_s: float = 0.0  # of a token that the model writes


class Watch(Callback):
    """Measures a fit: operations and live tensors until its second step and after its last, the time of the
    steps between."""

    def __init__(self, tried: Tried, live: Live) -> None:
        self.tried, self.live, self.step = tried, live, 0
        self.modes, self.counter = ExitStack(), FlopCounterMode(display=False)
        self.clock = 0.0

    def begin(self) -> None:
        self.counter = self.modes.enter_context(count_operations())
        self.modes.enter_context(self.live)
        self.clock = time.perf_counter()

    def end(self, phase: Phase) -> None:
        phase.seconds = time.perf_counter() - self.clock
        self.modes.close()
        phase.flops = self.counter.get_total_flops()

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        forget_peak(trainer.strategy.root_device)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.live.hold(in_memory(pl_module))
        self.begin()

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        if trainer.global_step == 0 and self.step == 0 and not self.tried.step.flops:
            self.end(self.tried.before)
            self.begin()
            self.tried.step.flops = -1  # within the first step, however many parts it has

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        if trainer.global_step == self.step:  # within the parts of a step
            return
        self.step = trainer.global_step
        if self.step < WATCHED:
            self.end(self.tried.step)
            self.begin()
        elif self.step == WATCHED:
            self.modes.close()
            self.tried.parts = parts_of(pl_module, trainer, live=self.live)
            self.tried.mapped = bytes_of(resting_in(pl_module))
            self.tried.host = host_of(pl_module, live=self.live)
            self.tried.shareable = shareable_of(pl_module, trainer)
            self.tried.gathered = largest_group(pl_module.model)
        self.clock = time.perf_counter() if self.step <= WATCHED else self.clock
        self.tried.step.seconds = (time.perf_counter() - self.clock) / max(1, self.step - WATCHED)

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.begin()

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self.end(self.tried.after)
        self.tried.peak = self.live.peak
        self.tried.held = peak(trainer.strategy.root_device)

    def on_exception(self, *args: Any) -> None:
        self.modes.close()


class WatchScoring(Callback):
    """The same of a batch that is scored."""

    def __init__(self, live: Live) -> None:
        self.live, self.modes, self.phase = live, ExitStack(), Phase()

    def on_validation_batch_start(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        self.live.hold(in_memory(pl_module))
        self.counter = self.modes.enter_context(count_operations())
        self.modes.enter_context(self.live)

    def on_validation_batch_end(self, *args: Any) -> None:
        self.modes.close()
        self.phase.flops += self.counter.get_total_flops()

    def on_exception(self, *args: Any) -> None:
        self.modes.close()


class Clock(Callback):
    """The time of batches that are scored."""

    seconds = 0.0

    def on_validation_batch_start(self, *args: Any) -> None:
        self.began = time.perf_counter()

    def on_validation_batch_end(self, *args: Any) -> None:
        self.seconds += time.perf_counter() - self.began


def parts_of(module: ContinualModule, trainer: Trainer, *, live: Live) -> dict[str, int]:
    """Bytes by what they are for, between two steps; what has two names is counted with the first."""
    seen: set[int] = set()
    states = [value for each in trainer.optimizers for kept in each.state.values() for value in kept.values()]
    there = {
        "weights": in_memory(module.model),
        "companions": in_memory(module.beside),
        "state": in_memory(module),
        "gradients": [each.grad for each in module.parameters() if each.grad is not None],
        "optimizer": [value for value in states if isinstance(value, Tensor)],
    }
    known = {
        name: bytes_of((each for each in given if each.device.type == live.device.type), seen=seen)
        for name, given in there.items()
    }
    return known | {"others": max(0, live.now - sum(known.values()))}


def host_of(module: ContinualModule, *, live: Live) -> int:
    """Bytes in memory that are not on the device that is watched."""
    return bytes_of(each for each in in_memory(module) if each.device.type != live.device.type)


def shareable_of(module: ContinualModule, trainer: Trainer) -> dict[str, int]:
    """Bytes that strategy=fsdp shares out, by what they are for."""
    every = [*shareable(module)]
    weights = [each for each in every if isinstance(each, torch.nn.Parameter)]
    states = [optimizer.state.get(weight, {}) for optimizer in trainer.optimizers for weight in weights]
    moments = [
        value for kept in states for value in kept.values() if isinstance(value, Tensor) and value.ndim
    ]
    there = {
        "weights": weights,
        "state": [each for each in every if not isinstance(each, torch.nn.Parameter)],
        "gradients": [each.grad for each in weights if each.grad is not None],
        "optimizer": moments,
    }
    return {name: bytes_of(tensors) for name, tensors in there.items()}


def largest_group(model: PreTrainedModel) -> int:
    """Bytes of the weights of the largest block of a model, or of what is in none."""
    inside = [bytes_of(block.parameters()) for _, block in blocks(model)]
    return max(*inside, bytes_of(model.parameters()) - sum(inside))


class Saving(Callback):
    """Writes a checkpoint after the last step, as a run does, and removes it."""

    def __init__(self, tried: Tried, scratch: Path) -> None:
        self.tried, self.scratch = tried, scratch

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        with tempfile.TemporaryDirectory(prefix="plan-", dir=self.scratch) as folder:
            path, began = Path(folder) / "checkpoint.ckpt", time.perf_counter()
            trainer.save_checkpoint(path)
            self.tried.checkpoint_s = time.perf_counter() - began
            self.tried.checkpoint = path.stat().st_size


class Steps(Callback):
    """When steps ended."""

    def __init__(self) -> None:
        self.ends: list[float] = []

    def on_train_batch_end(self, *args: Any) -> None:
        self.ends.append(time.perf_counter())


class Sink:
    """A file of which only the size is kept."""

    def __init__(self) -> None:
        self.size = 0

    def write(self, data: Any) -> int:
        count = memoryview(data).nbytes
        self.size += count
        return count

    def flush(self) -> None:
        """Nothing is kept back."""


def file_size(state: Any) -> int:
    """Bytes of the file that tensors would be written to."""
    sink = Sink()
    torch.save(state, sink)
    return sink.size
