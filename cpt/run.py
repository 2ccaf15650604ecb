"""What a run does, from a config to a report: the story that `python run.py …` tells.

A plan is made of the config and a folder of the run is claimed. Then the texts are read (first of all where
they decide the order), the base model is made or loaded, and the method, the data and the end tasks are put
together. The learner learns one domain after another, scores every text after each and commits a row; the
report and the exported model end the run.
Whatever is there already, of a run that was killed, is gone on with."""

import json
import logging
from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path

from hydra.errors import HydraException
from omegaconf import DictConfig

from cpt.core.cache import full_check
from cpt.core.errors import reason
from cpt.core.heartbeat import heartbeat, set_phase
from cpt.core.preemption import defer_signals
from cpt.core.processes import is_first_process, is_one_of_several
from cpt.core.rules import show
from cpt.evaluation.metrics import objective_value
from cpt.evaluation.scores import Scores
from cpt.reporting.run_report import format_scores
from cpt.trainer.capping import hold_cap
from cpt.trainer.domain_order import arrange, recall
from cpt.trainer.growth import adopt, find_begun
from cpt.trainer.identity import check_identity, is_same
from cpt.trainer.plan import Plan, make_plan
from cpt.trainer.raising import check_raise, raise_steps
from cpt.trainer.run_folder import RunFolder

log = logging.getLogger(__name__)
# What precedes the stages: as scores.json calls it, and as it is told meanwhile.
STARTING = {"read the texts": "reading texts", "make the base": "making the base", "tokenise": "tokenising"}


def run(cfg: DictConfig, *, folder: Path) -> float | list[float | None] | None:
    """Learns the sequence of a config in a run folder, or goes on with it; gives the objective, for sweepers.

    With `plan`, says what that would cost and leaves the folder as it is.

    Raises ValueError for a config that cannot be run, or that is not the folder's."""
    place = RunFolder(folder)
    if not is_first_process():
        logging.getLogger("cpt").setLevel(logging.WARNING)
        plan = make_plan(cfg)
        check_one_process(plan)
        return learn_or_tell(hold_cap(plan, find_begun(plan, place)), place)
    with place.unless_refused():
        plan = make_plan(cfg)
        plan.source.check_domains(plan.order)
        if plan.run.plan:
            return print_cost(arrange(plan), place)
        adopt(place, plan)
        with place.locked():
            plan = hold_cap(plan, place)
            raise_steps(plan, place)
            place.claim(plan.settings)
            place.clean()
            with heartbeat(place.path):
                return learn_or_tell(plan, place)


def learn_or_tell(plan: Plan, place: RunFolder) -> float | list[float | None] | None:
    with full_check(plan.run.check == "full"):
        plan = arrange(plan)
        check_identity(plan, place)
        scores = place.scores()
        if needs_nothing(scores, plan) and not is_partial(plan, place):
            log.info("%s is finished already", place.path)
        else:
            scores = carry_out(plan, place)
    log.info("\n%s\n%s", format_scores(scores), place.path / "report.html")
    return objective_value(scores.metrics, plan.run.objective)


def carry_out(plan: Plan, place: RunFolder) -> Scores:
    """Learns what a run folder does not hold yet, and reports; gives the finished scores."""
    with defer_signals():  # libraries do not bear to be left while they are read in
        from cpt.core.threads import keep_threads
        from cpt.loggers.loggers import About, track
        from cpt.loggers.wandb_run import run_name
        from cpt.trainer import assembly
        from cpt.trainer.callbacks import CustomCallbacks
        from cpt.trainer.evaluators import make_evaluators
        from cpt.trainer.generators import make_generation
        from cpt.trainer.identity import settle_identity
        from cpt.trainer.loop import Learner
        from cpt.trainer.pretraining import make_base
        from cpt.trainer.readiness import prepare

    plan = (ready := prepare(plan, place)).plan  # before hours of reading
    keep_threads(place.path / "threads", processes=ready.processes)
    took: dict[str, float] = {}
    with starting(took, "read the texts"):
        corpora = assembly.read_corpora(plan)
    with starting(took, "make the base"):
        start = make_base(plan.model, corpora, accelerator=plan.trainer.accelerator)
        module = assembly.make_method(plan, start)
    with starting(took, "tokenise"):
        data = assembly.make_sequence(plan, corpora, start, module)
        examinations = make_evaluators(plan, place, ready, corpora, start, module=module, data=data)
    settle_identity(plan, place, corpora, start, examinations)
    scores = resume_scores(place, assembly.make_scores(plan, corpora, start, data), took)
    about = About(
        run_name(scores.run, plan.settings["order"]),
        str(plan.run.name),
        plan.names["method"],
        plan.run.tags,
        plan.settings,
    )
    with track(plan.logger.flags, place.path, about=about, custom=ready.loggers) as loggers:
        learner = Learner(
            plan,
            place,
            module=module,
            data=data,
            examinations=examinations,
            generation=make_generation(plan, place, corpora, start, module=module, data=data),
            scores=scores,
            loggers=loggers,
            callbacks=CustomCallbacks(ready.callbacks, place.path / "callbacks"),
            device=ready.device,
        )
        learner.learn()
        learner.conclude(start)
    return scores


def check_one_process(plan: Plan) -> None:
    """Raises ValueError where several processes would estimate the cost of one run."""
    if plan.run.plan and is_one_of_several():
        raise ValueError(
            f"plan={show(plan.run.plan)} is made by one process, for all of trainer.devices and "
            "trainer.num_nodes; allowed: without torchrun or srun"
        )


def print_cost(plan: Plan, place: RunFolder) -> None:
    """Prints what a run would do and cost, as a table or as JSON alone, and leaves the folder as it is."""
    check_one_process(plan)
    is_new, as_json = not place.config.exists(), plan.run.plan == "json"
    plan = hold_cap(plan, find_begun(plan, place))
    logger = logging.getLogger("cpt")
    level = logger.level
    logger.setLevel(logging.WARNING if as_json else level)
    try:
        if check_raise(plan, place) is None:
            place.check(plan.settings)
        check_identity(plan, place, remember=False)
        with defer_signals():  # libraries do not bear to be left while they are read in
            from cpt.trainer.dry_run import estimate, format_table
        cost = estimate(plan, place)
    finally:
        logger.setLevel(level)
    print(json.dumps(cost, indent=1) if as_json else format_table(cost), flush=True)
    if is_new:
        place.leave()


def starting(took: dict[str, float], phase: str) -> AbstractContextManager[None]:
    """Adds the seconds of a phase of STARTING to the others, and says that the run is at it."""
    from cpt.trainer.costs import time_phase

    set_phase(STARTING[phase])
    return time_phase(took, phase)


def resume_scores(place: RunFolder, empty: Scores, took: Mapping[str, float]) -> Scores:
    """What a run folder has of the scores, with the seconds that this start has taken so far."""
    scores = place.scores() or empty
    if scores.run["order"] != empty.run["order"]:  # the run has grown
        scores = empty.take_over(scores)
    place.check_documents([scores.measured(row) for row in range(len(scores.rows))])
    for phase, seconds in took.items():
        scores.phases["start"][phase] = scores.phases["start"].get(phase, 0.0) + seconds
    return scores


def is_partial(plan: Plan, place: RunFolder) -> bool:
    """Whether a finished run's model or report is not whole; says so."""
    lost = place.lost(full=plan.run.check == "full")
    if lost:
        log.info("%s was finished, but %s: made again, without learning", place.path, "; ".join(lost[:5]))
    return bool(lost)


def is_done(cfg: DictConfig, folder: Path) -> bool:
    """Whether a folder holds the finished run of this config, of these texts, with the end tasks that it asks
    for, as far as sizes and times tell. Raises ValueError where that cannot be read."""
    place = RunFolder(folder)
    if not place.config.exists():
        return False
    try:
        plan = recall(make_plan(cfg))
    except HydraException as error:
        raise ValueError(reason(error)) from error
    plan = None if plan is None else hold_cap(plan, place)
    scores = place.scores() if plan is not None and place.is_of(plan.settings) else None
    if plan is None or scores is None or not scores.run["finished"] or place.lost(full=False):
        return False
    return needs_nothing(scores, plan) and is_same(plan, place)


def needs_nothing(scores: Scores | None, plan: Plan) -> bool:
    """Whether nothing is left to learn or to measure."""
    if scores is None or not scores.run["finished"]:
        return False
    known = scores.policy == plan.evaluation.policy and scores.run["order"] == plan.order
    return known and all(getattr(scores, kind).get("digest") == known for kind, known in plan.digests.items())
