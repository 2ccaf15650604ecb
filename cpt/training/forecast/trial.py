"""A few real steps of the first stages, on the first domain's batches, in a module that is thrown away: what
a stage keeps, holds, computes and takes.

The stages are those of the plan, so the method grows as it does in the run; the text of all of them is that
of the first domain, so that what differs between two stages is the method's. Probes are of one batch."""

from __future__ import annotations

import logging
import tempfile
import time
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from lightning import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from cpt.data.budget import Budget
from cpt.data.datamodule import Domain, DomainSequence
from cpt.methods.base import ContinualModule
from cpt.optim.guard import Guard
from cpt.training.costs import count_operations, forget_peak, own_names, peak, stored_bytes
from cpt.training.forecast.live import Live, bytes_of
from cpt.training.plan import Plan
from cpt.training.trainer import drop_optimizer, make_trainer

log = logging.getLogger(__name__)
WATCHED, TIMED = 2, 3  # steps of a stage: of the first its optimizer's state is new
STAGES = 3  # tried; from the second to the third a method has grown by a domain
TIMED_STAGES = 2  # the first, and the one that stands for all others


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
        self.live.hold([*pl_module.parameters(), *pl_module.buffers()])
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
        self.live.hold([*pl_module.parameters(), *pl_module.buffers()])
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
        "weights": tensors_of(module.model),
        "companions": tensors_of(module.beside),
        "state": tensors_of(module),
        "gradients": [each.grad for each in module.parameters() if each.grad is not None],
        "optimizer": [value for value in states if isinstance(value, Tensor)],
    }
    known = {
        name: bytes_of((each for each in given if each.device.type == live.device.type), seen=seen)
        for name, given in there.items()
    }
    return known | {"others": max(0, live.now - sum(known.values()))}


def tensors_of(module: torch.nn.Module) -> list[Tensor]:
    return [*module.parameters(), *module.buffers()]


def make_trial(plan: Plan, *, world: int) -> Plan:
    """The plan of one process's share of a step, alone."""
    alone = {"devices": 1, "num_nodes": 1, "strategy": "auto"}
    share = plan.budget.batch_size // world
    probe = min(plan.trainer.probe_samples, plan.trainer.eval_batch_size)
    return replace(
        plan,
        budget=Budget(steps=WATCHED + TIMED, epochs=None, tokens=None, batch_size=share),
        trainer=replace(plan.trainer, **alone, probe_samples=probe, workers=0),
    )


class TrialSequence(DomainSequence):
    """The first stages of a sequence, all with the text of the first domain; `steps` are those of a trial."""

    def __init__(self, whole: DomainSequence, plan: Plan) -> None:
        text = whole.domains[0].parts[0] if whole.domains else next(iter(whole.held_out))
        stages = [replace(each, parts=(text,)) for each in whole.domains[:STAGES]]
        super().__init__(
            stages,
            train=whole.train,
            held_out={text: whole.held_out[text]},
            objective=whole.objective,
            budget=plan.budget,
            replay=replace(whole.replay, memory=None),
            seed=whole.seed,
            accumulate=whole.accumulate,
            eval_batch_size=whole.eval_batch_size,
            probe_samples=plan.trainer.probe_samples,
            workers=0,
        )
        self.text, self.whole = text, whole

    def scored_rows(self, name: str) -> Any:
        """The rows of one batch."""
        return self.whole.scored_rows(name)[: self.eval_batch_size]

    @property
    def scored_tokens(self) -> int:
        return int(self.scored_sizes(self.text).all.sum())


def try_stages(
    plan: Plan, module: ContinualModule, whole: DomainSequence, *, device: torch.device, scratch: Path
) -> list[Tried]:
    """What the base and the first stages were seen to need; the module is of no more use."""
    data, found = TrialSequence(whole, plan), [Tried()]
    own = own_names(module.model)
    try_scoring(plan, module, data, found[0], device=device)
    for number, stage in enumerate(data, start=1):
        log.info("trying stage %d of %d", number, len(data))
        tried = Tried()
        try_stage(plan, module, data, stage, tried, device=device, scratch=scratch)
        state = module.state_dict()
        tried.stored, tried.state = stored_bytes(state, own), file_size(state)
        tried.trained = sum(each.numel() for each in module.parameters() if each.requires_grad)
        try_scoring(plan, module, data, tried, device=device)
        found.append(tried)
    return found


def try_stage(
    plan: Plan,
    module: ContinualModule,
    data: TrialSequence,
    stage: Domain,
    tried: Tried,
    *,
    device: torch.device,
    scratch: Path,
) -> None:
    """Learns a stage for a few steps; the one whose time stands for others leaves a checkpoint."""
    data.enter(stage)
    module.enter(stage)
    module.train()
    timed = TIMED * (stage.index < TIMED_STAGES)
    watch = Watch(tried, Live(device))
    saving = [Saving(tried, scratch)] * (timed > 0)
    trainer = make_trainer(
        plan.trainer.lightning,
        label=f"trying {stage.name}",
        steps=WATCHED + timed,
        callbacks=[Guard(policy=plan.run.on_nonfinite), watch, *saving],
    )
    trainer.fit(module, datamodule=data)
    if trainer.max_steps != data.steps(stage):  # as a stage does that is learned to its end
        module.keep_trunk()
    drop_optimizer(trainer)


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


def try_scoring(
    plan: Plan, module: ContinualModule, data: TrialSequence, tried: Tried, *, device: torch.device
) -> None:
    """Scores a batch as text of a domain that was learned and of none, and a third time by the clock."""
    for learned, phase in ((True, tried.seen), (False, tried.unseen)):
        data.places = {data.text: 0} if learned else {}
        live = Live(device)
        watch = WatchScoring(live)
        validate(plan, module, data, watch)
        phase.flops = watch.phase.flops // max(1, data.scored_tokens)
        tried.scoring_peak = max(tried.scoring_peak, live.peak)
    clock = Clock()
    data.places = {data.text: 0}
    validate(plan, module, data, clock)
    seconds = clock.seconds / max(1, data.scored_tokens)
    tried.seen.seconds = seconds
    tried.unseen.seconds = seconds * tried.unseen.flops / max(1, tried.seen.flops)


def validate(plan: Plan, module: ContinualModule, data: DomainSequence, callback: Callback) -> None:
    trainer = make_trainer(plan.trainer.lightning, label="trying to score", callbacks=[callback])
    trainer.validate(module, datamodule=data, verbose=False)


def time_pretraining(module: ContinualModule, data: DomainSequence, options: dict[str, Any]) -> float:
    """Seconds of a step of the base model's pre-training."""
    steps = Steps()
    trainer = make_trainer(options, label="trying the base", steps=WATCHED + TIMED, callbacks=[steps])
    trainer.fit(module, datamodule=data)
    return (steps.ends[-1] - steps.ends[WATCHED - 1]) / TIMED


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
