"""The Weights & Biases run of a run folder: opened, its curves over tokens, and the result."""

import logging
import netrc
import os
import re
from collections.abc import Mapping
from io import BytesIO
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import wandb
from lightning.pytorch.loggers import WandbLogger
from lightning.pytorch.utilities import rank_zero_only
from PIL import Image
from pydantic import ValidationError

from cpt.core.errors import find_reason
from cpt.core.naming import LONGEST_TAG
from cpt.evaluation.scores import Scores, describe_conditions, find_conditions
from cpt.loggers.stage_logger import StageLogger
from cpt.loggers.wandb_environment import WandbLabels, WandbPlace, choose_entity, choose_project
from cpt.reporting import frames, run_figures
from cpt.reporting.comparability import read_base_hash
from cpt.reporting.formats import label_run
from cpt.reporting.frames import escape_name, list_stage_points

log = logging.getLogger(__name__)
WANDB_HOSTS = ("api.wandb.ai", "api.forge.coreweave.com")
LARGEST_REPORT = 10_000_000  # bytes; a larger page is slow in a panel
TOKENS = "train/tokens"
TRAINING = ("train", "monitor", "divergence", "budget")  # curves KIND/NAME/DOMAIN of metrics.csv
AXES = {  # No two patterns meet: of several that do W&B takes any.
    TOKENS: tuple(f"{kind}/*" for kind in TRAINING),
    "stage": ("ppl/*", "nats/*", "bits_per_byte/*", "kl/*", "stages/*", "tasks/*", "units/*"),
}
FAMILIAR_NAMES = {"train/lm": "train/loss", "train/lr": "train/learning_rate"}  # as Trainer of transformers
FINISH_TIMEOUT_S = 600  # for what is left to send at the end of a run; W&B's own default is no limit
PAGE = re.compile(r":?\s*<!DOCTYPE.*", re.DOTALL | re.IGNORECASE)  # with which a server says why it refuses
CAPTURED_LOGGERS = {"cpt": "INFO"}  # whose lines are the Logs of a run on W&B


class WandbCurves(WandbLogger, StageLogger):
    """W&B's run as a logger of Lightning's, with its curves over the tokens of the whole run."""

    def __init__(self, curves: "Curves") -> None:
        super().__init__(experiment=curves.run)
        self.curves = curves

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        self.curves.log(metrics)

    def enter(self, domain: str, *, stage: int, tokens: float) -> None:
        self.curves.enter(domain, stage=stage, tokens=tokens)

    def log_row(self, scores: Scores, row: int) -> None:
        self.curves.run.log(list_stage_points(scores, row))

    def log_result(self, scores: Scores, *, folder: Path) -> None:
        publish(self.curves.run, scores, folder=folder)

    def mark_preempted(self) -> None:
        self.curves.run.mark_preempting()

    def close(self, *, is_failed: bool) -> None:
        run = self.curves.run
        try:
            run.finish(exit_code=int(is_failed))
        except TimeoutError:
            raise TimeoutError(
                f"not all was sent; send it with: wandb sync {run.settings.sync_dir}"
            ) from None
        log.info("W&B: %s", describe_place(run))


def check_settings(destination: WandbPlace) -> None:
    """Raises ValueError for options and variables that W&B refuses."""
    for option, value in (("project", destination.project), ("entity", destination.entity)):
        try:
            setattr(wandb.Settings(), option, value)
        except (ValueError, wandb.Error) as error:
            raise ValueError(f"logger.{option}={value} is invalid: {explain_refusal(error)}") from None

    for name in sorted(os.environ):
        if name.startswith("WANDB_"):
            try:
                wandb.Settings().update_from_env_vars({name: os.environ[name]})
            except (ValueError, wandb.Error) as error:  # without the value, which may be a key
                raise ValueError(f"{name} is invalid: {explain_refusal(error)}") from None


def explain_refusal(error: Exception) -> str:
    """What W&B, or pydantic in its name, says of a value."""
    if isinstance(error, ValidationError):
        return str(error.errors()[0]["msg"])
    return find_reason(error)


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


def open_wandb(
    identifier: str, folder: Path, *, destination: WandbPlace, labels: WandbLabels, config: Mapping[str, Any]
) -> wandb.Run:
    """The W&B run of a run folder. `mode=auto`: WANDB_MODE, else online for a logged-in user. Where W&B
    cannot be reached or refuses, the run is logged offline, with a warning."""
    mode = destination.mode
    if mode == "auto":
        mode = os.environ.get("WANDB_MODE") or ("online" if is_logged_in() else "offline")
    if mode == "online":
        log.info("Connecting to W&B (at most 90 seconds; WANDB_INIT_TIMEOUT=SECONDS changes the limit)")
    try:
        return init_wandb(
            identifier, folder, mode=mode, destination=destination, labels=labels, config=config
        )
    except (ConnectionError, ValueError) as error:
        if mode != "online":
            raise
        cause = PAGE.sub("", str(error).partition(";")[0])
        log.warning("%s; logging offline, `wandb sync` sends the run later", cause)
        wandb.teardown()  # else its service takes the identifier to be in use
        return init_wandb(
            identifier, folder, mode="offline", destination=destination, labels=labels, config=config
        )


def init_wandb(
    identifier: str,
    folder: Path,
    *,
    mode: str,
    destination: WandbPlace,
    labels: WandbLabels,
    config: Mapping[str, Any],
    settings: wandb.Settings | None = None,
    way_out: str = "logger.mode=offline keeps the run in its folder",
) -> wandb.Run:
    """A W&B run with its files below the folder, or below WANDB_DIR; an existing one of this identifier is
    continued. `settings`: more of wandb.Settings. `way_out`: the end of an error message. Raises ValueError
    for what W&B refuses, ConnectionError where it cannot be reached or keeps no such run."""
    too_long = [tag for tag in labels.tags if not 0 < len(tag) <= LONGEST_TAG]
    if too_long:
        raise ValueError(f"tags={too_long} is invalid. Allowed: 1 to {LONGEST_TAG} characters each")

    settings = settings or wandb.Settings()
    if not os.environ.get("WANDB_SILENT"):
        settings.silent = True
    if not os.environ.get("WANDB_CONSOLE"):
        keep_log_lines(settings)

    limit_finish(settings)
    try:
        run = wandb.init(
            id=identifier,
            dir=os.environ.get("WANDB_DIR") or str(folder),
            mode=mode,  # type: ignore[arg-type]  # older names
            project=choose_project(destination.project),
            entity=choose_entity(destination.entity),
            name=labels.name,
            group=labels.group,
            job_type=labels.job_type,
            tags=list(labels.tags),
            config=dict(config),
            # offline too: the files of two starts are one run to `wandb sync` only if both say so
            resume="allow",
            reinit="create_new",  # a run that is still open is another one
            settings=settings,
        )
    except wandb.Error as error:
        is_refused = isinstance(error, wandb.errors.AuthenticationError)
        is_unreachable = isinstance(error, wandb.errors.CommError) and not is_refused
        kind = ConnectionError if is_unreachable else ValueError
        raise kind(f"W&B: {find_reason(error).rstrip('.')}; {way_out}") from None
    for axis, patterns in AXES.items():
        run.define_metric(axis)
        for pattern in patterns:
            run.define_metric(pattern, step_metric=axis, step_sync=True, summary="none")
    return run


def keep_log_lines(settings: wandb.Settings) -> None:
    """Lets W&B keep cpt's log lines, and nothing else that is written to the console: bars are not lines."""
    if "capture_loggers" in wandb.Settings.model_fields:
        settings.console = "off"
        settings.capture_loggers = CAPTURED_LOGGERS
    else:  # an older client takes all of the console or nothing
        settings.console = "wrap"


def limit_finish(settings: wandb.Settings) -> None:
    """Lets a run end although a server that was there does not answer any more. WANDB_FINISH_TIMEOUT is
    another limit, in seconds. An older client has none."""
    if "finish_timeout" not in wandb.Settings.model_fields:
        return
    settings.finish_timeout_raises = True
    if not os.environ.get("WANDB_FINISH_TIMEOUT"):
        settings.finish_timeout = FINISH_TIMEOUT_S


def describe_place(run: wandb.Run) -> str:
    """Where a run is to be seen: its address, or how an offline run is sent."""
    if run.disabled:
        return "disabled, nothing is kept"
    if run.offline:
        return f"offline; send it with: wandb sync {run.settings.sync_dir}"
    return run.url or "online"


class Curves:
    """Curves of training over the tokens of the whole run: `train/lm/DOMAIN` of metrics.csv is `train/loss`.
    `progress`: a file that stores how far the curves go, so that steps which a resumed run repeats are not
    logged twice."""

    def __init__(self, run: wandb.Run, *, progress: Path | None = None) -> None:
        self.run = run
        self.progress = progress
        self.domain = ""
        self.stage = 0  # 1: the first that is trained
        self.tokens_before = 0.0  # that the run had read when it entered the domain
        self.tokens = 0.0  # of the whole run, at the last point
        self.defined: set[str] = set()  # names with an axis of their own definition
        stored = progress.read_text() if progress is not None and progress.exists() else ""
        self.logged_tokens = float(stored) if stored.isdigit() else 0.0

    def enter(self, domain: str, *, stage: int, tokens: float) -> None:
        """The points that follow are of this domain, which is trained in this stage (1: the first); before it
        the run had read this number of tokens."""
        self.domain = domain
        self.stage = stage
        self.tokens_before = tokens
        self.tokens = tokens

    def log(self, points: Mapping[str, float]) -> None:
        """Logs points that have the names of metrics.csv; other names are kept, over the same axis."""
        ending = f"/{self.domain}"
        merged: dict[str, float] = {}
        other_names: set[str] = set()
        for key, value in points.items():
            kind, _, term_and_domain = key.partition("/")
            if kind in TRAINING and term_and_domain.endswith(ending):
                term = escape_name(term_and_domain.removesuffix(ending))
                name = f"{kind}/{term}"
                merged[FAMILIAR_NAMES.get(name, name)] = value
            elif key != "epoch":
                merged[key] = value
                other_names.add(key)

        if TOKENS in merged:
            self.tokens = self.tokens_before + merged[TOKENS]
        if self.tokens < self.logged_tokens:
            return
        if self.tokens > self.logged_tokens:
            self.store_progress()
        self.logged_tokens = self.tokens

        # No pattern of AXES covers these; W&B takes a name with an asterisk for a pattern.
        for key in other_names - self.defined:
            if "*" not in key:
                self.run.define_metric(key, step_metric=TOKENS, step_sync=True)
        self.defined |= other_names
        self.run.log(merged | {TOKENS: self.tokens, "train/stage": self.stage})

    def store_progress(self) -> None:
        if self.progress is not None and self.progress.parent.is_dir():
            self.progress.write_text(str(int(self.tokens)))


def publish(run: wandb.Run, scores: Scores, *, folder: Path) -> None:
    """Logs what is known of a run with scores. The numbers come first: if a picture cannot be drawn, they are
    there.

    config      what it lacks: the name in comparisons, the resolved order, texts, versions
    summary     the headlines
    points      of end tasks, chats and divergences over the stages
    tables, the report if it is not too large, and pictures of it"""
    run.config.update(
        {"cpt": describe_scores(scores, base_hash=read_base_hash(folder))}, allow_val_change=True
    )
    run.summary.update(frames.choose_headlines(scores))

    task_points = frames.list_task_points(scores)
    for point in (*task_points, *frames.list_chat_points(scores), *frames.list_divergence_points(scores)):
        run.log(point)
    logged: dict[str, wandb.Table | wandb.Html] = {}
    for table_name, frame in frames.tabulate(scores).items():
        logged[table_name] = wandb.Table(columns=[*frame], data=frame.to_numpy().tolist())
    page = folder / "report.html"
    if page.is_file() and page.stat().st_size <= LARGEST_REPORT:
        logged["report"] = wandb.Html(page.read_text(encoding="utf-8"), inject=False)
    run.log(logged)

    pictures = draw_pictures(scores, has_endtasks=bool(task_points))
    if pictures:
        images = {name: Image.open(BytesIO(picture)) for name, picture in pictures.items()}
        run.log({f"{name}_image": wandb.Image(image) for name, image in images.items()})


def describe_scores(scores: Scores, *, base_hash: str) -> dict[str, Any]:
    """What the config of a W&B run lacks; `base_hash` is "" where it is not known."""
    conditions = find_conditions(scores) | {"base": base_hash or "unknown"}
    label = label_run(scores.run)
    measured = describe_conditions(conditions)
    if base_hash:
        measured += f", base {base_hash}"
    facts = {
        "label": label,
        "measured": measured,
        "conditions": conditions,
        "group": f"{label} | {measured}",
        "config_hash": scores.config_hash,
        "texts": scores.texts,
        "versions": scores.versions,
        "needs_domain": scores.needs_domain,
        "loading": scores.loading,
    }
    for key in ("order", "finished", "objective", "variant"):
        facts[key] = scores.run[key]
    return facts


def draw_pictures(scores: Scores, *, has_endtasks: bool) -> dict[str, bytes]:
    """Pictures of the report by name, as PNG; none of what the scores do not have."""
    pictures: dict[str, bytes] = {}
    matrices = frames.find_matrices(scores)
    if scores.rows:
        pictures["matrix"] = run_figures.draw_matrix(scores, matrices["perplexity"])
        pictures["stages"] = run_figures.draw_text_curves(scores, matrices["perplexity"])
    if any(scores.modules):
        pictures["modules"] = run_figures.draw_modules(scores)
    if has_endtasks:
        pictures["endtasks"] = run_figures.draw_tasks("endtasks", matrices["endtasks"])
    return pictures
