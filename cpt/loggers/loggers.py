"""The loggers of a run: metrics.csv in the run folder, Weights & Biases, and custom ones."""

import csv
import logging
import netrc
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import wandb
from lightning.pytorch.loggers import Logger, WandbLogger
from lightning.pytorch.utilities import rank_zero_only
from PIL import Image

from cpt.core.config import digest
from cpt.core.errors import reason
from cpt.core.naming import LONGEST_TAG
from cpt.core.preemption import Preempted
from cpt.evaluation.metrics import UNITS
from cpt.evaluation.scores import Scores, conditions, describe_conditions
from cpt.reporting import figures, frames
from cpt.reporting.frames import escape_name, label, stage_points, summarize_scores

log = logging.getLogger(__name__)
WANDB_HOSTS = ("api.wandb.ai", "api.forge.coreweave.com")
LARGEST_REPORT = 10_000_000  # bytes; a larger page is slow in a panel
TOKENS = "train/tokens"
TRAINING = ("train", "monitor", "budget")  # curves KIND/NAME/DOMAIN of metrics.csv
AXES = {  # No two patterns meet: of several that do W&B takes any.
    TOKENS: tuple(f"{kind}/*" for kind in TRAINING),
    "stage": ("ppl/*", "stages/*", "tasks/*", "units/*"),
}
LONGEST_NAME, LONGEST_ORDER = 80, 30  # characters of a run's name, and of an order in it


class LongCSV(Logger):
    """metrics.csv with the columns step, name, value, which a resumed run appends to, other than Lightning's
    CSVLogger. Of two lines with one step and name, the later one counts."""

    name, version = "csv", ""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path = path

    @rank_zero_only
    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        """They are in config.yaml."""

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        new = not self.path.exists()
        with self.path.open("a", newline="") as file:
            writer = csv.writer(file)
            writer.writerows([("step", "name", "value")] if new else [])
            writer.writerows((step, name, value) for name, value in metrics.items() if name != "epoch")


class WandbCurves(WandbLogger):
    """W&B's run, with its curves over the tokens of the whole run."""

    def __init__(self, curves: "Curves") -> None:
        super().__init__(experiment=curves.run)
        self.curves = curves

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        self.curves.log(metrics)


@contextmanager
def track(
    options: Mapping[str, Any], folder: Path, *, about: Mapping[str, Any], custom: Sequence[Logger] = ()
) -> Iterator[list[Logger]]:
    """The loggers of one run, `custom` ones among them, finalized with how it ended; a W&B run of a preempted
    one is marked so. `about`: name, group, job_type, tags and config, as wandb.init takes them."""
    loggers: list[Logger] = [LongCSV(folder / "metrics.csv")] if options.get("csv") else []
    loggers += custom
    for logger in custom:
        logger.log_hyperparams(dict(about["config"]))
    run, status = None, "failed"
    try:
        if options.get("wandb") and getattr(rank_zero_only, "rank", 0):
            loggers.append(WandbLogger(save_dir=str(folder)))
        elif options.get("wandb"):
            # Lightning would pass an option that W&B warns of, and join a run that is still open. One run
            # folder is one W&B run, also after a restart.
            place: dict[str, Any] = {name: options.get(name) for name in ("project", "entity", "mode")}
            run = open_wandb(digest([about["group"], folder.name]), folder, **about, **place)
            loggers.append(WandbCurves(Curves(run, high=folder / "wandb" / "tokens")))
        yield loggers
        status = "success"
    except Preempted:
        if run is not None:
            run.mark_preempting()
        raise
    finally:
        if run is not None:
            run.finish(exit_code=int(status == "failed"))
        for logger in custom:
            logger.finalize(status)


@rank_zero_only
def log_stage(loggers: Sequence[Logger], scores: Scores) -> None:
    """The last row of the matrix and what the run has cost, over `stage`."""
    row = len(scores.rows) - 1
    for logger in loggers:
        if isinstance(logger, WandbCurves):
            logger.experiment.log(stage_points(scores, row))
        else:
            points = {name: x for name, x in stage_points(scores, row).items() if name != "stage"}
            logger.log_metrics(points, step=row)
            logger.save()


@rank_zero_only
def log_scores(loggers: Sequence[Logger], scores: Scores, *, folder: Path) -> None:
    """All that the report contains for W&B, METRIC/UNIT for custom loggers."""
    for logger in loggers:
        if isinstance(logger, WandbCurves):
            publish(logger.experiment, scores, folder=folder)
        elif not isinstance(logger, LongCSV):
            found = summarize_scores(scores, ["metric"])
            known = {key: x for key, x in found.items() if key.rpartition("/")[2] in UNITS}
            logger.log_metrics(known, step=len(scores.rows) - 1)


def is_logged_in() -> bool:
    """Whether there is a key for W&B's server, from WANDB_API_KEY or `wandb login`. Sends nothing."""
    settings = wandb.setup().settings
    host = urlsplit(settings.base_url).netloc
    hosts = {host, *WANDB_HOSTS} if host in WANDB_HOSTS else {host}  # a key of one is taken by the other
    try:
        keys = netrc.netrc(os.environ.get("NETRC") or Path.home() / ".netrc").hosts
    except (OSError, RuntimeError, netrc.NetrcParseError):  # RuntimeError: no home folder
        keys = {}
    return bool(settings.api_key or hosts & keys.keys())


def open_wandb(identifier: str, folder: Path, *, mode: str, **about: Any) -> wandb.Run:
    """The W&B run of a run folder. `mode=auto`: WANDB_MODE, else online for a logged-in user, and offline
    with a warning if the server cannot be reached."""
    automatic = mode == "auto"
    if automatic:
        mode = os.environ.get("WANDB_MODE") or ("online" if is_logged_in() else "offline")
    try:
        return init_wandb(identifier, folder, mode=mode, **about)
    except ConnectionError as error:
        if not automatic:
            raise
        log.warning("%s; logging offline, `wandb sync` sends the run later", str(error).partition(";")[0])
        return init_wandb(identifier, folder, mode="offline", **about)


def init_wandb(identifier: str, folder: Path, *, tags: Sequence[str], **about: Any) -> wandb.Run:
    """A W&B run with its files below the folder; an existing one of this identifier is continued. `about`: of
    wandb.init, `settings` as a mapping. Raises ValueError for what W&B refuses, ConnectionError where it
    cannot be reached or keeps no such run."""
    if wrong := [tag for tag in tags if not 0 < len(tag) <= LONGEST_TAG]:
        raise ValueError(f"tags={wrong} is invalid. Allowed: 1 to {LONGEST_TAG} characters each")
    about["settings"] = wandb.Settings(silent=True, console="off", **about.get("settings", {}))
    # resume, offline too: the files of two starts are one run to `wandb sync` only if both say so
    about |= {"id": identifier, "dir": str(folder), "tags": list(tags), "resume": "allow"}
    try:
        run = wandb.init(reinit="create_new", **about)
    except wandb.Error as error:
        refused = isinstance(error, wandb.errors.AuthenticationError)
        lost = isinstance(error, wandb.errors.CommError) and not refused
        kind = ConnectionError if lost else ValueError
        raise kind(f"W&B: {reason(error)}; logger.mode=offline keeps the run in its folder") from None
    for axis, patterns in AXES.items():
        run.define_metric(axis)
        for names in patterns:
            run.define_metric(names, step_metric=axis, step_sync=True, summary="none")
    return run


def run_name(run: Mapping[str, Any], order: Any) -> str:
    """`das + migu order=0 seed=1 (temperature=0.1)`; run: as in scores.json, order: as given."""
    if isinstance(order, Sequence) and not isinstance(order, str):
        listed = ",".join(map(str, order))
        order = listed if len(listed) <= LONGEST_ORDER else f"{len(order)} domains"
    own = ", ".join(frames.split_variant(run))
    name = f"{label({**run, 'variant': ''})} order={order} seed={run['seed']}" + f" ({own})" * bool(own)
    return name if len(name) <= LONGEST_NAME else f"{name[: LONGEST_NAME - 1]}…"


class Curves:
    """Curves of training over the tokens of the whole run: `train/lm/DOMAIN` of metrics.csv is `train/loss`.
    `high`: a file that remembers how far the curves go, so that steps which a resumed run repeats are not
    logged twice."""

    def __init__(self, run: wandb.Run, *, high: Path | None = None) -> None:
        self.run, self.high = run, high
        self.domain, self.before, self.tokens = "", 0.0, 0.0
        self.defined: set[str] = set()
        known = high.read_text() if high is not None and high.exists() else ""
        self.logged = float(known) if known.isdigit() else 0.0

    def enter(self, domain: str, *, tokens: float) -> None:
        """The points that follow are of this domain, before which the run had read this number of tokens."""
        self.domain, self.before, self.tokens = domain, tokens, tokens

    def log(self, points: Mapping[str, float]) -> None:
        """Logs points that have the names of metrics.csv; other names are kept, over the same axis."""
        merged, others, ending = dict[str, float](), set[str](), f"/{self.domain}"
        for key, value in points.items():
            kind, _, rest = key.partition("/")
            if kind in TRAINING and rest.endswith(ending):
                name = f"{kind}/{escape_name(rest.removesuffix(ending))}"
                merged["train/loss" if name == "train/lm" else name] = value
            elif key != "epoch":
                merged[key] = value
                others.add(key)
        self.tokens = self.before + merged[TOKENS] if TOKENS in merged else self.tokens
        if self.tokens < self.logged:
            return
        if self.high is not None and self.tokens > self.logged and self.high.parent.is_dir():
            self.high.write_text(str(int(self.tokens)))
        self.logged = self.tokens
        for key in others - self.defined:  # no pattern of AXES covers it
            self.run.define_metric(key, step_metric=TOKENS, step_sync=True)
        self.defined |= others
        self.run.log(merged | {TOKENS: self.tokens})


def publish(run: wandb.Run, scores: Scores, *, folder: Path) -> None:
    """Tables, the pictures of the report, the report, end tasks over the stages; as summary the headlines;
    and in the config what it lacks: the name in comparisons, the resolved order, texts and versions."""
    points, drawn = frames.task_points(scores), dict[str, bytes]()
    if scores.rows:
        drawn = {"matrix": figures.draw_matrix(scores), "stages": figures.draw_text_curves(scores)}
    drawn |= {"modules": figures.draw_modules(scores)} if any(scores.modules) else {}
    drawn |= {"endtasks": figures.draw_tasks(scores, "endtasks")} if points else {}
    logged: dict[str, Any] = {
        f"{name}_image": wandb.Image(Image.open(BytesIO(each))) for name, each in drawn.items()
    }
    for each in points:
        run.log(each)
    for name, frame in frames.tabulate(scores).items():
        logged[name] = wandb.Table(columns=[*frame], data=frame.to_numpy().tolist())
    page = folder / "report.html"
    if page.is_file() and page.stat().st_size <= LARGEST_REPORT:
        logged["report"] = wandb.Html(page.read_text(encoding="utf-8"), inject=False)
    run.log(logged)
    given = conditions(scores)
    about = {"label": label(scores.run), "measured": describe_conditions(given), "conditions": given}
    about |= {"group": f"{about['label']} | {about['measured']}", "config_hash": scores.config_hash}
    about |= {key: scores.run[key] for key in ("order", "finished", "objective", "variant")}
    about |= {key: getattr(scores, key) for key in ("texts", "versions", "needs_domain", "loading")}
    run.config.update({"cpt": about}, allow_val_change=True)
    run.summary.update(frames.choose_headlines(scores))
