"""`plan=true`: what a run would do and cost, told before anything of it is learned, and nothing left behind.

What is read or made on the way (texts, tokens, a tokenizer) stands in the cache for the run itself."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

from cpt.core.preemption import defer_signals
from cpt.core.processes import is_one_of_several
from cpt.core.rules import show
from cpt.evaluation.scores import Scores
from cpt.training.capping import hold_cap
from cpt.training.forecast.table import format_forecast
from cpt.training.growth import find_begun, find_source
from cpt.training.identity import check_identity
from cpt.training.plan import Plan
from cpt.training.raising import check_raise, cut_rows, steps_before
from cpt.training.run_folder import RunFolder

log = logging.getLogger(__name__)


def check_alone(plan: Plan) -> None:
    """Raises ValueError where several processes are to foretell one run."""
    if plan.run.plan and is_one_of_several():
        raise ValueError(
            f"plan={show(plan.run.plan)} is made by one process, for all of trainer.devices and "
            "trainer.num_nodes; allowed: without torchrun or srun"
        )


def foretell(plan: Plan, place: RunFolder) -> None:
    """Prints what a run would do and cost. Raises ValueError for one that cannot be run."""
    check_alone(plan)
    plan = hold_cap(plan, find_begun(plan, place))
    is_new, as_json = not place.config.exists(), plan.run.plan == "json"
    with only_warnings() if as_json else nullcontext():
        if check_raise(plan, place) is None:
            place.check(plan.settings)
        check_identity(plan, place, remember=False)
        with defer_signals():  # libraries do not bear to be left while they are read in
            import cpt.training.assembly  # noqa: F401
        data = make_forecast(plan, place)
    print(json.dumps(data, indent=1) if as_json else format_forecast(data), flush=True)
    if is_new:
        place.leave()


@contextmanager
def only_warnings() -> Iterator[None]:
    """Nothing but warnings is told meanwhile: what is printed can be read by a program."""
    told = logging.getLogger("cpt")
    level = told.level
    told.setLevel(logging.WARNING)
    try:
        yield
    finally:
        told.setLevel(level)


def make_forecast(plan: Plan, place: RunFolder) -> dict[str, Any]:
    """What a run would do and cost, in Python's own types."""
    # torch and the rest: not before the plan is known to be right
    from cpt.core.memory import resident
    from cpt.training import assembly
    from cpt.training.forecast.outlook import Outlook, as_data, is_sharded
    from cpt.training.forecast.trial import make_trial, try_stages
    from cpt.training.forecast.work import count_work
    from cpt.training.pretraining import find_base
    from cpt.training.readiness import prepare

    ready, began = prepare(plan, place), time.perf_counter()
    plan = ready.plan
    corpora = assembly.read_corpora(plan)
    start = find_base(plan.model, corpora, accelerator=plan.trainer.accelerator)
    world = ready.processes * plan.trainer.num_nodes
    program = resident() if ready.device.type == "cpu" else 0
    trial = make_trial(plan, world=world)
    module = assembly.make_method(trial, start)
    assembly.tell_resting(plan, module, ready.device)
    data = assembly.make_sequence(plan, corpora, start, module)
    folder = find_begun(plan, place)
    scores = folder.scores()
    if scores is not None and steps_before(plan, folder) is not None:
        scores = cut_rows(scores)
    work = count_work(plan, data, folder, scores)
    about = describe(plan, place, folder, scores, device=str(ready.device), world=world)
    about |= {"finished": bool(scores and scores.run["finished"]) and work.is_done}
    about |= {"start_seconds": time.perf_counter() - began}
    module.to(ready.device)
    if work.is_done:
        tried = []
    else:
        how = {"device": ready.device, "scratch": corpora.cache, "is_sharded": is_sharded(plan, world)}
        tried = try_stages(trial, module, data, **how)
    if not tried:
        return about | {"left": "nothing"}
    outlook = Outlook(plan, data, work, tried, world, program)
    return about | as_data(outlook, base_step_s=step_of_base(plan, corpora, start))


def step_of_base(plan: Plan, corpora: Any, start: Any) -> float:
    """Seconds of a step of the base's pre-training; 0 where it is there."""
    from cpt.training.forecast.trial import time_pretraining
    from cpt.training.pretraining import Untrained, describe_base, general_only, make_learner

    if not isinstance(start, Untrained):
        return 0.0
    new = describe_base(plan.model, corpora)
    options = {"accelerator": plan.trainer.accelerator, "devices": 1}
    return time_pretraining(make_learner(plan.model, new), general_only(plan.model, new, corpora), options)


def describe_budget(plan: Plan) -> dict[str, Any]:
    """What other text may lose, and what sees to it; nothing where there is no budget."""
    if not plan.drift.given:
        return {}
    every = plan.monitor.every
    looks = f"every {every} steps" if every else f"{plan.drift.looks} times a stage"
    return {"nats": plan.drift.given, "steer": plan.drift.steer, "looks": looks}


def describe(
    plan: Plan, place: RunFolder, folder: RunFolder, scores: Scores | None, *, device: str, world: int
) -> dict[str, Any]:
    """What is planned, and how far it is."""
    state = "new" if scores is None else scores.state
    if scores is None and not place.config.exists() and (line := find_source(place, plan)[1]):
        state = f"new ({line})"
    if scores is not None and folder is not place:
        state = f"goes on from {folder.path} ({scores.state})"
    measured = {
        "end tasks": plan.endtasks,
        "answers": plan.answers,
        "probe": plan.probe,
    }
    return {
        "run": {"folder": str(place.path), **plan.names, "seed": plan.run.seed},
        "state": state,
        "device": device,
        "processes": world,
        "policy": {**plan.evaluation.policy, "tokens": plan.cap},
        "budget": describe_budget(plan),
        "keep_stages": plan.run.keep_stages,
        "not_timed": [name for name, asked in measured.items() if asked is not None],
    }
