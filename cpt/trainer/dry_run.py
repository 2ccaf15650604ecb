"""`plan=true`: what a run will cost, from a few real steps of its first stages, multiplied out; and
`trainer.match=ncl`: the steps that take the operations of ncl.

Texts are read and tokenized into the run's cache. The method's first stages are trained for a few steps and
evaluated on a few batches, in a module that is thrown away. Documents, tokens and steps are counted. A later
stage takes the seconds of the last profiled one, and its bytes plus, for each further domain, the difference
between the last two."""

import contextlib
import json
import logging
import operator
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from lightning import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback
from torch import Tensor

from cpt.adapters.domain_store import in_memory
from cpt.core.memory import forget_peak, peak
from cpt.core.processes import is_one_of_several
from cpt.core.schema import Options
from cpt.core.sections import Choice
from cpt.core.tensors import load_tensors
from cpt.data.corpora import Corpora
from cpt.data.datamodule import DomainSequence
from cpt.data.options import Budget, Domain
from cpt.data.replay import NO_REPLAY
from cpt.evaluation.options import EvalOptions
from cpt.evaluation.scores import Scores
from cpt.methods.base import ContinualMethod
from cpt.models.memory import use_quick_dropout
from cpt.optim.nan_guard import NanGuard
from cpt.reporting.frames import megabytes
from cpt.trainer.auto import Machine
from cpt.trainer.base_model import Base, make_base
from cpt.trainer.build import build_data, build_method, log_settings, read_corpora
from cpt.trainer.chat_date import date_chats
from cpt.trainer.checkpoint import map_stored, save_stage
from cpt.trainer.costs import CostMonitor, stored_beside, trained_parameters
from cpt.trainer.lightning import drop_optimizer, make_trainer
from cpt.trainer.plan import Plan
from cpt.trainer.preflight import prepare
from cpt.trainer.run_dir import RunDir

log = logging.getLogger(__name__)
STAGES = 3  # profiled: in the third a method adds what it adds for each further domain
WARMUP, TIMED = 2, 3  # steps of a stage


@dataclass
class Profile:
    """Seconds and bytes of a stage; stage 0, the base, is only evaluated."""

    step_s: float = 0.0
    around_s: float = 0.0  # the method's work before the first step and after the last
    save_s: float = 0.0  # of the stage file
    token_s: float = 0.0  # of a token that is evaluated
    memory: dict[str, int] = field(default_factory=dict)  # bytes between two steps, by use
    peak: int = 0  # of training and evaluation; on a CPU of the process
    trained: int = 0  # parameters
    stored: int = 0  # bytes in the stage file in addition to the model's own weights
    file: int = 0
    flops: dict[str, float] = field(default_factory=dict)  # before the first step, of a step, after the last


class Profiler(Callback):
    """Fills the profile of a stage. `probe_times` is how many times more importance samples the run takes."""

    def __init__(self, profile: Profile, costs: CostMonitor | None, probe_times: float) -> None:
        self.profile, self.costs, self.probe_times = profile, costs, probe_times
        self.at, self.ends = 0.0, list[float]()

    def lap(self, trainer: Trainer, *args: Any) -> float:
        """Seconds since the last call, with the device's work done."""
        if trainer.strategy.root_device.type == "cuda":
            torch.cuda.synchronize()
        then, self.at = self.at, time.perf_counter()
        return self.at - then

    on_train_start = on_fit_end = on_validation_batch_start = lap  # type: ignore[assignment]

    def add_around(self, trainer: Trainer, phase: str) -> None:
        sampled = self.costs is not None and self.costs.flops[phase]
        self.profile.around_s += self.lap(trainer) * (self.probe_times if sampled else 1)

    def on_train_batch_start(self, trainer: Trainer, module: LightningModule, batch: Any, at: int) -> None:
        if at == 0:
            self.add_around(trainer, "before")

    def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
        if trainer.global_step > len(self.ends):  # not within an accumulated batch
            self.lap(trainer)
            self.ends.append(self.at)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        timed = self.ends[WARMUP - 1 :]
        self.profile.step_s = (timed[-1] - timed[0]) / (len(timed) - 1)
        self.profile.memory = bytes_by_use(pl_module, trainer)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage == "fit":
            self.add_around(trainer, "after")

    def on_validation_batch_end(self, trainer: Trainer, *args: Any) -> None:
        self.profile.token_s += self.lap(trainer)


def bytes_by_use(module: Any, trainer: Trainer) -> dict[str, int]:
    """Bytes of the tensors on the device of a stage, each counted once, and of those that are offloaded to
    the host."""
    states = [value for each in trainer.optimizers for kept in each.state.values() for value in kept.values()]
    uses: dict[str, Iterable[Tensor]] = {
        "weights": in_memory(module.model),
        "method state": in_memory(module),
        "gradients": [each.grad for each in module.parameters() if each.grad is not None],
        "optimizer state": [value for value in states if isinstance(value, Tensor)],
    }
    seen, found = set[int](), dict.fromkeys([*uses, "offloaded"], 0)
    for use, tensors in uses.items():
        for storage in [tensor.untyped_storage() for tensor in tensors]:
            if storage.nbytes() and storage._cdata not in seen:
                seen.add(storage._cdata)
                is_here = storage.device.type == trainer.strategy.root_device.type
                found[use if is_here else "offloaded"] += storage.nbytes()
    return found


def estimate(plan: Plan, place: RunDir, extended: RunDir | None) -> dict[str, Any]:
    """What a run will do and cost, as plan=json prints it; `extended` is the run that a new one goes on from.
    Raises ValueError for one that cannot be run."""
    ready = prepare(plan, place)
    machine, plan = ready.machine, date_chats(plan)
    corpora = read_corpora(plan)
    start = make_base(plan.model, corpora, accelerator=plan.trainer.accelerator, trains=False)
    plan = match_operations(plan, machine, corpora, start, stored=place.matched)
    module = build_method(plan, machine, start)
    data = build_data(plan, machine, corpora, start, module)
    log_settings(plan, machine, module, data)
    folder = place if extended is None else extended
    scores = folder.load_scores()
    state = "new" if scores is None else scores.state
    if extended is not None:
        state = f"continues {extended.path} ({state})"
    texts, stages = count_work(plan.evaluation, data, folder, scores)
    run = {"folder": str(place.path), **plan.names, "seed": plan.run.seed}
    about: dict[str, Any] = {"run": run, "state": state}
    about |= {
        "device": str(machine.device),
        "processes": machine.world_size,
        "texts": texts,
        "stages": stages,
    }
    if not any(each["left_steps"] or each["left_read_tokens"] for each in stages):
        return about | {"left": "nothing"}
    profiles = profile_run(plan, machine, corpora, start, module, data)
    measured = {"end tasks": plan.endtasks, "answers": plan.answers, "benchmark": plan.benchmark}
    left_out = [name for name, asked in measured.items() if asked is not None]
    left_out += ["monitoring"] * plan.has_monitor + ["generated text"] * plan.mixture.is_generated
    left_out += [f"training of {start.lacks}"] * bool(start.lacks)
    grows = type(module).expand is not ContinualMethod.expand
    about |= {"lower_bound": grows and len(stages) > len(profiles), "not_included": left_out}
    return about | extrapolate(plan, profiles, stages, machine.world_size)


def count_work(
    policy: EvalOptions, data: DomainSequence, place: RunDir, scores: Scores | None
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The texts in documents and tokens, the stages in steps and tokens, and what a run folder lacks."""
    texts, parts = dict[str, dict[str, Any]](), [each.texts for each in data]
    for name in dict.fromkeys([*sum(parts, ()), *data.held_out]):
        train, held_out, chosen = data.train.get(name), data.held_out[name], data.scored_sizes(name)
        texts[name] = {
            "text": name,
            "train_documents": None if train is None else train.documents,
            "train_tokens": None if train is None else int(train.row_lengths.sum()),
            "held_out_documents": held_out.documents,
            "held_out_tokens": int(held_out.row_lengths.sum()),
            "read_tokens": int(chosen.all.sum()),  # to score it once
            "scored_tokens": int(data.objective.scoring.scored(chosen).sum()),
        }
    stages, done = [], len(scores.rows) if scores else 0
    for number, stage in enumerate([Domain("base", -1, ()), *data]):
        columns = policy.choose_columns(number, stages=parts, texts=list(data.held_out))
        steps, left, tokens = data.steps(stage) if number else 0, columns, 0.0
        left_steps = steps if number >= done else 0
        if scores and number < done:
            there = number in (0, done - 1) or place.stage_path(number).exists()
            left = [text for text in columns if there and text not in scores.measured(number)]
        elif (path := place.checkpoint_path(number, stage.name)).exists():
            with contextlib.suppress(Exception):  # the run reports a damaged one
                left_steps -= int(load_tensors(path)["global_step"])
        if number:
            past = data.earlier_texts(stage)
            own, before = ([data.train[text].tokens_per_row for text in each] for each in (stage.texts, past))
            replayed = data.replay.is_appended * (
                data.replay.past_ratio * bool(past) + data.replay.general_ratio
            )
            rows = sum(map(operator.mul, data.steps_by_text(stage), own)) * (1 + replayed)
            recovered = data.recovery_steps(stage) * sum(before) / max(1, len(before))
            tokens = data.budget.batch_size * (rows + recovered)
        row = {"stage": stage.name, "steps": steps, "left_steps": left_steps, "tokens": int(tokens)}
        scored = sum(texts[text]["scored_tokens"] for text in columns)
        row |= {"scored_texts": len(columns), "scored_tokens": scored}
        row |= {f"left_{key}": sum(texts[t][key] for t in left) for key in ("scored_tokens", "read_tokens")}
        stages.append(row)
    return list(texts.values()), stages


def profile_run(
    plan: Plan,
    machine: Machine,
    corpora: Corpora,
    start: Base,
    module: ContinualMethod,
    data: DomainSequence,
) -> list[Profile]:
    """The profiles of the base and the first stages: what one of all processes does of a batch, with the same
    few steps for every domain. The module cannot be used after it."""
    options, world, device, found = plan.trainer, machine.world_size, machine.device, list[Profile]()
    probe = min(options.importance_samples, options.eval_batch_size)
    sizes = [sum(len(data.train[text]) for text in each.texts) for each in data] or [0]
    times = max(1, min(options.importance_samples, sum(sizes) / len(sizes)) / probe / world)
    steps, batch_size = WARMUP + max(TIMED, 2 * module.period), plan.budget.batch_size // world
    alone = replace(machine, devices=1, strategy="auto", num_workers=0)
    few = replace(
        plan,
        order=plan.order[:STAGES],
        budget=Budget(steps=steps, epochs=None, tokens=None, batch_size=batch_size),
        trainer=replace(
            options,
            devices=1,
            num_nodes=1,
            strategy="auto",
            reshard_after_forward=None,
            num_workers=0,
            importance_samples=probe,
        ),
    )
    arguments = alone.lightning_arguments(few.trainer)
    part = build_data(few, alone, corpora, start, module)
    part.eval_tokens = options.eval_batch_size * plan.model.max_seq_length
    part.asked = list(dict.fromkeys([[*part.held_out][0], [*part.held_out][-1]]))  # a domain, general text
    part.by_length = not module.in_sequence
    tokens = sum(int(part.scored_sizes(name).all.sum()) for name in part.asked)
    with tempfile.TemporaryDirectory(prefix="plan-", dir=corpora.cache) as scratch:
        for number, stage in enumerate([None, *part]):
            found.append(now := Profile())
            profiler = Profiler(now, costs := CostMonitor(), times)
            forget_peak(device)
            if stage:
                part.enter(stage)
                module.setup_stage(stage)
                module.train()
                policy = plan.run.on_nonfinite.replace("rollback", "stop")  # there is no checkpoint
                callbacks = [costs, NanGuard(policy=policy), profiler]
                label = f"profiling {stage.name}"
                trainer = make_trainer(arguments, label=label, steps=steps, callbacks=callbacks)
                with use_quick_dropout(machine.quick_dropout):
                    trainer.fit(module, datamodule=part)
                drop_optimizer(trainer)
                now.flops = {phase: n * (1 if phase == "step" else times) for phase, n in costs.flops.items()}
                path, began = Path(scratch) / f"{number:03d}.pt", time.perf_counter()
                now.stored = stored_beside(module, save_stage(module, path))
                now.save_s, now.file = time.perf_counter() - began, path.stat().st_size
                now.trained = trained_parameters(module)
                if plan.modules.storage == "disk":
                    map_stored(module, path)
            trainer = make_trainer(arguments, label="profiling evaluation", callbacks=[profiler])
            trainer.validate(module, datamodule=part, verbose=False)
            now.token_s, now.peak = now.token_s / max(1, tokens), peak(device)
            now.memory = now.memory or bytes_by_use(module, trainer)
    return found


def extend_profiles(profiles: Sequence[Profile], stages: int) -> list[Profile]:
    """The profiles of the base and all stages: each further one adds what the last profiled one has added."""
    found, trained = list(profiles[: stages + 1]), profiles[1:]
    for beyond in range(1, stages - len(trained) + 1):
        then, now = trained[-2:] if len(trained) > 1 else (trained[-1], trained[-1])
        memory = {use: b + beyond * max(0, b - then.memory[use]) for use, b in now.memory.items()}
        flops = {phase: b + beyond * max(0, b - then.flops[phase]) for phase, b in now.flops.items()}
        sizes = ((then.file, now.file), (then.stored, now.stored))
        file, stored = (b + beyond * max(0, b - a) for a, b in sizes)
        found.append(replace(now, file=file, stored=stored, memory=memory, flops=flops))
    return found


def match_operations(plan: Plan, machine: Machine, corpora: Corpora, start: Base, *, stored: Path) -> Plan:
    """The plan with as many steps (epochs, tokens) as take, over all domains, the operations of ncl with the
    configured ones; of a run that has started, those it has stored.

    The scale is (O_ncl - A) / O for O operations in the method's steps and A around them. Raises ValueError
    where that leaves no step, and where several processes start at once."""
    if plan.trainer.match is None:
        return plan
    name, given = plan.budget.option
    if stored.exists():
        try:
            steps = json.loads(stored.read_text())[name]
        except (ValueError, KeyError, TypeError):
            told = f"{stored} is damaged; restore it from a backup, or delete it to count again"
            raise ValueError(told) from None
        return replace(plan, budget=replace(plan.budget, **{name: steps}))
    if is_one_of_several():
        told = "trainer.match=ncl is invalid with torchrun or srun: one process counts operations"
        raise ValueError(f"{told}. Allowed: trainer.{name}=N, the N that plan=true logs")
    ncl = replace(plan, method=Choice("cpt.methods.ncl.NCL", Options()), masks=(), replay=NO_REPLAY)
    if (plan.method, plan.masks, plan.replay) == (ncl.method, ncl.masks, ncl.replay):
        return plan
    sums = []
    for each in (ncl, plan):
        module, within, around = build_method(each, machine, start), 0.0, 0.0
        data = build_data(each, machine, corpora, start, module)
        profiles = profile_run(each, machine, corpora, start, module, data)
        for stage, own in zip(data, extend_profiles(profiles, len(data))[1:], strict=True):
            within += data.steps(stage) * machine.world_size * own.flops["step"]
            around += machine.world_size * (own.flops["before"] + own.flops["after"])
        sums.append((within, around))
    (reference, _), (within, around) = sums
    if not within:
        return plan
    scaled = (reference - around) / within * given
    value: Any = round(scaled) if name == "steps" else float(f"{scaled:.6g}")
    if value <= 0:
        told = f"ncl takes {reference:.3g} operations, the importances of {plan.names['method']} {around:.3g}"
        allowed = f"null, more trainer.{name}, fewer trainer.importance_samples"
        raise ValueError(f"trainer.match=ncl is invalid: {told}. Allowed: {allowed}")
    told = "as given" if value == given else f"not {given}"
    log.info("Matching the %.3g operations of ncl: trainer.%s=%s, %s", reference, name, value, told)
    return replace(plan, budget=replace(plan.budget, **{name: value}))


def extrapolate(
    plan: Plan, profiles: Sequence[Profile], stages: Sequence[dict[str, Any]], world: int
) -> dict[str, Any]:
    """Memory, disk and seconds of all stages."""
    trained, last, is_fsdp = profiles[1:], len(stages) - 1, plan.trainer.strategy == "fsdp"
    copies = plan.observer.weight_copies or int(plan.monitor.keep == "best")  # of the weights, to go back to
    seconds = dict.fromkeys(("training", "around domains", "checkpoints", "evaluation"), 0.0)
    each = extend_profiles(profiles, last)

    def memory_of(number: int) -> dict[str, int]:
        own = profiles[min(number, len(trained))]
        uses = {use: size // (world if is_fsdp else 1) for use, size in each[number].memory.items()}
        offloaded, gradients = uses.pop("offloaded"), uses["gradients"]
        uses["activations and rest"] = own.peak - sum(own.memory.values()) + own.memory["offloaded"]
        uses["weights to go back to"] = gradients * copies
        uses["gradient buckets"] = gradients * (world > 1 and not is_fsdp)
        return uses | {"peak": sum(uses.values()), "offloaded": offloaded}

    for row, own in zip(stages, each, strict=True):
        seconds["evaluation"] += row["left_read_tokens"] * own.token_s / world
        if left := row["left_steps"]:
            saves = 1 + left // plan.trainer.checkpoint_every
            seconds["training"] += left * own.step_s
            seconds["around domains"] += own.around_s
            whole = own.save_s * (1 + own.memory["optimizer state"] / own.file)  # with the optimizer's state
            seconds["checkpoints"] += own.save_s + saves * whole
    final = memory_of(last)
    return {
        "stages": [row | {"stored": one.stored} for row, one in zip(stages, each, strict=True)],
        "trained_parameters": max((one.trained for one in trained), default=0),
        "memory": {"first": memory_of(min(1, last)), "last": final},
        "disk": {
            "stage file": each[-1].file,
            "all stage files (save_all_stages=true)": sum(one.file for one in each[1:]),
            "checkpoint": each[-1].file + each[-1].memory["optimizer state"] + final["weights to go back to"],
            "exported model": each[-1].memory["weights"],
        },
        "seconds": seconds | {"total": sum(seconds.values())},
        "step_seconds": trained[-1].step_s if trained else None,
    }


def format_table(data: Mapping[str, Any]) -> str:
    """What plan=true prints; of many texts and stages the first and last, and the sums of all."""
    run, cost, tables = data["run"], "seconds" in data, []
    for key in ("texts", "stages"):
        hidden = ["read_tokens", "left_read_tokens", "stored"]
        frame = pd.DataFrame(data[key]).drop(columns=hidden, errors="ignore")
        sums = pd.DataFrame([{frame.columns[0]: "all", **frame.iloc[:, 1:].sum()}])
        few = frame if len(frame) <= 8 else pd.concat([frame.head(4), frame.tail(4)])
        shown = pd.concat([few, sums]).map(lambda cell: cell if isinstance(cell, str) else f"{cell:,.0f}")
        tables.append(shown.replace("nan", "–").to_string(index=False))
    chosen = " ".join(f"{group}={run[group]}" for group in ("method", "mask", "replay", "model", "seed"))
    found = [
        f"Plan of {run['folder']}: {chosen}, {data['processes']} x {data['device']}",
        f"State: {data['state']}" + "; nothing is left to train or to evaluate" * (not cost),
        *tables,
    ]
    if cost:
        memory = pd.DataFrame(data["memory"])
        rows = {f"disk: {name}": megabytes(size) for name, size in data["disk"].items()}
        times = {name: timedelta(seconds=round(size)) for name, size in data["seconds"].items()}
        rows |= {f"time left: {name}": str(size) for name, size in times.items()}
        found += [memory[memory.any(axis=1)].map(megabytes).add_suffix(" stage").to_string()]
        found += [pd.Series(rows | {"trained parameters": f"{data['trained_parameters']:,}"}).to_string()]
        note = f"a few steps and batches of up to {STAGES} stages, on this machine as it is now"
        found.append(f"Measured: {note}.")
        if data["lower_bound"]:
            found.append("The model grows with each domain: memory, disk and time are lower bounds.")
        if data["not_included"]:
            found.append(f"Time not included: {', '.join(data['not_included'])}.")
    return "\n\n".join(found)
