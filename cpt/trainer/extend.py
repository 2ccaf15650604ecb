"""Extend a finished run by further domains or more steps, in its directory or in a copy of a sibling.

`trainer.steps` is raised where the result is bitwise the same as training that long from scratch."""

import logging
import os
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any

from cpt.core.cache import discard
from cpt.core.processes import is_one_of_several
from cpt.core.schema import Steps, fits
from cpt.evaluation.scores import COSTS, NOTED, Scores
from cpt.optim.schedulers import Progress
from cpt.trainer.domain_order import order_domains
from cpt.trainer.manifest import (
    Manifest,
    check_manifest,
    is_beginning,
    join_first,
    list_changed_contents,
    resolve_eval_cap,
)
from cpt.trainer.plan import OWN_CODE, Plan, why_not_growable
from cpt.trainer.run_dir import RunDir

log = logging.getLogger(__name__)
COPIED = ("config.yaml", "identity.json", "scores.json", "metrics.csv", "threads", "callbacks")
# Folders whose files are replaced, never written into: a copy may share them by hard links.
LINKED = ("answers", "diagnostics", "documents", "endtasks", "generated", "probes", "stages", "checkpoints")
MEASURED = ("endtasks", "answers", "probes")  # of a stage, in addition to the losses


def resume_from_sibling(run: RunDir, plan: Plan) -> None:
    """Copies the sibling that `find_source` finds into a new directory, atomically, and logs what it found.
    Raises ValueError where another process is at work in the directory, and as `find_source`."""
    if run.config.exists():
        return
    source, line = find_source(run, plan)
    if source is not None:
        partial = run.path.with_name(f"{run.path.name}.partial")

        def link(old: str, new: str) -> None:
            try:
                os.link(old, new)
            except OSError:  # the file system has no hard links
                shutil.copy2(old, new)

        run.path.mkdir(parents=True, exist_ok=True)
        with run.locked():  # two starts at once would mix their copies
            discard(partial)
            partial.mkdir()
            manifest = Manifest.load(source)
            has_all = manifest is not None and len(manifest.order) == len(plan.order)  # fewer steps
            for path in (source.path / name for name in (*COPIED, *LINKED)):
                if path.is_dir() and (has_all or path.name != "checkpoints"):
                    how = link if path.name in LINKED else shutil.copy2
                    shutil.copytree(path, partial / path.name, copy_function=how)
                elif path.is_file():
                    shutil.copy2(path, partial / path.name)
            for path in run.path.iterdir():  # Hydra's files are there by now
                os.replace(path, partial / path.name)
            run.path.rmdir()
            os.replace(partial, run.path)
    if line:
        log.info(line)


def find_started(plan: Plan, run: RunDir) -> RunDir:
    """The directory whose rows a run continues from: its own, or a sibling."""
    return run if run.config.exists() else find_source(run, plan)[0] or run


def find_source(run: RunDir, plan: Plan) -> tuple[RunDir | None, str]:
    """The longest finished sibling that trained the beginning of the order, and a log line: its name, or how
    the nearest one differs. Raises ValueError for a sibling that a budget alone keeps from being continued,
    and with grow=require if there is none."""
    if plan.run.grow == "never":
        return None, ""
    near: list[tuple[int, int, Path, list[str], list[str]]] = []
    shorter: dict[int, RunDir] = {}  # by their steps
    for path in sorted(run.path.parent.glob("*/identity.json")):
        sibling = RunDir(path.parent)
        try:
            manifest, scores = Manifest.load(sibling), sibling.scores()
        except ValueError:  # damaged
            continue
        if manifest is None or scores is None or not (scores.run["finished"] and sibling.config.exists()):
            continue
        if scores.run["method"] != plan.names["method"]:
            continue
        order, own = manifest.order, resolve_eval_cap(plan, sibling)
        # Where texts decide the order, it is not known yet.
        if set() < set(order) < set(plan.order) if plan.by_texts else is_beginning(order, plan.order):
            differences = sibling.changes(own.settings) or list_changed_contents(sibling, plan)
            near.append((-len(order), len(differences), sibling.path, order, differences))
        elif sibling.last_checkpoint() is not None:
            with suppress(ValueError):  # it cannot be extended
                if (before := check_extension(own, sibling)) and not list_changed_contents(sibling, plan):
                    shorter[before] = sibling
    line, why = "", why_not_growable(plan)
    nearest = min(near, key=lambda each: (bool(each[-1]), *each), default=None)
    if shorter and (nearest is None or nearest[-1]):
        source = shorter[max(shorter)]
        return source, f"Continuing from a copy of {source.path}, which has made fewer steps"
    if nearest is not None:
        _, _, folder, order, differences = nearest
        if not differences and not why:
            return RunDir(folder), f"Continuing from a copy of {folder} ({join_first(order)})"
        differences = differences or [why]
        if plan.observer.given and all(each.startswith(("budget.", "monitor.")) for each in differences):
            given = ", ".join(f"budget.{name}={value}" for name, value in plan.observer.given.items())
            told = f"{folder} has learned {join_first(order)}, and a run with a budget does not grow"
            unset = " and ".join(f"budget.{name}=null" for name in plan.observer.given)
            allowed = f"{unset}, or grow=never, which trains all domains"
            raise ValueError(f"{given} is invalid: {told}. Allowed: {allowed} from the base")
        line = f"Not continuing from {folder}: {join_first(differences, '; ')}"
    if plan.run.grow == "require":
        which = f"no finished run of method={plan.names['method']} in {run.path.parent}"
        told = line or f"{which} has learned the beginning of the order {join_first(plan.order)}"
        raise ValueError(f"grow=require is invalid: {told}. Allowed: auto, never, or such a run")
    return None, line


def extend_steps(plan: Plan, run: RunDir) -> None:
    """Reopens a run for more `trainer.steps`; a start that was killed in it does the same again. The caller
    holds the lock. Raises ValueError as `check_extension`."""
    before = check_extension(plan, run)
    if before is None:
        return
    # Before anything is removed.
    check_manifest(order_domains(plan) if plan.by_texts else plan, run, update=False)
    scores, done = run.scores(), 0
    if (path := run.last_checkpoint()) is not None:
        from cpt.core.tensors import save_state

        state = load_last(path)
        done = int(state["global_step"])
        state["loops"]["fit_loop"]["epoch_loop.batch_progress"]["is_last_batch"] = False  # more follow
        save_state(state, path)
    if scores is not None:
        scores.config_digest = plan.config_digest
        scores.run |= {"name": str(plan.run.name), "variant": str(plan.run.variant)}
        keep_base_row(scores).save(run.scores_file)
    for left in (left for kind in MEASURED for left in run.path.glob(f"{kind}/001-*")):
        shutil.rmtree(left)
    run.write_config(plan.settings)
    log.info("trainer.steps: %d -> %d: going on from step %d", before, plan.trainer.steps, done)


def check_extension(plan: Plan, run: RunDir) -> int | None:
    """The steps that a run stored, if the plan has more and is the same in all else; else None. Raises
    ValueError where the run cannot continue as if it had started with more."""
    stored: Any = run.stored("trainer.steps") if run.config.exists() else None
    if plan.trainer.steps is None or not fits(stored, Steps) or stored >= plan.trainer.steps:
        return None
    if [each.partition(":")[0] for each in run.changes(plan.settings)] != ["trainer.steps"]:
        return None
    before, scores, path = int(stored), run.scores(), run.last_checkpoint()
    rows, why = [] if scores is None else scores.rows[1:], ""
    if is_one_of_several():
        why = "several processes would open it again at once (start it once without torchrun or srun)"
    elif len(plan.order) > 1 and rows:
        why = f"{rows[0]} was learned with {before} steps, and what followed rests on it"
    elif path is not None or plan.mixture.generates:
        done = 0 if path is None else int(load_last(path)["global_step"])
        why = why_steps_differ(plan, before, plan.trainer.steps, done=done)
    elif rows:
        why = "what the optimizer had at its end was not kept (keep_end=true keeps it)"
    if why:
        told = f"{run.path} was made with trainer.steps={before}, and does not go on to {plan.trainer.steps}"
        remedy = f"take {before} back, choose another name=…, or delete the folder"
        raise ValueError(f"{told}: {why}; {remedy}")
    return before


def why_end_is_final(plan: Plan) -> str:
    """Why no steps can be added to the end of a plan's run; empty where they can."""
    if (steps := plan.trainer.steps) is None:
        return "trainer.steps=null: how much is learned is said by trainer.epochs or trainer.tokens"
    if len(plan.order) > 1:
        return "of several domains the first keep their steps, and others build on them"
    return why_steps_differ(plan, steps, 2 * steps, done=steps)


def why_steps_differ(plan: Plan, before: int, now: int, *, done: int) -> str:
    """Why the steps that were made would have been others if `now` steps were made, not `before`, by their
    learning rates and by what else counts steps; empty where they would not."""
    method, schedule, name = plan.method.load(), plan.schedule, f"method={plan.names['method']}"
    foreign = [each.target for each in plan.masks if not each.target.startswith(OWN_CODE)]
    theirs = [vars(each) for each in method.__mro__ if not each.__module__.startswith(OWN_CODE)]
    declares = any("depends_on_total_steps" in each for each in theirs)
    reasons = {
        "what the model writes before a domain depends on how many steps follow": plan.mixture.generates,
        f"{name} divides its steps among the domains": method.requires_all_domains,
        f"what {name} does in a step depends on how many there are": (
            getattr(method, "depends_on_total_steps", False)
        ),
        f"{name} does not say (depends_on_total_steps = False in its class) that no step asks for it": not (
            declares or plan.method.target.startswith(OWN_CODE)
        ),
        f"mask {', '.join(foreign)} may depend on how many steps there are": foreign,
        "callbacks may depend on how many steps there are": plan.callbacks,
        "other text is evaluated after the last step (monitor, budget)": plan.watches,
        "strategy=fsdp keeps the trainer's state in shards": plan.trainer.strategy == "fsdp",
    }
    if found := next((reason for reason, holds in reasons.items() if holds), ""):
        return found
    count = len(plan.order)
    for step in range(done + 1):
        at = [Progress(step, steps, 0, count, step, steps * count, steps) for steps in (before, now)]
        then, wanted = (schedule(each.joined if plan.carry == "all" else each) for each in at)
        if then != wanted:
            rates = f"{then:.4g} of optim.lr where {before} steps are made, {wanted:.4g} where {now} are"
            advice = "(schedule=constant schedule.warmup=0 does not ask how many follow)"
            return f"schedule={type(schedule).__name__} gives step {step} {rates} {advice}"
    return ""


def load_last(path: Path) -> dict[str, Any]:
    """The trainer's state in a run's last checkpoint. Raises ValueError for a damaged file."""
    from cpt.core.tensors import check_state, load_tensors  # torch, which other starts need not wait for

    check_state(path, instead="delete it, and take trainer.steps back")
    return load_tensors(path, mapped=False)


def keep_base_row(scores: Scores) -> Scores:
    """The scores as they were when only the base was measured; seconds stay."""
    for name in ("rows", "nll", "parts", *NOTED, *COSTS):
        setattr(scores, name, getattr(scores, name)[:1])
    for name in (*MEASURED, "monitor", "moved"):
        setattr(scores, name, {})
    scores.run["finished"], scores.objective, scores.loading = False, None, ""
    scores.measure()
    return scores
