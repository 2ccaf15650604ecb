"""A larger trainer.steps for a run that is there: gone on with where that gives what so many steps from the
beginning would have given, to the bit; refused in a line elsewhere."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Iterator
from pathlib import Path

from omegaconf import OmegaConf

from cpt.core.config import flatten, plain_config
from cpt.core.processes import is_one_of_several
from cpt.core.rules import is_steps
from cpt.evaluation.scores import COSTS, NOTED, Scores
from cpt.optim.schedulers import Progress
from cpt.trainer.capping import hold_cap
from cpt.trainer.plan import SHARDED, Plan
from cpt.trainer.run_folder import RunFolder

log = logging.getLogger(__name__)
MEASURED = ("endtasks", "answers", "probes")  # beside the losses, of a stage


def raise_steps(plan: Plan, place: RunFolder) -> None:
    """Opens a folder again whose run was to make fewer steps. What is done twice is done once: a start that
    was killed here is followed by another. The caller holds the lock.

    Raises ValueError where it cannot go on to what the plan would have come to."""
    before = check_raise(plan, place)
    if before is None:
        return
    check_contents(plan, place)
    done, scores = steps_done(place), place.scores()
    if done:
        reopen(the_checkpoint(place))
    if scores is not None:
        scores.config_digest = plan.config_digest
        scores.run |= {"name": str(plan.run.name), "variant": str(plan.run.variant)}
        cut_rows(scores).save(place.scores_file)
    for kind in MEASURED:
        for left in place.path.glob(f"{kind}/001-*"):
            shutil.rmtree(left)
    place.remember(plan.settings)
    log.info("trainer.steps: %d -> %d: going on from step %d", before, plan.trainer.steps, done)


def check_contents(plan: Plan, place: RunFolder) -> None:
    """Raises ValueError for texts, domains or a base that are others now: before anything is taken back."""
    from cpt.trainer.domain_order import arrange
    from cpt.trainer.identity import check_identity

    check_identity(arrange(plan) if plan.by_texts else plan, place, remember=False)


def find_shorter(plan: Plan, place: RunFolder) -> RunFolder | None:
    """The finished run beside a new folder that has made the most steps, of those a plan goes on from."""
    from cpt.trainer.identity import list_changed_contents

    found: dict[int, RunFolder] = {}
    for path in sorted(place.path.parent.glob("*/checkpoints/001-*.ckpt")):
        folder = RunFolder(path.parents[1])
        own = hold_cap(plan, folder)
        before, scores = steps_before(own, folder), folder.scores()
        if before is None or scores is None or not scores.run["finished"]:
            continue
        if not list_changed_contents(folder, plan) and not say_why_not(own, folder, before):
            found[before] = folder
    return found[max(found)] if found else None


def check_raise(plan: Plan, place: RunFolder) -> int | None:
    """The steps that a folder's run was to make, if the plan has more of them and is the same in all else;
    else None. Raises ValueError where it cannot go on to what the plan would have come to."""
    before = steps_before(plan, place)
    if before is not None and (why := say_why_not(plan, place, before)):
        raise ValueError(
            f"{place.path} was made with trainer.steps={before}, and does not go on to {plan.trainer.steps}: "
            f"{why}; take {before} back, choose another name=…, or delete the folder"
        )
    return before


def steps_before(plan: Plan, place: RunFolder) -> int | None:
    """The steps that a folder remembers, if the plan has more of them and is the same in all else."""
    now = plan.trainer.steps
    if now is None or not place.config.exists():
        return None
    then = dict(flatten(plain_config(OmegaConf.load(place.config)))).get("trainer.steps")
    if not is_steps(then) or then >= now:
        return None
    changed = place.changes(plan.settings)
    return int(then) if [each.partition(":")[0] for each in changed] == ["trainer.steps"] else None


def say_why_not(plan: Plan, place: RunFolder, before: int) -> str:
    """Why a folder's run cannot go on to more steps as if it had begun with them; nothing where it can."""
    if is_one_of_several():
        return "several processes would open it again at once (start it once without torchrun or srun)"
    scores, path = place.scores(), the_checkpoint(place)
    rows = [] if scores is None else scores.rows[1:]
    if len(plan.order) > 1 and rows:
        return f"{rows[0]} was learned with {before} steps, and what followed rests on it"
    if plan.mixture.generates:
        return "what the model writes before a domain depends on how many steps follow"
    if rows and path is None:
        return "what the optimizer had at its end was not kept (keep_end=true keeps it)"
    return "" if path is None else say_why_other(plan, before=before, done=steps_done(place))


def say_why_never(plan: Plan) -> str:
    """Why the end of a plan's run is none that more steps could follow; nothing where it is one."""
    if plan.trainer.steps is None:
        return "trainer.steps=null: how much is learned is said by trainer.epochs or trainer.tokens"
    if len(plan.order) > 1:
        return (
            "of several domains the first are learned with the steps that they have, and others rest on them"
        )
    if plan.mixture.generates:
        return "what the model writes before a domain depends on how many steps follow"
    return say_why_other(plan, before=plan.trainer.steps, done=plan.trainer.steps)


def say_why_other(plan: Plan, *, before: int, done: int) -> str:
    """Why the steps that were made would have been others if more had been to follow; nothing where they
    would not."""
    method, own = plan.method.load(), plan.method.target.startswith(SHARDED)
    foreign = [each.target for each in plan.masks if not each.target.startswith(SHARDED)]
    name = f"method={plan.names['method']}"
    reasons = {
        f"{name} divides its steps among the domains": method.needs_all,
        f"what {name} does in a step depends on how many there are": getattr(method, "counts_steps", False),
        f"{name} does not say (counts_steps = False in its class) that no step asks how many there are": (
            not own and not any("counts_steps" in vars(each) for each in outside(method))
        ),
        f"mask {', '.join(foreign)} may depend on how many steps there are": bool(foreign),
        "callbacks may depend on how many steps there are": bool(plan.callbacks),
        "other text is looked at after the last step (monitor, budget)": plan.watches,
        "strategy=fsdp keeps the trainer's state in shards": plan.trainer.strategy == "fsdp",
    }
    found = next((reason for reason, holds in reasons.items() if holds), "")
    return found or say_rates(plan, before=before, done=done)


def outside(kind: type) -> Iterator[type]:
    """The classes that a class is made of, without those of cpt."""
    return (each for each in kind.__mro__ if not each.__module__.startswith(SHARDED))


def say_rates(plan: Plan, *, before: int, done: int) -> str:
    """The first step whose rate would have been another one, with the rate of the step that is next."""
    now = plan.trainer.steps or before
    now = now if now > before else 2 * before
    for step in range(done + 1):
        then, wanted = (plan.schedule(first_domain(plan, step, steps)) for steps in (before, now))
        if then != wanted:
            return (
                f"schedule={type(plan.schedule).__name__} gives step {step} {then:.4g} of optim.lr where "
                f"{before} steps are made, {wanted:.4g} where {now} are (schedule=constant schedule.warmup=0 "
                "does not ask how many follow)"
            )
    return ""


def first_domain(plan: Plan, step: int, steps: int) -> Progress:
    """Where a run is in its first domain, if each has so many steps."""
    count = len(plan.order)
    at = Progress(step, steps, 0, count, step, steps * count, steps)
    return at.joined if plan.carry == "all" else at


def the_checkpoint(place: RunFolder) -> Path | None:
    """The trainer's state within the first domain or at its end, if it is there."""
    return next(iter(sorted(place.path.glob("checkpoints/001-*.ckpt"))), None)


def steps_done(place: RunFolder) -> int:
    """The steps that it has made. Raises ValueError for a file that is damaged."""
    from cpt.core.tensors import check_state, load_tensors  # torch, which other starts need not wait for

    path = the_checkpoint(place)
    if path is None:
        return 0
    check_state(path, instead="delete it, and take trainer.steps back")
    return int(load_tensors(path)["global_step"])


def reopen(path: Path | None) -> None:
    """Has a trainer's state be one that more batches follow, as it would be in a run that has them."""
    from cpt.core.tensors import load_tensors, save_state

    if path is None:
        return
    state = load_tensors(path, mapped=False)
    state["loops"]["fit_loop"]["epoch_loop.batch_progress"]["is_last_batch"] = False
    save_state(state, path)


def tell_end(plan: Plan) -> None:
    """Tells, in a line, where the end of a run is not kept though that is asked for."""
    if plan.run.keep_end and (why := say_why_never(plan)):
        log.info("keep_end=true without effect: %s", why)


def cut_rows(scores: Scores) -> Scores:
    """The scores as they were when the base alone was measured; seconds stay."""
    for name in ("rows", "nll", "parts", *NOTED, *COSTS):
        setattr(scores, name, getattr(scores, name)[:1])
    for name in (*MEASURED, "monitor", "moved"):
        setattr(scores, name, {})
    scores.run["finished"], scores.objective, scores.loading = False, None, ""
    scores.measure()
    return scores
