"""Profiles of the first stages of a run: seconds, bytes and operations of a few real steps and batches, in a
module that is thrown away."""

import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from lightning import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback

from cpt.adapters.domain_store import list_tensors_in_memory
from cpt.core.memory import read_peak_bytes, reset_peak_bytes
from cpt.data.collate import Batch
from cpt.data.corpora import Corpora
from cpt.data.datamodule import DomainSequence
from cpt.data.options import Budget, Domain
from cpt.methods.base import ContinualMethod
from cpt.models.chunked_head import count_loss_bytes
from cpt.models.fast_kernels import use_quick_dropout
from cpt.optim.nan_guard import NanGuard
from cpt.trainer.auto import Machine
from cpt.trainer.base_model import Base
from cpt.trainer.build import build_data
from cpt.trainer.checkpoint import map_stored, save_stage
from cpt.trainer.costs import CostMonitor, count_added_state_bytes, count_trained_parameters, count_weights
from cpt.trainer.lightning import drop_optimizer, make_trainer
from cpt.trainer.plan import Plan

NUM_STAGES = 3  # that are profiled: in the third a method adds what it adds for each further domain
NUM_WARMUP_STEPS = 2  # of a stage, fewer if its run has fewer
NUM_TIMED_STEPS = 3
MIN_STEPS = 2  # between the ends of two is the time of a step
Number = TypeVar("Number", int, float)


@dataclass
class Profile:
    """Seconds and bytes of a stage; stage 0, the base, is only evaluated."""

    step_s: float = 0.0
    around_s: float = 0.0  # the method's work before the first step and after the last
    save_s: float = 0.0  # of the stage file
    token_s: float = 0.0  # of a token that is evaluated
    memory: dict[str, int] = field(default_factory=dict)  # bytes between two steps, by use
    peak: int = 0  # of training and evaluation; on a CPU of the process
    loss: int = 0  # of the peak: the logits of the largest batch, or of a chunk of it, and their loss
    num_scored: int = 0  # the most positions of a batch, in training or evaluation
    trained: int = 0  # parameters
    weights: int = 0  # numbers in the exported model
    stored: int = 0  # bytes in the stage file in addition to the model's own weights
    file: int = 0
    flops: dict[str, float] = field(default_factory=dict)  # before the first step, of a step, after the last


class Profiler(Callback):
    """Fills the profile of a stage. The run takes `importance_factor` times as many importance samples;
    `costs` counted the operations of the stage, and is None where it is only evaluated."""

    def __init__(self, profile: Profile, costs: CostMonitor, importance_factor: float) -> None:
        self.profile = profile
        self.costs = costs
        self.importance_factor = importance_factor
        self.lap_start = 0.0
        self.step_ends: list[float] = []

    def lap(self, trainer: Trainer) -> float:
        """Seconds since the last call, with the device's work done."""
        if trainer.strategy.root_device.type == "cuda":
            torch.cuda.synchronize()
        previous_start = self.lap_start
        self.lap_start = time.perf_counter()
        return self.lap_start - previous_start

    def add_around(self, trainer: Trainer, phase: str) -> None:
        """Adds the seconds of the method's work before or after the domain. Work with operations is on
        importance samples: its seconds are scaled to the samples of the run."""
        seconds = self.lap(trainer)
        if self.costs.flops[phase]:
            seconds *= self.importance_factor
        self.profile.around_s += seconds

    def count_scored(self, batch: Batch) -> None:
        self.profile.num_scored = max(self.profile.num_scored, len(batch["positions"]))

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.lap(trainer)

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if batch_idx == 0:
            self.add_around(trainer, "before")
        self.count_scored(batch)

    def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
        if trainer.global_step > len(self.step_ends):  # not within an accumulated batch
            self.lap(trainer)
            self.step_ends.append(self.lap_start)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        num_warmup_steps = min(NUM_WARMUP_STEPS, len(self.step_ends) - 1)
        timed_ends = self.step_ends[num_warmup_steps - 1 :]
        self.profile.step_s = (timed_ends[-1] - timed_ends[0]) / (len(timed_ends) - 1)
        self.profile.memory = count_bytes_by_use(pl_module, trainer)

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.lap(trainer)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage == "fit":
            self.add_around(trainer, "after")

    def on_validation_batch_start(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        self.lap(trainer)
        self.count_scored(batch)

    def on_validation_batch_end(self, trainer: Trainer, *args: Any) -> None:
        self.profile.token_s += self.lap(trainer)


def count_bytes_by_use(module: Any, trainer: Trainer) -> dict[str, int]:
    """Bytes of the tensors on the device of a stage by their use, each counted once, and of those that are
    offloaded to the host."""
    gradients = [parameter.grad for parameter in module.parameters() if parameter.grad is not None]
    optimizer_state: list[torch.Tensor] = []
    for optimizer in trainer.optimizers:
        for entries in optimizer.state.values():
            optimizer_state.extend(entry for entry in entries.values() if isinstance(entry, torch.Tensor))
    uses = {
        "weights": list_tensors_in_memory(module.model),
        "method state": list_tensors_in_memory(module),
        "gradients": gradients,
        "optimizer state": optimizer_state,
    }

    # A method's state has the model's weights among it: what is counted under one use is not counted again.
    counted_storages: set[int] = set()
    num_bytes = dict.fromkeys([*uses, "offloaded"], 0)
    for use, tensors in uses.items():
        for tensor in tensors:
            storage = tensor.untyped_storage()
            if not storage.nbytes() or storage._cdata in counted_storages:
                continue
            counted_storages.add(storage._cdata)
            is_on_device = storage.device.type == trainer.strategy.root_device.type
            num_bytes[use if is_on_device else "offloaded"] += storage.nbytes()
    return num_bytes


def profile_run(
    plan: Plan,
    machine: Machine,
    corpora: Corpora,
    base: Base,
    module: ContinualMethod,
    data: DomainSequence,
) -> list[Profile]:
    """The profiles of the base and the first stages: what one of all processes does of a batch, with the same
    few steps for every domain, not more than a stage of the run has. The module cannot be used after it."""
    num_samples = min(plan.trainer.importance_samples, plan.trainer.eval_batch_size)
    importance_factor = compare_importance_samples(
        plan, data, num_samples=num_samples, world_size=machine.world_size
    )
    num_steps = choose_num_steps(data, period=module.period)
    short_plan = shorten_plan(
        plan,
        num_steps=num_steps,
        batch_size=plan.budget.batch_size // machine.world_size,
        importance_samples=num_samples,
    )
    one_process = replace(machine, devices=1, strategy="auto", num_workers=0)
    arguments = one_process.lightning_arguments(short_plan.trainer)

    # A batch of a domain and one of the general text are evaluated.
    short_data = build_data(short_plan, one_process, corpora, base, module)
    batch_tokens = plan.trainer.eval_batch_size * plan.model.max_seq_length
    short_data.eval_tokens = min(batch_tokens, data.eval_tokens or batch_tokens)
    texts = list(short_data.held_out)
    short_data.requested_texts = list(dict.fromkeys([texts[0], texts[-1]]))
    short_data.by_length = not module.in_sequence
    num_tokens = sum(int(short_data.scored_sizes(text).all.sum()) for text in short_data.requested_texts)
    profiles = []
    with tempfile.TemporaryDirectory(prefix="plan-", dir=corpora.cache) as folder:
        for number, stage in enumerate([None, *short_data]):
            profile = Profile()
            profiler = Profiler(profile, CostMonitor(), importance_factor)
            reset_peak_bytes(machine.device)
            if stage is not None:
                train_stage(short_plan, machine, arguments, module, short_data, stage, profiler)
                store_stage(plan, module, Path(folder) / f"{number:03d}.pt", profile)
            trainer = make_trainer(arguments, label="profiling evaluation", callbacks=[profiler])
            trainer.validate(module, datamodule=short_data, verbose=False)
            profile.token_s /= max(1, num_tokens)
            profile.peak = read_peak_bytes(machine.device)
            profile.loss = count_loss_bytes(
                module.model, profile.num_scored, max_logits=module.objective.max_logits
            )
            profile.weights = count_weights(module.model)
            if not profile.memory:  # the base has no steps
                profile.memory = count_bytes_by_use(module, trainer)
            profiles.append(profile)
    return profiles


def choose_num_steps(data: DomainSequence, *, period: int) -> int:
    """The steps of a profiled stage: enough for two of the method's periods, but not more than the longest
    stage of the run has, of which a plan would otherwise cost more than the run."""
    num_run_steps = max((data.steps(stage) for stage in data), default=0)
    num_steps = NUM_WARMUP_STEPS + max(NUM_TIMED_STEPS, 2 * period)
    return max(MIN_STEPS, min(num_steps, num_run_steps))


def compare_importance_samples(
    plan: Plan, data: DomainSequence, *, num_samples: int, world_size: int
) -> float:
    """How many times more importance samples a process of the run takes than `num_samples`, 1 at least."""
    sizes = []  # rows of each stage
    for stage in data:
        sizes.append(sum(len(data.train[text]) for text in stage.texts))
    mean_size = sum(sizes) / len(sizes) if sizes else 0.0

    # No stage has more samples than rows, and the processes of a run share them.
    return max(1, min(plan.trainer.importance_samples, mean_size) / num_samples / world_size)


def shorten_plan(plan: Plan, *, num_steps: int, batch_size: int, importance_samples: int) -> Plan:
    """The plan of a few steps of the first stages in one process."""
    trainer = replace(
        plan.trainer,
        devices=1,
        num_nodes=1,
        strategy="auto",
        reshard_after_forward=None,
        num_workers=0,
        importance_samples=importance_samples,
    )
    budget = Budget(steps=num_steps, epochs=None, tokens=None, batch_size=batch_size)
    return replace(plan, order=plan.order[:NUM_STAGES], budget=budget, trainer=trainer)


def train_stage(
    plan: Plan,
    machine: Machine,
    arguments: Mapping[str, Any],
    module: ContinualMethod,
    data: DomainSequence,
    stage: Domain,
    profiler: Profiler,
) -> None:
    """Trains a stage for the few steps of a plan, and fills its profile; `arguments` are those of
    `make_trainer`."""
    data.enter(stage)
    module.setup_stage(stage)
    module.train()
    policy = plan.run.on_nonfinite.replace("rollback", "stop")  # there is no checkpoint
    trainer = make_trainer(
        arguments,
        label=f"profiling {stage.name}",
        steps=plan.budget.steps,
        callbacks=[profiler.costs, NanGuard(policy=policy), profiler],
    )
    with use_quick_dropout(machine.quick_dropout):
        trainer.fit(module, datamodule=data)
    drop_optimizer(trainer)

    # Importances are the work before and after a domain.
    flops = profiler.costs.flops
    profiler.profile.flops = {
        "before": flops["before"] * profiler.importance_factor,
        "step": flops["step"],
        "after": flops["after"] * profiler.importance_factor,
    }


def store_stage(plan: Plan, module: ContinualMethod, path: Path, profile: Profile) -> None:
    """Writes the file of a stage, and fills its profile."""
    start_time = time.perf_counter()
    profile.stored = count_added_state_bytes(module, save_stage(module, path))
    profile.save_s = time.perf_counter() - start_time
    profile.file = path.stat().st_size
    profile.trained = count_trained_parameters(module)
    if plan.modules.storage == "disk":
        map_stored(module, path)


def extend_profiles(profiles: Sequence[Profile], num_stages: int) -> list[Profile]:
    """The profiles of the base and all stages: sizes of further stages grow as from the last but one to the
    last profiled stage."""
    # A single trained stage shows no growth: it is compared with itself, so that nothing grows.
    extended = list(profiles[: num_stages + 1])
    trained = profiles[1:]
    for num_beyond in range(1, num_stages - len(trained) + 1):
        last = trained[-1]
        previous = trained[-2] if len(trained) > 1 else last
        memory = {}
        for use, num_bytes in last.memory.items():
            memory[use] = extrapolate(previous.memory[use], num_bytes, num_beyond)
        flops = {}
        for phase, num_flops in last.flops.items():
            flops[phase] = extrapolate(previous.flops[phase], num_flops, num_beyond)
        extended.append(
            replace(
                last,
                file=extrapolate(previous.file, last.file, num_beyond),
                stored=extrapolate(previous.stored, last.stored, num_beyond),
                weights=extrapolate(previous.weights, last.weights, num_beyond),
                memory=memory,
                flops=flops,
            )
        )
    return extended


def estimate_memory(
    plan: Plan, profiles: Sequence[Profile], extended: Sequence[Profile], number: int, world_size: int
) -> dict[str, int]:
    """Bytes of a process in a stage, by use; `profiles` are measured, `extended` those of all stages."""
    is_sharded = plan.trainer.strategy == "fsdp"
    num_shards = world_size if is_sharded else 1
    memory = {use: num_bytes // num_shards for use, num_bytes in extended[number].memory.items()}
    offloaded = memory.pop("offloaded")

    # What a step needs in addition to what is there between steps, as the last profiled stage needed it.
    measured = profiles[min(number, len(profiles) - 1)]
    between_steps = sum(measured.memory.values()) - measured.memory["offloaded"]
    memory["logits and loss"] = min(measured.loss, measured.peak - between_steps)
    memory["activations and rest"] = measured.peak - between_steps - memory["logits and loss"]

    # The trained weights, and the buckets in which DDP reduces gradients, have the bytes of the gradients.
    gradients = memory["gradients"]
    memory["saved weights"] = gradients * plan.num_weight_copies
    memory["gradient buckets"] = gradients if world_size > 1 and not is_sharded else 0
    return memory | {"peak": sum(memory.values()), "offloaded": offloaded}


def extrapolate(previous: Number, last: Number, num_beyond: int) -> Number:
    """A size some stages beyond the last profiled one, which grows as from the previous stage to the last.

    >>> extrapolate(100, 130, 2), extrapolate(130, 100, 2)
    (190, 100)
    """
    return last + num_beyond * max(0, last - previous)
