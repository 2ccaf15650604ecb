"""Extend a finished run by further domains or more steps, in its directory or in a copy of a sibling.

Domains are added after those of a run with the same config and texts. `trainer.steps` of a run of one domain
is raised where the result is bitwise the same as training that long from scratch; else a message says why."""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from cpt.core.cache import discard
from cpt.core.processes import is_one_of_several
from cpt.core.schema import Steps, fits
from cpt.evaluation.scores import COSTS, NOTED, Scores
from cpt.optim.schedulers import Progress
from cpt.trainer.domain_order import arrange
from cpt.trainer.manifest import (
    SHOWN,
    Manifest,
    check_manifest,
    is_beginning,
    join_names,
    list_changed_contents,
    resolve_eval_cap,
)
from cpt.trainer.plan import OWN_CODE, Plan, why_not_growable
from cpt.trainer.run_dir import RunDir

log = logging.getLogger(__name__)
COPIED = ("config.yaml", "identity.json", "scores.json", "metrics.csv", "threads", "callbacks")
# Folders whose files are replaced, never written into: a copy may share them by hard links.
LINKED = ("answers", "diagnostics", "documents", "endtasks", "generated", "probes", "stages")
MEASURED = ("endtasks", "answers", "probes")  # of a stage, in addition to the losses


def resume_from_sibling(run: RunDir, plan: Plan) -> None:
    """Copies into a new directory the longest finished sibling that trained the beginning of its order; logs
    which one, or why none.

    Raises ValueError where another process is at work in the directory, and as `find_source`."""
    if run.config.exists():
        return
    source, line = find_source(run, plan)
    if source is not None:
        run.path.mkdir(parents=True, exist_ok=True)
        with run.locked():  # two starts at once would mix their copies
            is_shorter = len(Manifest.load(source).order) == len(plan.order)  # the same order, fewer steps
            copy_run(source.path, run.path, linked=(*LINKED, *["checkpoints"] * is_shorter))
    if line:
        log.info(line)


def find_started(plan: Plan, run: RunDir) -> RunDir:
    """The directory whose rows a run continues from: its own, or a sibling."""
    return run if run.config.exists() else find_source(run, plan)[0] or run


def find_source(run: RunDir, plan: Plan) -> tuple[RunDir | None, str]:
    """The finished sibling that a new directory continues from, and the line for the log: its name, or how
    the nearest one differs.

    Raises ValueError for a sibling that a budget alone keeps from being continued, and with grow=require if
    there is none to continue from."""
    if plan.run.grow == "never":
        return None, ""
    near: list[tuple[int, int, Path, list[str], list[str]]] = []
    shorter: dict[int, RunDir] = {}
    for path in sorted(run.path.parent.glob("*/identity.json")):
        sibling, order = RunDir(path.parent), []
        with suppress(ValueError):  # damaged
            order = Manifest.load(sibling).order
        may_follow = is_beginning(order, plan.order)
        if plan.by_texts:  # their order is not known yet
            may_follow = set() < set(order) < set(plan.order)
        own = resolve_eval_cap(plan, sibling)
        before = steps_before(own, sibling) if sibling.last_checkpoint() is not None else None
        if not (may_follow or before) or not sibling.config.exists():
            continue
        scores = sibling.scores()
        if scores is None or not scores.run["finished"] or scores.run["method"] != plan.names["method"]:
            continue
        if not may_follow:
            if not list_changed_contents(sibling, plan) and not why_not_resumable(own, sibling, before):
                shorter[before] = sibling
        else:
            differences = sibling.changes(own.settings) or list_changed_contents(sibling, plan)
            near.append((-len(order), len(differences), sibling.path, order, differences))
    found = min((each for each in near if not each[-1]), default=None)
    if found is not None and not (why := why_not_growable(plan)):
        return RunDir(found[2]), f"Continuing from a copy of {found[2]} ({join_names(found[3])})"
    if found is None and shorter:
        source = shorter[max(shorter)]
        return source, f"Continuing from a copy of {source.path}, which has made fewer steps"
    line = ""
    if near:
        _, _, folder, order, differences = found[:4] + ([why],) if found else min(near)
        if plan.drift.given and all(each.startswith(("budget.", "monitor.")) for each in differences):
            given = ", ".join(f"budget.{name}={nats}" for name, nats in plan.drift.given.items())
            why = f"{folder} has learned {join_names(order)}, and a run with a budget does not grow"
            allowed = "budget.general=null and budget.past=null, or grow=never, which trains all domains"
            raise ValueError(f"{given} is invalid: {why}. Allowed: {allowed} from the base")
        rest = f"; and {len(differences) - SHOWN} more" * (len(differences) > SHOWN)
        line = f"Not continuing from {folder}: {'; '.join(differences[:SHOWN])}{rest}"
    if plan.run.grow == "require":
        which = f"no finished run of method={plan.names['method']} in {run.path.parent}"
        why = line or f"{which} has learned the beginning of the order {join_names(plan.order)}"
        raise ValueError(f"grow=require is invalid: {why}. Allowed: auto, never, or such a run")
    return None, line


def copy_run(folder: Path, into: Path, *, linked: Sequence[str]) -> None:
    """Copies what a run needs to continue, atomically."""
    partial = into.with_name(f"{into.name}.partial")
    discard(partial)
    partial.mkdir(parents=True)

    def link(source: str, target: str) -> None:
        try:
            os.link(source, target)
        except OSError:  # the file system has no hard links
            shutil.copy2(source, target)

    for name in (*COPIED, *linked):
        if (folder / name).is_dir():
            how = link if name in linked else shutil.copy2
            shutil.copytree(folder / name, partial / name, copy_function=how)
        elif (folder / name).exists():
            shutil.copy2(folder / name, partial / name)
    if into.exists():  # Hydra's files are there by now
        for path in into.iterdir():
            os.replace(path, partial / path.name)
        into.rmdir()
    os.replace(partial, into)


def extend_steps(plan: Plan, run: RunDir) -> None:
    """Reopens a run for more `trainer.steps`; a start that was killed in it does the same again. The caller
    holds the lock.

    Raises ValueError where the run cannot continue to what the plan would give from scratch."""
    before = check_extension(plan, run)
    if before is None:
        return
    check_manifest(arrange(plan) if plan.by_texts else plan, run, update=False)  # before anything is removed
    done, scores, path = steps_done(run), run.scores(), run.last_checkpoint()
    if path is not None:
        from cpt.core.tensors import load_tensors, save_state

        state = load_tensors(path, mapped=False)
        state["loops"]["fit_loop"]["epoch_loop.batch_progress"]["is_last_batch"] = False  # more follow
        save_state(state, path)
    if scores is not None:
        scores.config_digest = plan.config_digest
        scores.run |= {"name": str(plan.run.name), "variant": str(plan.run.variant)}
        keep_base_row(scores).save(run.scores_file)
    for kind in MEASURED:
        for left in run.path.glob(f"{kind}/001-*"):
            shutil.rmtree(left)
    run.write_config(plan.settings)
    log.info("trainer.steps: %d -> %d: going on from step %d", before, plan.trainer.steps, done)


def check_extension(plan: Plan, run: RunDir) -> int | None:
    """The steps of a run, if the plan has more and is the same in all else; else None. Raises ValueError
    where it cannot continue to what the plan would give from scratch."""
    before = steps_before(plan, run)
    if before is not None and (why := why_not_resumable(plan, run, before)):
        told = f"{run.path} was made with trainer.steps={before}, and does not go on to {plan.trainer.steps}"
        remedy = f"take {before} back, choose another name=…, or delete the folder"
        raise ValueError(f"{told}: {why}; {remedy}")
    return before


def steps_before(plan: Plan, run: RunDir) -> int | None:
    """The steps that a run stored, if the plan has more and is the same in all else."""
    now = plan.trainer.steps
    then = run.stored("trainer.steps") if now is not None and run.config.exists() else None
    if not fits(then, Steps) or then >= now:
        return None
    changed = run.changes(plan.settings)
    return int(then) if [each.partition(":")[0] for each in changed] == ["trainer.steps"] else None


def why_not_resumable(plan: Plan, run: RunDir, before: int) -> str:
    """Why a run cannot continue to more steps as if it had started with them; empty where it can."""
    if is_one_of_several():
        return "several processes would open it again at once (start it once without torchrun or srun)"
    scores, path = run.scores(), run.last_checkpoint()
    rows = [] if scores is None else scores.rows[1:]
    if len(plan.order) > 1 and rows:
        return f"{rows[0]} was learned with {before} steps, and what followed rests on it"
    if rows and path is None and not plan.mixture.generates:
        return "what the optimizer had at its end was not kept (keep_end=true keeps it)"
    if path is None and not plan.mixture.generates:
        return ""
    return why_steps_differ(plan, before=before, done=steps_done(run))


def why_end_is_final(plan: Plan) -> str:
    """Why no steps can be added to the end of a plan's run; empty where they can."""
    if plan.trainer.steps is None:
        return "trainer.steps=null: how much is learned is said by trainer.epochs or trainer.tokens"
    if len(plan.order) > 1:
        return "of several domains the first keep their steps, and others build on them"
    return why_steps_differ(plan, before=plan.trainer.steps, done=plan.trainer.steps)


def why_steps_differ(plan: Plan, *, before: int, done: int) -> str:
    """Why the steps that were made would have been others if more were to follow; empty where they would not.
    Names the first step with another learning rate."""
    method, schedule, now = plan.method.load(), plan.schedule, plan.trainer.steps or before
    foreign = [each.target for each in plan.masks if not each.target.startswith(OWN_CODE)]
    declares = plan.method.target.startswith(OWN_CODE) or any(
        "counts_steps" in vars(each) for each in method.__mro__ if not each.__module__.startswith(OWN_CODE)
    )
    name = f"method={plan.names['method']}"
    reasons = {
        "what the model writes before a domain depends on how many steps follow": plan.mixture.generates,
        f"{name} divides its steps among the domains": method.needs_all,
        f"what {name} does in a step depends on how many there are": getattr(method, "counts_steps", False),
        f"{name} does not say (counts_steps = False in its class) that no step asks for it": not declares,
        f"mask {', '.join(foreign)} may depend on how many steps there are": bool(foreign),
        "callbacks may depend on how many steps there are": bool(plan.callbacks),
        "other text is evaluated after the last step (monitor, budget)": plan.watches,
        "strategy=fsdp keeps the trainer's state in shards": plan.trainer.strategy == "fsdp",
    }
    if found := next((reason for reason, holds in reasons.items() if holds), ""):
        return found
    now, count = now if now > before else 2 * before, len(plan.order)
    for step in range(done + 1):
        at = [Progress(step, steps, 0, count, step, steps * count, steps) for steps in (before, now)]
        then, wanted = (schedule(each.joined if plan.carry == "all" else each) for each in at)
        if then != wanted:
            rates = f"{then:.4g} of optim.lr where {before} steps are made, {wanted:.4g} where {now} are"
            advice = "(schedule=constant schedule.warmup=0 does not ask how many follow)"
            return f"schedule={type(schedule).__name__} gives step {step} {rates} {advice}"
    return ""


def steps_done(run: RunDir) -> int:
    """The steps of a run's last checkpoint. Raises ValueError for a damaged file."""
    from cpt.core.tensors import check_state, load_tensors  # torch, which other starts need not wait for

    path = run.last_checkpoint()
    if path is None:
        return 0
    check_state(path, instead="delete it, and take trainer.steps back")
    return int(load_tensors(path)["global_step"])


def keep_base_row(scores: Scores) -> Scores:
    """The scores as they were when only the base was measured; seconds stay."""
    for name in ("rows", "nll", "parts", *NOTED, *COSTS):
        setattr(scores, name, getattr(scores, name)[:1])
    for name in (*MEASURED, "monitor", "moved"):
        setattr(scores, name, {})
    scores.run["finished"], scores.objective, scores.loading = False, None, ""
    scores.measure()
    return scores
