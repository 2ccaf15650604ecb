"""W&B's environment of a run, without W&B: its variables, its folders, and the run's identifier.

A variable WANDB_… is obeyed where no option of `logger` says otherwise. All files are in the run folder
unless a variable names another one."""

import logging
import os
import re
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from cpt.core.files import write_atomically as replace_file
from cpt.core.messages import count_noun
from cpt.core.naming import LONGEST_TAG
from cpt.core.processes import JOB
from cpt.core.schema import describe_unknown_name

log = logging.getLogger(__name__)
MODES = ("online", "offline", "disabled", "shared", "dryrun", "run")  # of WANDB_MODE
DEFAULT_PROJECT = "cpt"
ID_FILE = "wandb_id"  # in the run folder
IDENTIFIER = re.compile(r"[\w.-]{1,128}")
ID_BYTES = 8
FOLDERS = {  # variable: folder below RUN/wandb
    "WANDB_CACHE_DIR": "cache",
    "WANDB_DATA_DIR": "data",  # artifacts before they are sent
    "WANDB_CONFIG_DIR": "config",
}


@dataclass(frozen=True, kw_only=True)
class WandbPlace:
    """Where on W&B a run goes, and how."""

    mode: str = "auto"
    project: str | None = None
    entity: str | None = None


@dataclass(frozen=True, kw_only=True)
class WandbLabels:
    """What a run is called on W&B."""

    name: str
    group: str
    job_type: str
    tags: tuple[str, ...] = ()

    def obey_environment(self) -> "WandbLabels":
        """The labels, replaced by WANDB_NAME, WANDB_RUN_GROUP and WANDB_JOB_TYPE where these are set, and
        with WANDB_TAGS if the option `tags` is empty."""
        labels = replace(
            self,
            name=os.environ.get("WANDB_NAME") or self.name,
            group=os.environ.get("WANDB_RUN_GROUP") or self.group,
            job_type=os.environ.get("WANDB_JOB_TYPE") or self.job_type,
        )
        if self.tags:
            return labels
        tags = os.environ.get("WANDB_TAGS", "").split(",")
        return replace(labels, tags=tuple(tag.strip() for tag in tags if tag.strip()))


def check_environment() -> None:
    """Raises ValueError for a WANDB_MODE or WANDB_TAGS that W&B would refuse after the texts are read."""
    mode = os.environ.get("WANDB_MODE")
    if mode and mode not in MODES:
        raise ValueError(describe_unknown_name(f"WANDB_MODE={mode}", MODES))
    for tag in os.environ.get("WANDB_TAGS", "").split(","):
        if len(tag.strip()) > LONGEST_TAG:
            length = count_noun(len(tag.strip()), "character")
            raise ValueError(
                f"WANDB_TAGS is invalid: the tag {tag.strip()} has {length}. Allowed: 1 to {LONGEST_TAG} each"
            )
    identifier = os.environ.get("WANDB_RUN_ID")
    if identifier and not IDENTIFIER.fullmatch(identifier):
        raise ValueError(f"WANDB_RUN_ID={identifier} is invalid. Allowed: letters, digits, _, . and -")


def choose_project(project: str | None) -> str:
    """The project of the option, else of WANDB_PROJECT, else `cpt`."""
    return project or os.environ.get("WANDB_PROJECT") or DEFAULT_PROJECT


def choose_entity(entity: str | None) -> str | None:
    """The user or team of the option, else of WANDB_ENTITY; None: the user's own default."""
    return entity or os.environ.get("WANDB_ENTITY") or None


def choose_identifier(folder: Path) -> str:
    """The identifier of a run folder's W&B run, which a file in the folder stores.

    It is drawn at the first start. So a moved or resumed run remains the same W&B run, and no two runs are
    one. WANDB_RUN_ID is taken instead at the first start, and within a sweep of W&B's, whose agent chooses
    it, at every start; not by the jobs of a sweep of cpt, which all have the same variable."""
    stored = read_run_identifier(folder)
    requested = os.environ.get("WANDB_RUN_ID") or ""
    if requested and "WANDB_SWEEP_ID" in os.environ:
        identifier = requested
    elif requested and JOB in os.environ:
        log.warning("WANDB_RUN_ID=%s is not used: all jobs of the sweep would be one W&B run", requested)
        identifier = stored or draw_identifier()
    else:
        if stored and requested not in ("", stored):
            log.warning("WANDB_RUN_ID=%s is not used: this run folder is W&B's run %s", requested, stored)
        identifier = stored or requested or draw_identifier()

    if identifier != stored:
        store_identifier(folder, identifier)
    return identifier


def read_run_identifier(folder: Path, *, file_name: str = ID_FILE) -> str:
    """The stored identifier of a run folder's W&B run; empty without one, or if its file is damaged."""
    path = folder / file_name
    stored = path.read_text(encoding="utf-8", errors="replace").strip() if path.exists() else ""
    return stored if IDENTIFIER.fullmatch(stored) else ""


def store_identifier(folder: Path, identifier: str, *, file_name: str = ID_FILE) -> None:
    replace_file(folder / file_name, identifier + "\n")


def draw_identifier() -> str:
    """A new identifier, drawn by the operating system: the generators of a run are not touched."""
    return secrets.token_hex(ID_BYTES)


@contextmanager
def files_in(folder: Path) -> Iterator[None]:
    """Inside the context W&B writes below RUN/wandb what it would write into the home folder: the home folder
    may be missing, full or read-only. A user's own WANDB_…_DIR stays, and so does an existing file of
    settings, in which `wandb login --host` names the server."""
    defaults = {name: str(folder.absolute() / "wandb" / part) for name, part in FOLDERS.items()}
    if has_settings_file():
        del defaults["WANDB_CONFIG_DIR"]
    missing = {name: value for name, value in defaults.items() if not os.environ.get(name)}
    os.environ.update(missing)
    try:
        yield
    finally:
        for name in missing:
            os.environ.pop(name, None)


def has_settings_file() -> bool:
    """Whether the user has a file of settings where W&B looks for it by default."""
    try:
        return os.access(Path("~/.config/wandb/settings").expanduser(), os.R_OK)
    except RuntimeError:  # no home folder
        return False
