"""The run folder: its config, what has been committed to it, and what a killed run left in it."""

import contextlib
import logging
import os
import shutil
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from filelock import FileLock, Timeout
from omegaconf import OmegaConf

from cpt.core.cache import discard
from cpt.core.config import identity, list_differences, plain_config, redact
from cpt.core.files import (
    CHECKSUMS,
    check_archive,
    find_damage,
    read_checksums,
    replace,
    replacing,
    write_checksums,
)
from cpt.core.heartbeat import PROGRESS_FILE, Heartbeat, format_error, record_exit, utc_now
from cpt.evaluation.journal import journal_file
from cpt.evaluation.scores import Scores, documents_file, load_documents

log = logging.getLogger(__name__)
HELD = (
    "stages",
    "checkpoints",
    "documents",
    "diagnostics",
    "looks",
)  # folders of files that appear as a whole

# Config keys that choose texts, whose contents a folder remembers: these count, not the keys.
BY_CONTENT = ("order", "domains.root", "domains.only", "domains.by", "from")
# What a folder holds whose run has been refused: Hydra's files, and what the next start writes again.
BEFORE_THE_RUN = (".hydra", "run.log", ".lock", "config.yaml", "threads", PROGRESS_FILE)


class RunFolder:
    """One run's folder. `scores.json`, or a line beside it, is written last of all in each stage; what they
    do not count is made again.

    Raises ValueError if the folder was made with another config.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.model, self.scores_file = path / "model", path / "scores.json"
        self.config, self.identity = path / "config.yaml", path / "identity.json"
        self.outputs = path / CHECKSUMS

    def claim(self, settings: Mapping[str, Any]) -> None:
        """Remembers the config, or compares it with the remembered one."""
        if not self.config.exists():
            self.path.mkdir(parents=True, exist_ok=True)
            self.remember(settings)
            return
        self.check(settings)

    def remember(self, settings: Mapping[str, Any]) -> None:
        """Has this be the folder's config."""
        replace(self.config, OmegaConf.to_yaml(OmegaConf.create(redact(settings))))

    def check(self, settings: Mapping[str, Any]) -> None:
        """Raises ValueError for a folder that remembers another config."""
        if self.config.exists() and (changed := self.changes(settings)):
            raise ValueError(
                f"{self.path} was made with another config ({'; '.join(changed)}); "
                "take these values back, choose another name=…, or delete the folder"
            )

    def renew(self, settings: Mapping[str, Any]) -> None:
        """Remembers the config as it is now, where the order has grown."""
        if OmegaConf.load(self.config).get("order") != settings["order"]:
            self.remember(settings)

    def is_of(self, settings: Mapping[str, Any]) -> bool:
        """Whether the folder remembers this config."""
        return self.config.exists() and not self.changes(settings)

    def changes(self, settings: Mapping[str, Any]) -> list[str]:
        """What of a config is not what the folder remembers; where contents are remembered, they count."""
        then, now = identity(redact(plain_config(OmegaConf.load(self.config)))), identity(redact(settings))
        if self.identity.exists() or self.scores_file.exists():
            for key in BY_CONTENT:
                then.pop(key, None)
                now.pop(key, None)
        return list_differences(then, now)

    def clean(self) -> None:
        """Removes what processes that died left half written. The caller holds the lock."""
        patterns = [f"{name}/*.partial" for name in (*HELD, "generated/kept")]
        for pattern in (
            ".scores.json.*.tmp",
            "*.partial",
            "endtasks/*/*.partial",
            "probes/*/*.partial",
            "answers/*/*.partial",
            *patterns,
        ):
            for left in self.path.glob(pattern):
                discard(left)
        for shards in self.path.glob("stages/*.shards"):
            if not (self.path / "stages" / f"{shards.name.split('.')[0]}.pt").exists():
                discard(shards)
        if not self.scores_file.exists():
            journal_file(self.scores_file).unlink(missing_ok=True)  # of a run that is to begin anew

    def seal(self) -> None:
        """Remembers the checksums of what a finished run is asked for; the disk holds it then."""
        write_checksums(self.path, (p for p in (*self.model.rglob("*"), *self.reports) if p.is_file()))

    def seal_again(self, paths: Iterable[Path]) -> None:
        """Remembers other checksums of these files, where the folder remembers any: those of the others stay
        what they were, damaged or not. Raises ValueError where they cannot be read."""
        if self.outputs.exists():
            write_checksums(self.path, paths, others=read_checksums(self.path))

    @property
    def reports(self) -> list[Path]:
        return [self.path / f"report.{suffix}" for suffix in ("html", "md")]

    def lost(self, *, full: bool) -> list[str]:
        """What of a finished run's model and report is gone or partial; damaged too, if all is read."""
        try:
            return list(find_damage(self.path, read_checksums(self.path), full=full))
        except ValueError as error:
            return [str(error)]

    def make_room(self) -> None:
        """Puts aside what stands where the model's folder or the report belongs and is none."""
        wrong = [self.model] * (self.model.exists() and not self.model.is_dir())
        for path in wrong + [path for path in self.reports if path.is_dir()]:
            log.warning("%s is not what belongs there; it is now %s.old", path, path.name)
            os.replace(path, path.with_name(f"{path.name}.old"))

    def check_documents(self, rows: Sequence[Collection[str]]) -> None:
        """Raises ValueError if the losses by document of a row that counts are gone or damaged, or are not of
        the texts that it was scored on."""
        for path, names in zip(map(self.documents, range(len(rows))), rows, strict=True):
            instead = f"bring it back from a copy, or delete {self.path} to learn again"
            check_archive(path, instead=instead)
            with np.load(path) as file:
                if not set(names) <= set(file.files):
                    raise ValueError(f"{path} is of other texts ({', '.join(file.files)}); {instead}")

    def forget_checkpoints(self) -> None:
        """Removes what a stage that is not committed has come to."""
        shutil.rmtree(self.path / "checkpoints", ignore_errors=True)

    @contextlib.contextmanager
    def unless_refused(self) -> Iterator[None]:
        """Removes the folder again if the run ends in an error before it has learned or measured anything."""
        is_new, began = not self.config.exists(), utc_now()
        try:
            yield
        except Exception as error:
            if is_new:
                self.give_up(format_error(error), began=began)
            raise

    def give_up(self, why: str, *, began: str) -> None:
        """Removes the folder of a run that was refused, unless another start of it is at work there; what a
        sweep has put there stays, and says why."""
        lock = self.path / ".lock"
        try:
            with FileLock(lock, timeout=0) if lock.exists() else contextlib.nullcontext():
                self.leave()
        except Timeout:
            return
        if self.path.is_dir():
            record_exit(self.path, "failed", why, began=began)

    def leave(self) -> None:
        """Removes the folder if nothing of a run is in it."""
        holds = {each.name for each in self.path.iterdir()} if self.path.is_dir() else {""}
        if holds <= {*BEFORE_THE_RUN}:
            shutil.rmtree(self.path)

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Keeps a second start of the same run out; a killed run's lock is gone with it."""
        try:
            with FileLock(self.path / ".lock", timeout=0):
                yield
        except Timeout as error:
            raise ValueError(
                f"another process is at work in {self.path}{self.tell_holder()}; wait for it or choose "
                "another name=…"
            ) from error

    def tell_holder(self) -> str:
        """Host and number of the process that holds the folder, as far as it has said so."""
        with contextlib.suppress(ValueError):
            if (beat := Heartbeat.load(self.path)) and beat.active:
                return f" (host {beat.process.host}, process {beat.process.pid})"
        return ""

    def scores(self) -> Scores | None:
        """What has been committed."""
        return Scores.load(self.scores_file) if self.scores_file.exists() else None

    def stage(self, number: int) -> Path:
        """The method's state after so many stages."""
        return self.path / "stages" / f"{number:03d}.pt"

    def checkpoint(self, number: int, name: str) -> Path:
        """The trainer's state within a stage."""
        return self.path / "checkpoints" / f"{number:03d}-{name}.ckpt"

    def endtasks(self, row: int, name: str) -> Path:
        """Predictions of the models fine-tuned after a stage."""
        return self.path / "endtasks" / f"{row:03d}-{name}"

    def probes(self, row: int, name: str) -> Path:
        """What a probe has measured after a stage."""
        return self.path / "probes" / f"{row:03d}-{name}"

    def answers(self, row: int, name: str) -> Path:
        """What the model of a stage has answered."""
        return self.path / "answers" / f"{row:03d}-{name}"

    def generated(self, number: int, name: str) -> Path:
        """What the model has written before a stage, which replays it."""
        return self.path / "generated" / f"{number:03d}-{name}"

    @property
    def kept_of_texts(self) -> Path:
        """What stays of the texts that the model is to write for."""
        return self.path / "generated" / "kept"

    def documents(self, row: int) -> Path:
        """Losses by document of one row of the matrix."""
        return documents_file(self.path, row)

    def save_documents(self, row: int, losses: dict[str, np.ndarray]) -> None:
        with replacing(self.documents(row)) as partial, partial.open("wb") as file:
            np.savez(file, **losses)

    def save_diagnostics(self, row: int, values: dict[str, np.ndarray]) -> None:
        """What a method lets one look at after a stage: importances, how often a row was chosen."""
        if values:
            path = self.path / "diagnostics" / f"{row:03d}.npz"
            with replacing(path) as partial, partial.open("wb") as file:
                np.savez(file, **values)

    def looks(self, number: int) -> Path:
        """Losses by document that a budget counts from, as they were before a stage."""
        return self.path / "looks" / f"{number:03d}.npz"

    def save_looks(self, number: int, losses: dict[str, np.ndarray]) -> None:
        with replacing(self.looks(number)) as partial, partial.open("wb") as file:
            np.savez(file, **losses)

    def load_looks(self, number: int) -> dict[str, np.ndarray]:
        """Those of the stages before one. Raises ValueError for what is gone or damaged."""
        found: dict[str, np.ndarray] = {}
        for path in map(self.looks, range(1, number)):
            check_archive(path, instead=f"bring it back from a copy, or delete {self.path} to learn again")
            with np.load(path) as file:
                found |= {name: file[name] for name in file.files}
        return found

    def load_documents(self, rows: Iterable[int]) -> list[dict[str, np.ndarray]]:
        return load_documents(self.path, rows)

    def tidy(self, stages: int, *, keep: bool, end: bool = False) -> None:
        """Removes what a stage that is committed no longer needs, by what is there; `keep` says
        that the stages before it stay, `end` that the trainer's state at its end does."""
        if not end:
            self.forget_checkpoints()
        if keep:
            return
        for kind in ("pt", "shards"):  # in this order: a stage without its file does not count
            for old in self.path.glob(f"stages/*.{kind}"):
                if (number := old.name.split(".")[0]).isdigit() and int(number) < stages:
                    discard(old)
