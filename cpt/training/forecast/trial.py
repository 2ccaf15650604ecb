"""A few real steps of the first stages, on the first domain's batches, in a module that is thrown away: what
a stage keeps, holds, computes and takes.

The stages are those of the plan, so the method grows as it does in the run; the text of all of them is that
of the first domain, so that what differs between two stages is the method's. Probes are of one batch."""

from __future__ import annotations

import logging
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor

from cpt.adapters.bank import banks_of, rest_parts
from cpt.data.budget import Budget
from cpt.data.datamodule import Domain, DomainSequence
from cpt.data.replay import Generated
from cpt.methods.base import ContinualModule
from cpt.models.forward import in_mode
from cpt.models.generation import Sampling, sample_texts
from cpt.optim.guard import Guard
from cpt.training.costs import stored_beside
from cpt.training.forecast.growing import grows, outgrow
from cpt.training.forecast.live import Live
from cpt.training.forecast.watching import (
    WATCHED,
    Clock,
    Saving,
    Steps,
    Tried,
    Watch,
    WatchScoring,
    file_size,
)
from cpt.training.leaks import Leak
from cpt.training.plan import Plan
from cpt.training.sharding import shareable
from cpt.training.trainer import drop_optimizer, make_trainer

log = logging.getLogger(__name__)
TIMED = 3  # steps of a stage, after those that are watched
WRITTEN, NO_TOKEN = 32, -1  # tokens of each text that is written, and what ends none of them
STAGES = 3  # tried; from the second to the third a method has grown by a domain
TIMED_STAGES = 2  # the first, and the one that stands for all others


def make_trial(plan: Plan, *, world: int) -> Plan:
    """The plan of one process's share of a step, alone."""
    alone = {"devices": 1, "num_nodes": 1, "strategy": "auto", "reshard_after_forward": None}
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
            replay=whole.replay.on_text(),
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
    plan: Plan,
    module: ContinualModule,
    whole: DomainSequence,
    *,
    device: torch.device,
    scratch: Path,
    is_sharded: bool,
) -> list[Tried]:
    """What the base and the first stages were seen to need; the module is of no more use. `is_sharded` says
    whether processes are to share weights out."""
    data, found = TrialSequence(whole, plan), [Tried()]
    try_scoring(plan, module, data, found[0], device=device)
    for number, stage in enumerate(data, start=1):
        log.info("trying stage %d of %d", number, len(data))
        tried = Tried()
        try_stage(plan, module, data, stage, tried, device=device, scratch=scratch)
        state = module.state_dict()
        tried.stored, tried.state = stored_beside(module, state), file_size(state)
        tried.trained = sum(each.numel() for each in module.parameters() if each.requires_grad)
        if isinstance(whole.replay, Generated) and number == 1:
            tried.writing_s = time_writing(whole.replay, module, data, device=device)
        if plan.parts.keep == "disk":
            rest_a_stage(module, scratch, sharded=is_sharded)
        try_scoring(plan, module, data, tried, device=device)
        found.append(tried)
    for stage in whole.domains[STAGES:] if grows(module) else ():
        found.append(outgrow(module, stage, found[-1]))
    return found


def time_writing(
    mixture: Generated, module: ContinualModule, data: TrialSequence, *, device: torch.device
) -> float:
    """Seconds of a token that a block of texts takes, as the first domain's model writes it."""
    text = data.train[data.text]
    rows = np.resize(np.arange(len(text)), mixture.batch_size)
    contexts = text.ids(rows)[:, : max(1, mixture.prefix)].tolist()
    model, before = module.backbone(0), module.model.device
    entries = model.get_input_embeddings().num_embeddings
    sampling = Sampling(mixture.temperature, mixture.top_p, entries, end=NO_TOKEN)
    uniforms = torch.rand(mixture.batch_size, min(WRITTEN, text.length - len(contexts[0])))
    with in_mode(model.to(device), training=False):
        began = time.perf_counter()
        sample_texts(model, contexts, uniforms, sampling=sampling)
        took = time.perf_counter() - began
    model.to(before)
    return took / uniforms.numel()


def rest_a_stage(module: ContinualModule, scratch: Path, *, sharded: bool) -> None:
    """Has what a method keeps of learned domains lie in a file, as after a stage; `sharded`: but for what
    processes share out."""
    shared = {id(each) for each in shareable(module)} if sharded else set()
    state: dict[str, Tensor] = {}
    for name, bank in banks_of(module).items():
        state |= bank.state_dict(prefix=f"{name}.", keep_vars=True)
    with tempfile.TemporaryDirectory(prefix="plan-", dir=scratch) as folder:
        path = Path(folder) / "stage.pt"
        torch.save({name: each for name, each in state.items() if id(each) not in shared}, path)
        rest_parts(module, path)  # which stays as long as it is mapped, without a name


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
        callbacks=[Guard(policy=plan.run.on_nonfinite), Leak(), watch, *saving],
    )
    trainer.fit(module, datamodule=data)
    if trainer.max_steps != data.steps(stage):  # as a stage does that is learned to its end
        module.keep_trunk()
    drop_optimizer(trainer)


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
