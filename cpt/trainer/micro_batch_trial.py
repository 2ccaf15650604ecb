"""A trial of a micro-batch: the first stages for a few steps on full rows, in a module that is thrown
away."""

import logging
from dataclasses import replace
from typing import Any

import torch
from lightning import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities.memory import garbage_collection_cuda, is_oom_error

from cpt.core.memory import read_peak_bytes, reset_peak_bytes
from cpt.core.messages import count_noun
from cpt.data.corpora import Corpora
from cpt.models.chunked_head import count_head_entries
from cpt.models.fast_kernels import use_quick_dropout
from cpt.optim.nan_guard import NanGuard
from cpt.trainer.auto import Machine
from cpt.trainer.base_model import Base
from cpt.trainer.build import build_data, build_method
from cpt.trainer.computed_memory import add_replayed
from cpt.trainer.full_batch import make_full_batch
from cpt.trainer.lightning import drop_optimizer, make_trainer
from cpt.trainer.plan import Plan
from cpt.trainer.profiling import Profile, count_bytes_by_use, estimate_memory, extend_profiles, shorten_plan

log = logging.getLogger(__name__)


class MemoryReader(Callback):
    """Fills the profile of a stage with the bytes between two steps."""

    def __init__(self, profile: Profile) -> None:
        self.profile = profile

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.profile.memory = count_bytes_by_use(pl_module, trainer)


def try_micro_batch(
    plan: Plan, machine: Machine, corpora: Corpora, base: Base, micro_batch: int
) -> int | None:
    """The most bytes that a process needs in the last stage with `micro_batch` samples of full length in each
    forward pass; None where the device has run out of memory. It is measured in one process: buffers of DDP
    and what further stages add are computed. Raises whatever else ends the trial."""
    garbage_collection_cuda()  # what an earlier trial has left
    try:
        return measure_peak(plan, machine, corpora, base, micro_batch)
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        log.debug("Out of memory with a micro-batch of %d", micro_batch, exc_info=error)
        return None


def is_out_of_memory(error: Exception) -> bool:
    # Lightning knows the messages of CUDA, cuDNN and the CPU; torch's class is raised for other GPUs as well.
    return is_oom_error(error) or isinstance(error, torch.OutOfMemoryError | MemoryError)


def measure_peak(plan: Plan, machine: Machine, corpora: Corpora, base: Base, micro_batch: int) -> int:
    """The bytes of `try_micro_batch`; runs out of memory where they are too many."""
    module = build_method(plan, machine, base)
    num_stages = len(module.stages(plan.order))
    # Up to the first step that is like the later ones, after which the optimizer has its state; then a whole
    # period.
    num_steps = module.settled + 1 + module.period
    short_plan = make_trial_plan(plan, machine, micro_batch, num_steps=num_steps)
    one_process = replace(machine, devices=1, strategy="auto", num_workers=0)
    arguments = one_process.lightning_arguments(short_plan.trainer)

    data = build_data(short_plan, one_process, corpora, base, module)
    data.trial_batch = make_full_batch(
        base.objective,
        num_rows=add_replayed(plan, micro_batch),
        length=plan.model.max_seq_length,
        num_entries=count_head_entries(module.model),
        has_examples=plan.source.encoding is not None,
    )
    profiles = [Profile()]  # of the base, which is not trained
    for stage in data:
        profile = Profile()
        reset_peak_bytes(machine.device)
        data.enter(stage)
        module.setup_stage(stage)
        module.train()
        trainer = make_trainer(
            arguments,
            label=f"trying {count_noun(micro_batch, 'sample')}",
            steps=num_steps,
            callbacks=[NanGuard(policy="skip"), MemoryReader(profile)],
        )
        with use_quick_dropout(machine.quick_dropout):
            trainer.fit(module, datamodule=data)
        drop_optimizer(trainer)
        profile.peak = read_peak_bytes(machine.device)
        profiles.append(profile)

    if num_stages == 0:  # method=none trains nothing
        return 0
    extended = extend_profiles(profiles, num_stages)
    memory: dict[str, Any] = estimate_memory(plan, profiles, extended, num_stages, machine.world_size)
    return memory["peak"]


def make_trial_plan(plan: Plan, machine: Machine, micro_batch: int, *, num_steps: int) -> Plan:
    """The plan of a trial: a few steps of the first stages in one process."""
    num_own_rows = plan.budget.batch_size // machine.world_size
    # Two micro-batches stand for any number: from the second on, gradients are there in the forward pass.
    num_micro_batches = min(2, num_own_rows // micro_batch)
    short_plan = shorten_plan(
        plan,
        num_steps=num_steps,
        batch_size=plan.budget.batch_size,
        importance_samples=min(plan.trainer.importance_samples, micro_batch),
    )
    # Importances are estimated on batches of eval_batch_size, whose memory no micro-batch changes.
    trial_options = replace(
        short_plan.trainer,
        micro_batch=None,
        accumulate_grad_batches=num_micro_batches,
        eval_batch_size=micro_batch,
    )
    return replace(short_plan, trainer=trial_options)
