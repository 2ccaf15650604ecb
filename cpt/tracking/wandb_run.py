"""What a W&B run shows of `scores.json`, alike while a run goes on and when it is made from its folder."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from cpt.core.errors import reason
from cpt.core.naming import LONGEST_TAG
from cpt.evaluation.conditions import conditions
from cpt.evaluation.conditions import describe_conditions as conditions_in_words
from cpt.evaluation.scores import Scores
from cpt.reporting import endtasks as endtask_report
from cpt.reporting import figures, tables
from cpt.reporting.labels import label
from cpt.reporting.run_table import choose_headlines, summarise_run

if TYPE_CHECKING:
    import wandb

NOTHING: Mapping[str, Any] = {}
ADVICE = "logger.mode=offline keeps the run in its folder"
LARGEST_REPORT = 10_000_000  # bytes; a page that is larger is slow in a panel
AXES = {
    "trainer/global_step": ("train/*", "monitor/*", "budget/*"),
    "stage": ("ppl/*", "stages/*", "tasks/*", "units/*"),
}


def open_run(
    identifier: str, folder: Path, *, tags: Sequence[str], settings: Mapping[str, Any] = NOTHING, **about: Any
) -> wandb.Run:
    """A W&B run with its files below the folder; one that W&B has by this identifier already is continued.

    ValueError for what W&B refuses, ConnectionError where it cannot be reached or keeps no such run.
    """
    import wandb

    if wrong := [tag for tag in tags if not 0 < len(tag) <= LONGEST_TAG]:
        raise ValueError(f"tags={wrong}; allowed: 1 to {LONGEST_TAG} characters each")
    quiet = wandb.Settings(silent=True, console="off", **settings)
    try:
        # Offline too: the files of two starts are one run to `wandb sync` only if both say so.
        run = wandb.init(
            id=identifier,
            dir=str(folder),
            tags=tags,
            resume="allow",
            reinit="create_new",
            settings=quiet,
            **about,
        )
    except wandb.errors.CommError as error:
        kind = ValueError if isinstance(error, wandb.errors.AuthenticationError) else ConnectionError
        raise kind(f"W&B: {reason(error)}; {ADVICE}") from None
    except wandb.Error as error:
        raise ValueError(f"W&B: {reason(error)}; {ADVICE}") from None
    axes(run)
    return run


def axes(run: wandb.Run) -> None:
    """What the curves are drawn over: the step of training within a domain, or the stage. Their last points
    are no part of the summary. No two patterns meet: of several that do W&B takes any."""
    for axis, patterns in AXES.items():
        run.define_metric(axis)
        for names in patterns:
            run.define_metric(names, step_metric=axis, step_sync=True, summary="none")


def publish_stage(
    run: wandb.Run, scores: Scores, *, row: int, distributions: Mapping[str, np.ndarray]
) -> None:
    """The points of one row of the matrix, and what a method lets one see after it as histograms."""
    run.log({**tables.stage_row(scores, row), **histograms(distributions)})


def publish(run: wandb.Run, scores: Scores, *, folder: Path, summary: str = "headlines") -> None:
    """Tables, pictures, the report, end tasks over the stages; as summary the headlines, or all numbers."""
    for points in tables.task_rows(scores):
        run.log(points)
    run.log({**build_tables(scores), **pictures(scores), **report(folder)})
    run.config.update({"cpt": describe_run(scores)}, allow_val_change=True)
    run.summary.update(summarise_run(scores) if summary == "all" else choose_headlines(scores))


def describe_run(scores: Scores) -> dict[str, Any]:
    """What the config does not say: the name in comparisons, the order resolved, what was learned on what."""
    known = {key: scores.run[key] for key in ("order", "finished", "objective", "variant")}
    given = conditions(scores)
    measured = conditions_in_words(given)
    return {
        "label": label(scores.run),
        "measured": measured,
        "group": f"{label(scores.run)} | {measured}",
        "conditions": given,
        **known,
        "texts": {text: dict(about) for text, about in scores.texts.items()},
        "versions": scores.versions,
        "digest": scores.config_digest,
        "needs_domain": scores.needs_domain,
        "loading": scores.loading,
    }


def build_tables(scores: Scores) -> dict[str, Any]:
    import wandb

    frames = tables.tabulate(scores).items()
    return {name: wandb.Table(columns=[*each], data=each.to_numpy().tolist()) for name, each in frames}


def pictures(scores: Scores) -> dict[str, Any]:
    """The heat maps and the curves of the report."""
    import wandb
    from PIL import Image

    drawn = (
        {"matrix_image": figures.heatmap(scores), "stages_image": figures.stages(scores)}
        if scores.rows
        else {}
    )
    if scores.rows and any(scores.parts):
        drawn["parts_image"] = figures.mixtures(scores)
    if tables.task_rows(scores):
        drawn["endtasks_image"] = endtask_report.draw_endtasks(scores)
    return {name: wandb.Image(Image.open(BytesIO(png))) for name, png in drawn.items()}


def report(folder: Path) -> dict[str, Any]:
    """The run's page, as it is; nothing where there is none or it is very large."""
    import wandb

    page = folder / "report.html"
    if not page.is_file() or page.stat().st_size > LARGEST_REPORT:
        return {}
    return {"report": wandb.Html(page.read_text(encoding="utf-8"), inject=False)}


def histograms(distributions: Mapping[str, np.ndarray]) -> dict[str, Any]:
    import wandb

    return {f"units/{name}": wandb.Histogram(values) for name, values in distributions.items()}
