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
from cpt.reporting.frames import choose_headlines, escape_name, label, split_variant, summarize_scores

if TYPE_CHECKING:
    import wandb

NOTHING: Mapping[str, Any] = {}
ADVICE = "logger.mode=offline keeps the run in its folder"
LARGEST_REPORT = 10_000_000  # bytes; a page that is larger is slow in a panel
TOKENS, STEP = "train/tokens", "trainer/global_step"
TRAINING = ("train", "monitor", "budget")  # curves KIND/NAME/DOMAIN of metrics.csv
RENAMED = {"train/lm": "train/loss"}
LONGEST_NAME, LONGEST_ORDER = 80, 30  # characters of a run's name, and of an order in it
AXES = {
    TOKENS: tuple(f"{kind}/*" for kind in TRAINING),
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
    """What the curves are drawn over: the tokens that the whole run has read, or the stage. Their last points
    are no part of the summary. No two patterns meet: of several that do W&B takes any."""
    for axis, patterns in AXES.items():
        run.define_metric(axis)
        for names in patterns:
            run.define_metric(names, step_metric=axis, step_sync=True, summary="none")


def run_name(run: Mapping[str, Any], order: Any) -> str:
    """`das + migu order=0 seed=1 (temperature=0.1)`; run: as in scores.json, order: as given."""
    if isinstance(order, Sequence) and not isinstance(order, str):
        listed = ",".join(map(str, order))
        order = listed if len(listed) <= LONGEST_ORDER else f"{len(order)} domains"
    own = ", ".join(split_variant(run))
    name = f"{label({**run, 'variant': ''})} order={order} seed={run['seed']}" + f" ({own})" * bool(own)
    return name if len(name) <= LONGEST_NAME else f"{name[: LONGEST_NAME - 1]}…"


class Curves:
    """The curves of training, a key each over the tokens of the whole run: `train/lm/<domain>` of metrics.csv
    is `train/loss`. `per_domain`: also the keys of metrics.csv, over the steps of their domain.

    high: a file that remembers how far the curves go, so that steps which a resumed run repeats are not
    logged twice; None: they are logged."""

    def __init__(self, run: wandb.Run, *, per_domain: bool = False, high: Path | None = None) -> None:
        self.run, self.per_domain, self.high = run, per_domain, high
        self.domain, self.before, self.tokens = "", 0.0, 0.0
        self.defined: set[str] = set()
        known = high.read_text() if high is not None and high.exists() else ""
        self.logged = float(known) if known.isdigit() else 0.0

    def enter(self, domain: str, *, tokens: float) -> None:
        """The points that follow are of this domain, before which the run had read so many tokens."""
        self.domain, self.before, self.tokens = domain, tokens, tokens

    def log(self, points: Mapping[str, float], step: int | None) -> None:
        """Logs points that have the names of metrics.csv; other names are kept, over the same axis."""
        merged, own, ending = dict[str, float](), dict[str, float](), f"/{self.domain}"
        for key, value in points.items():
            kind, _, rest = key.partition("/")
            if kind in TRAINING and rest.endswith(ending):
                name = f"{kind}/{escape_name(rest.removesuffix(ending))}"
                merged[RENAMED.get(name, name)] = value
                own[f"{name}/{escape_name(self.domain)}"] = value
            elif key != "epoch":
                merged[key] = value
                self.define(key, over=TOKENS)
        if TOKENS in merged:
            self.tokens = self.before + merged[TOKENS]
        if self.tokens < self.logged:
            return
        if self.high is not None and self.tokens > self.logged and self.high.parent.is_dir():
            self.high.write_text(str(int(self.tokens)))
        self.logged = self.tokens
        if self.per_domain and step is not None:
            for key in own:
                self.define(key, over=STEP)
            merged |= {**own, STEP: step}
        self.run.log(merged | {TOKENS: self.tokens})

    def define(self, key: str, *, over: str) -> None:
        """Gives a key that no pattern of AXES covers, or that has another axis, its own."""
        if key not in self.defined:
            self.run.define_metric(key, step_metric=over, step_sync=True)
            self.defined.add(key)


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
    run.summary.update(summarize_scores(scores) if summary == "all" else choose_headlines(scores))


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
