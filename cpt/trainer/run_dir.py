"""The run directory: its config, its lock, its files, and what is removed from it."""

import contextlib
import json
import re
import shutil
import zipfile
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from filelock import FileLock, Timeout
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from cpt.core import files
from cpt.core.cache import SMALL, discard
from cpt.core.config import flatten, identity, make_plain_config
from cpt.core.errors import find_reason
from cpt.core.exceptions import DamagedFileError
from cpt.core.heartbeat import PROGRESS_FILE, Heartbeat, format_error, record_exit, utc_now
from cpt.core.processes import is_first_process
from cpt.core.secrets import is_same_setting, redact
from cpt.evaluation.scores import Scores, documents_file, load_documents

# Config keys that choose texts: a run is compared by the texts' contents, not by these.
KEYS_BY_CONTENT = ("order", "domains.orders", "domains.root", "domains.only", "domains.by", "init_from")
# Endings of a stage's file and of its folders. A stage counts by its file: written last, removed first.
STAGE_FILE = "pt"
STAGE_FOLDERS = ("shards", "linked")
WEIGHTS = (".safetensors", ".bin")
CHECKPOINT_SUFFIXES = (*WEIGHTS, ".json", ".model", ".txt", ".jinja")
REPORTS = ("report.html", "report.md")
MICRO_BATCH_FILE = "micro_batch.json"
# The files of a run that was rejected: Hydra's, and those that the next start writes again.
FILES_BEFORE_THE_RUN = {
    ".hydra",
    "run.log",
    ".lock",
    "config.yaml",
    "threads",
    "matched.json",
    MICRO_BATCH_FILE,
    PROGRESS_FILE,
}
# What a killed process leaves of files that are written in one piece.
INCOMPLETE_PATTERNS = (
    ".scores.json.*.tmp",
    "*.partial",
    "stages/*.partial",
    "checkpoints/*.partial",
    "documents/*.partial",
    "diagnostics/*.partial",
    "monitor/*.partial",
    "rows/*.partial",
    "generated/kept/*.partial",
    "endtasks/*/*.partial",
    "benchmarks/*/*.partial",
    "answers/*/*.partial",
    "chats/*/*.partial",
    "divergence/*/*.partial",
)


class RunDir:
    """The directory of one run. `scores.json`, or a file of a row that it does not have, is written last in
    each stage; files of stages that they do not count are rebuilt.

    stages/NUMBER.pt            the method's state after a stage
    checkpoints/NUMBER-NAME     the trainer's state within one
    rows/NUMBER.json            the scores of a row that scores.json does not have yet
    documents/NUMBER.npz        losses by document of a row of the matrix; diagnostics/; monitor/ (observers)
    endtasks/, answers/, chats/, divergence/, benchmarks/NUMBER-NAME  results of a stage
    generated/NUMBER-NAME       text written before it"""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.model = path / "model"
        self.scores_file = path / "scores.json"
        self.config = path / "config.yaml"
        self.manifest = path / "identity.json"
        self.matched = path / "matched.json"  # the steps of trainer.match
        self.micro_batch = path / MICRO_BATCH_FILE  # what trainer.micro_batch=auto became
        self.restore_hint = f"restore it from a backup, or delete {path} to train again"

    def is_started(self) -> bool:
        """Whether something of a run is here, even if its config is lost."""
        paths = (
            self.config,
            self.manifest,
            self.scores_file,
            self.path / "stages",
            self.path / "checkpoints",
        )
        return any(path.exists() for path in paths)

    def write_config(self, settings: Mapping[str, Any]) -> None:
        config = OmegaConf.create(escape_interpolations(redact(settings)))
        files.write_atomically(self.config, OmegaConf.to_yaml(config))

    def check_config(self, settings: Mapping[str, Any]) -> None:
        """Raises ValueError for a directory that was made with another config, or with a damaged one."""
        changes = self.find_config_changes(settings) if self.config.exists() else []
        if changes:
            raise ValueError(
                f"{self.path} was made with another config ({'; '.join(changes)}); "
                "restore these values, choose another name=…, or delete the folder"
            )

    def stored_config(self) -> dict[str, Any]:
        """The leaves of the stored config by their dotted keys. Raises ValueError for a damaged one."""
        try:
            config = OmegaConf.load(self.config)
            if not isinstance(config, DictConfig) or not config:
                raise ValueError("it is not the config of a run")
            return dict(flatten(make_plain_config(config)))
        except (YAMLError, OmegaConfBaseException, ValueError, OSError) as error:
            raise DamagedFileError(
                self.config, reason=find_reason(error), remedy="restore it from a backup"
            ) from error

    def find_config_changes(
        self, settings: Mapping[str, Any], *, further_entries: Collection[str] = ()
    ) -> list[str]:
        """How a config differs from the stored one, apart from keys whose contents are compared and from
        `further_entries`: keys of entries that a mapping by domain may have in addition."""
        stored = remove_entries(identity(redact(self.stored_config())), further_entries)
        current = remove_entries(identity(redact(settings)), further_entries)
        ignored: set[str] = set()
        if self.manifest.exists() or self.scores_file.exists():
            ignored.update(KEYS_BY_CONTENT)
        if (stored.get("init_from") is None) != (current.get("init_from") is None):
            ignored.discard("init_from")  # else the bases are compared

        changes = []
        for key in sorted({*stored, *current} - ignored):
            stored_value = stored.get(key, "(absent)")
            current_value = current.get(key, "(absent)")
            if not is_same_setting(stored_value, current_value):
                changes.append(f"{key}: {stored_value} -> {current_value}")
        return changes

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Holds the directory's lock, which ends with the process. Raises ValueError if another has it."""
        try:
            with FileLock(self.path / ".lock", timeout=0):
                yield
        except Timeout as error:
            raise ValueError(
                f"another process is using {self.path}{self.describe_process()}; "
                "wait for it or choose another name=…"
            ) from error

    def describe_process(self) -> str:
        """` (host NAME, process ID)` of the process that is at work here; "" if it is not known."""
        with contextlib.suppress(ValueError):  # a damaged file
            heartbeat = Heartbeat.load(self.path)
            if heartbeat and heartbeat.active:
                return f" (host {heartbeat.process.host}, process {heartbeat.process.pid})"
        return ""

    @contextlib.contextmanager
    def removed_if_rejected(self) -> Iterator[None]:
        """Removes a new directory if the run fails before it has measured anything, unless another process is
        at work in it; what a sweep has put there stays, with the error."""
        is_new = is_first_process() and not self.config.exists()
        start_time = utc_now()
        try:
            yield
        except Exception as error:
            if is_new:
                with contextlib.suppress(Timeout):
                    self.remove_rejected(error, start_time)
            raise

    def remove_rejected(self, error: Exception, start_time: str) -> None:
        """Removes the directory of a run that failed, or records the error in it. Raises Timeout if another
        process is at work in it."""
        lock = self.path / ".lock"
        with FileLock(lock, timeout=0) if lock.exists() else contextlib.nullcontext():
            self.remove_if_empty()
        if self.path.is_dir():
            record_exit(self.path, "failed", format_error(error), run_start=start_time)

    def remove_if_empty(self) -> None:
        """Removes the directory if it has no file of a run."""
        if not self.path.is_dir():
            return
        names = {path.name for path in self.path.iterdir()}
        if names <= FILES_BEFORE_THE_RUN:
            shutil.rmtree(self.path)

    def clean(self) -> None:
        """Removes what killed processes left incomplete. The caller holds the lock."""
        incomplete: list[Path] = []
        for pattern in INCOMPLETE_PATTERNS:
            incomplete.extend(self.path.glob(pattern))

        # Folders of a committed stage stay: where its file is missing, it is lost and not incomplete.
        scores = self.load_scores()
        num_rows = 0 if scores is None else len(scores.rows)
        for ending in STAGE_FOLDERS:
            for folder in self.path.glob(f"stages/[0-9]*.{ending}"):
                number = folder.name.split(".")[0]
                if int(number) >= num_rows and not self.stage_path(number).exists():
                    incomplete.append(folder)
        for path in incomplete:
            discard(path)

    def write_checksums(self) -> None:
        """Stores the checksums of the model and the report with its pictures, which are flushed to disk."""
        reports = [self.path / name for name in REPORTS]
        outputs = [*self.model.rglob("*"), *reports, *self.path.glob("report-*.png")]
        files.write_checksums(self.path, [path for path in outputs if path.is_file()])

    def find_damaged_outputs(self, *, full: bool) -> list[str]:
        """The files of model and report that are missing or have another size; if `full`, or if all of them
        are small, another hash."""
        try:
            table = files.read_checksums(self.path)
            is_small = sum(size for size, _ in table.values()) <= SMALL
            never_made = [f"{name} is missing" for name in REPORTS if name not in table]
            return [*never_made, *files.find_damage(self.path, table, full=full or is_small)]
        except ValueError as error:
            return [str(error)]

    def load_scores(self) -> Scores | None:
        """The committed scores; None before the first row."""
        return Scores.load(self.scores_file) if self.scores_file.exists() else None

    def stage_path(self, number: int | str) -> Path:
        return self.path / "stages" / f"{number:0>3}.{STAGE_FILE}"

    def checkpoint_path(self, number: int, name: str) -> Path:
        return self.path / "checkpoints" / f"{number:03d}-{name}.ckpt"

    def load_documents(self, rows: Iterable[int]) -> list[dict[str, np.ndarray]]:
        return load_documents(self.path, rows)

    def save_documents(self, row: int, losses: Mapping[str, np.ndarray]) -> None:
        self.save_arrays(documents_file(self.path, row), losses)

    def check_documents(self, num_rows: int) -> None:
        """Raises ValueError if the losses by document of a committed row are missing or damaged."""
        for row in range(num_rows):
            files.check_archive(documents_file(self.path, row), remedy=self.restore_hint)

    def cleanup(self, number: int, *, keep_stages: bool) -> None:
        """Removes what a committed stage, by its number, makes obsolete: checkpoints within stages and,
        unless `keep_stages`, the weights after earlier stages."""
        discard(self.path / "checkpoints")
        if keep_stages:
            return
        for ending in (STAGE_FILE, *STAGE_FOLDERS):
            for path in self.path.glob(f"stages/*.{ending}"):
                earlier_number = path.name.split(".")[0]
                if earlier_number.isdigit() and int(earlier_number) < number:
                    discard(path)

    @staticmethod
    def save_arrays(path: Path, arrays: Mapping[str, np.ndarray]) -> None:
        """Writes a .npz file atomically: np.savez takes some names for options of its own."""
        with files.replacing(path) as partial, zipfile.ZipFile(partial, "w") as archive:
            for name, values in arrays.items():
                with archive.open(f"{name}.npy", "w", force_zip64=True) as file:
                    np.lib.format.write_array(file, np.asanyarray(values), allow_pickle=False)


def remove_entries(leaves: Mapping[str, Any], entries: Collection[str]) -> dict[str, Any]:
    """The leaves of a config without entries of its mappings, each a leaf or a mapping itself, and without
    mappings that have no other entries.

    >>> remove_entries({"columns.law": "body", "columns.tax": "text"}, ["columns.tax"])
    {'columns.law': 'body'}
    >>> remove_entries({"columns": {}}, ["columns.tax"])
    {}
    """
    mappings = {entry.rpartition(".")[0] for entry in entries}
    beginnings = tuple(f"{entry}." for entry in entries)
    remaining = {}
    for key, value in leaves.items():
        is_empty_mapping = key in mappings and not value
        is_entry = key in entries or key.startswith(beginnings)
        if not is_empty_mapping and not is_entry:
            remaining[key] = value
    return remaining


def escape_interpolations(value: Any) -> Any:
    """A config whose texts OmegaConf does not take for interpolations when it reads them."""
    if isinstance(value, Mapping):
        return {key: escape_interpolations(entry) for key, entry in value.items()}
    if isinstance(value, list):
        return [escape_interpolations(entry) for entry in value]
    if isinstance(value, str):
        # OmegaConf reads `\${` as `${`, and two backslashes before an interpolation as one.
        return re.sub(r"(\\*)\$\{", r"\1\1\\${", value)
    return value


def read_file_stat(path: Path) -> list[int]:
    """Size and modification time."""
    stat = path.stat()
    return [stat.st_size, stat.st_mtime_ns]


def list_checkpoint_files(checkpoint: str | None) -> dict[str, Path]:
    """The files of a model and its tokenizer by name: those of a folder, or those in the cache of the Hub.
    Folders and links to nothing are no files, whatever their names."""
    if checkpoint is None:
        return {}
    folder = Path(checkpoint)
    if not folder.is_dir():
        cached_folder = find_in_hub_cache(checkpoint)
        if cached_folder is None:
            return {}
        folder = cached_folder
    paths = [*sorted(folder.iterdir()), *sorted(folder.glob("adapters/*/*"))]  # adapters are merged
    return {
        str(path.relative_to(folder)): path
        for path in paths
        if path.suffix in CHECKPOINT_SUFFIXES and path.is_file()
    }


def has_chat_template(checkpoint: str | None) -> bool:
    """Whether the tokenizer of a checkpoint has a chat template, by its files; for one on the Hub that is not
    in its cache it is no."""
    paths = list_checkpoint_files(checkpoint)
    if "chat_template.jinja" in paths or "chat_template.json" in paths:
        return True
    config_path = paths.get("tokenizer_config.json")
    if config_path is None:
        return False
    try:
        return bool(json.loads(config_path.read_text(encoding="utf-8")).get("chat_template"))
    except (OSError, ValueError, AttributeError):  # a damaged file is reported where the tokenizer is loaded
        return False


def find_in_hub_cache(checkpoint: str) -> Path | None:
    """The folder of a name on the Hub in its cache; None if it is not there."""
    from huggingface_hub import try_to_load_from_cache

    with contextlib.suppress(ValueError):  # a missing folder is not a valid name on the Hub
        config = try_to_load_from_cache(checkpoint, "config.json")
        if isinstance(config, str):
            return Path(config).parent
    return None
