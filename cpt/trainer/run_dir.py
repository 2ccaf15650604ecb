"""The run directory: its config, its lock, its files, and what is removed from it."""

import contextlib
import re
import shutil
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from filelock import FileLock, Timeout
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from cpt.core import files
from cpt.core.cache import SMALL, discard
from cpt.core.config import flatten, identity, plain_config
from cpt.core.errors import reason
from cpt.core.heartbeat import PROGRESS_FILE, Heartbeat, format_error, record_exit, utc_now
from cpt.core.processes import is_first_process
from cpt.core.secrets import is_same_setting, redact
from cpt.evaluation.scores import Scores, documents_file, load_documents

# Config keys that choose texts: a run is compared by the texts' contents, not by these.
BY_CONTENT = ("order", "domains.root", "domains.only", "domains.by", "init_from")
STAGE_FILES = ("pt", "shards", "linked")  # of a stage, which counts by its file: written last, removed first
WEIGHTS = (".safetensors", ".bin")
OF_A_CHECKPOINT = (*WEIGHTS, ".json", ".model", ".txt", ".jinja")
REPORTS = ("report.html", "report.md")
# The files of a run that was rejected: Hydra's, and those that the next start writes again.
BEFORE_THE_RUN = (".hydra", "run.log", ".lock", "config.yaml", "threads", "matched.json", PROGRESS_FILE)


class RunDir:
    """The directory of one run. `scores.json` is written last in each stage; files
    of stages that it does not count are rebuilt.

    stages/NUMBER.pt            the method's state after a stage
    checkpoints/NUMBER-NAME     the trainer's state within one
    documents/NUMBER.npz        losses by document of a row of the matrix; diagnostics/; monitor/, of a budget
    endtasks/, answers/, benchmarks/, generated/NUMBER-NAME  results of a stage, text written before it"""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.model, self.scores_file = path / "model", path / "scores.json"
        self.config, self.manifest = path / "config.yaml", path / "identity.json"
        self.matched = path / "matched.json"  # the steps of trainer.match
        self.restore_hint = f"restore it from a backup, or delete {path} to train again"

    def is_started(self) -> bool:
        """Whether something of a run is here, even if its config is lost."""
        own = (self.config, self.manifest, self.scores_file, self.path / "stages", self.path / "checkpoints")
        return any(each.exists() for each in own)

    def write_config(self, settings: Mapping[str, Any]) -> None:
        files.replace(
            self.config, OmegaConf.to_yaml(OmegaConf.create(escape_interpolations(redact(settings))))
        )

    def check_config(self, settings: Mapping[str, Any]) -> None:
        """Raises ValueError for a directory that was made with another config, or with a damaged one."""
        if self.config.exists() and (changed := self.find_config_changes(settings)):
            remedy = "restore these values, choose another name=…, or delete the folder"
            raise ValueError(f"{self.path} was made with another config ({'; '.join(changed)}); {remedy}")

    def stored_config(self) -> dict[str, Any]:
        """The leaves of the stored config by their dotted keys. Raises ValueError for a damaged one."""
        try:
            stored = OmegaConf.load(self.config)
            if not isinstance(stored, DictConfig) or not stored:
                raise ValueError("it is not the config of a run")
            return dict(flatten(plain_config(stored)))
        except (YAMLError, OmegaConfBaseException, ValueError, OSError) as error:
            told = f"{self.config} is damaged ({reason(error)})"
            raise ValueError(f"{told}; restore it from a backup") from error

    def find_config_changes(self, settings: Mapping[str, Any]) -> list[str]:
        """How a config differs from the stored one, apart from keys whose contents are compared."""
        stored = identity(redact(self.stored_config()))
        current = identity(redact(settings))
        ignored: tuple[str, ...] = BY_CONTENT if self.manifest.exists() or self.scores_file.exists() else ()
        if (stored.get("init_from") is None) != (current.get("init_from") is None):
            ignored = tuple(key for key in ignored if key != "init_from")  # else the bases are compared

        differences = []
        for key in sorted({*stored, *current} - {*ignored}):
            before, after = stored.get(key, "(absent)"), current.get(key, "(absent)")
            if not is_same_setting(before, after):
                differences.append(f"{key}: {before} -> {after}")
        return differences

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Holds the directory's lock, which ends with the process. Raises ValueError if another has it."""
        try:
            with FileLock(self.path / ".lock", timeout=0):
                yield
        except Timeout as error:
            told = f"another process is using {self.path}"
            with contextlib.suppress(ValueError):
                if (beat := Heartbeat.load(self.path)) and beat.active:
                    told += f" (host {beat.process.host}, process {beat.process.pid})"
            raise ValueError(f"{told}; wait for it or choose another name=…") from error

    @contextlib.contextmanager
    def removed_if_rejected(self) -> Iterator[None]:
        """Removes a new directory if the run fails before it has measured anything, unless another process is
        at work in it; what a sweep has put there stays, with the error."""
        is_new, began = is_first_process() and not self.config.exists(), utc_now()
        try:
            yield
        except Exception as error:
            lock = self.path / ".lock"
            with contextlib.suppress(Timeout):
                if is_new:
                    with FileLock(lock, timeout=0) if lock.exists() else contextlib.nullcontext():
                        self.remove_if_empty()
                    if self.path.is_dir():
                        record_exit(self.path, "failed", format_error(error), began=began)
            raise

    def remove_if_empty(self) -> None:
        """Removes the directory if it has no file of a run."""
        if self.path.is_dir() and {each.name for each in self.path.iterdir()} <= {*BEFORE_THE_RUN}:
            shutil.rmtree(self.path)

    def clean(self) -> None:
        """Removes what killed processes left incomplete. The caller holds the lock."""
        held = ("stages", "checkpoints", "documents", "diagnostics", "monitor", "generated/kept")
        results = ("endtasks/*", "benchmarks/*", "answers/*")
        patterns = [".scores.json.*.tmp", "*.partial", *(f"{each}/*.partial" for each in (*held, *results))]
        incomplete = [path for pattern in patterns for path in self.path.glob(pattern)]
        rows = len(scores.rows) if (scores := self.load_scores()) else 0
        for folder in (each for kind in STAGE_FILES[1:] for each in self.path.glob(f"stages/[0-9]*.{kind}")):
            number = folder.name.split(".")[0]  # of a committed stage the file is not incomplete but lost
            if int(number) >= rows and not self.stage_path(number).exists():
                incomplete.append(folder)
        for path in incomplete:
            discard(path)

    def write_checksums(self) -> None:
        """Stores the checksums of the model and the report with its pictures, which are flushed to disk."""
        pages = [self.path / name for name in REPORTS]
        outputs = [*self.model.rglob("*"), *pages, *self.path.glob("report-*.png")]
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
        return self.path / "stages" / f"{number:0>3}.pt"

    def checkpoint_path(self, number: int, name: str) -> Path:
        return self.path / "checkpoints" / f"{number:03d}-{name}.ckpt"

    def load_documents(self, rows: Iterable[int]) -> list[dict[str, np.ndarray]]:
        return load_documents(self.path, rows)

    def save_documents(self, row: int, losses: Mapping[str, np.ndarray]) -> None:
        self.save_arrays(documents_file(self.path, row), losses)

    def check_documents(self, rows: int) -> None:
        """Raises ValueError if the losses by document of a committed row are missing or damaged."""
        for row in range(rows):
            files.check_archive(documents_file(self.path, row), instead=self.restore_hint)

    def cleanup(self, stages: int, *, keep: bool) -> None:
        """Removes the checkpoints that a committed stage makes obsolete, also of stages unless `keep`."""
        discard(self.path / "checkpoints")
        for kind in () if keep else STAGE_FILES:
            for old in self.path.glob(f"stages/*.{kind}"):
                if (number := old.name.split(".")[0]).isdigit() and int(number) < stages:
                    discard(old)

    @staticmethod
    def save_arrays(path: Path, arrays: Mapping[str, np.ndarray]) -> None:
        """Writes a .npz file atomically: np.savez takes some names for options of its own."""
        with files.replacing(path) as partial, zipfile.ZipFile(partial, "w") as archive:
            for name, values in arrays.items():
                with archive.open(f"{name}.npy", "w", force_zip64=True) as file:
                    np.lib.format.write_array(file, np.asanyarray(values), allow_pickle=False)


def escape_interpolations(value: Any) -> Any:
    """A config whose texts OmegaConf does not take for interpolations when it reads them."""
    if isinstance(value, Mapping):
        return {key: escape_interpolations(each) for key, each in value.items()}
    if isinstance(value, list):
        return [escape_interpolations(each) for each in value]
    if isinstance(value, str):
        return re.sub(r"(\\*)\$\{", r"\1\1\\${", value)
    return value


def file_stat(path: Path) -> list[int]:
    """Size and modification time."""
    stat = path.stat()
    return [stat.st_size, stat.st_mtime_ns]


def checkpoint_files(checkpoint: str | None) -> dict[str, Path]:
    """The files of a model and its tokenizer by name: of a folder, or those in the cache of the Hub."""
    folder = Path(checkpoint or "")
    if checkpoint is not None and not folder.is_dir():
        from huggingface_hub import try_to_load_from_cache

        config = None
        with contextlib.suppress(ValueError):  # a missing folder is not a valid name on the Hub
            config = try_to_load_from_cache(checkpoint, "config.json")
        checkpoint, folder = (config, Path(config).parent) if isinstance(config, str) else (None, folder)
    if checkpoint is None:
        return {}
    paths = [*sorted(folder.iterdir()), *sorted(folder.glob("adapters/*/*"))]  # adapters are merged
    return {str(path.relative_to(folder)): path for path in paths if path.suffix in OF_A_CHECKPOINT}
