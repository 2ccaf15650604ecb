"""The run folder: its config, what has been committed to it, and what a killed run left in it."""

import contextlib
import os
import shutil
import zipfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from filelock import FileLock, Timeout
from omegaconf import DictConfig, OmegaConf

from cpt.config import differences, identity
from cpt.scores import Scores


class RunFolder:
    """One run's folder. `scores.json` is replaced last of all in each stage; what it does not count is made
    again.

    Raises ValueError if the folder was made with another config.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.model, self.scores_file = path / "model", path / "scores.json"
        self.config = path / "config.yaml"

    def claim(self, cfg: DictConfig) -> None:
        """Remembers the config, or compares it with the remembered one."""
        if not self.config.exists():
            self.path.mkdir(parents=True, exist_ok=True)
            with replacing(self.config) as partial:
                partial.write_text(OmegaConf.to_yaml(cfg, resolve=True))
            return
        if changed := differences(identity(OmegaConf.load(self.config)), identity(cfg)):
            raise ValueError(
                f"{self.path} was made with another config ({'; '.join(changed)}); "
                "take these values back, choose another name=…, or delete the folder"
            )

    def is_of(self, cfg: DictConfig) -> bool:
        """Whether the folder remembers this config."""
        return self.config.exists() and identity(OmegaConf.load(self.config)) == identity(cfg)

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Keeps a second start of the same run out; a killed run's lock is gone with it."""
        try:
            with FileLock(self.path / ".lock", timeout=0):
                yield
        except Timeout as error:
            raise ValueError(
                f"another process is at work in {self.path}; wait for it or choose another name=…"
            ) from error

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

    def documents(self, row: int) -> Path:
        """Losses by document of one row of the matrix."""
        return self.path / "documents" / f"{row:03d}.npz"

    def save_documents(self, row: int, losses: dict[str, np.ndarray]) -> None:
        with replacing(self.documents(row)) as partial, partial.open("wb") as file:
            np.savez(file, **losses)

    def save_diagnostics(self, row: int, values: dict[str, np.ndarray]) -> None:
        """What a method lets one look at after a stage: importances, how often a row was chosen."""
        if values:
            path = self.path / "diagnostics" / f"{row:03d}.npz"
            with replacing(path) as partial, partial.open("wb") as file:
                np.savez(file, **values)

    def load_documents(self, rows: int) -> list[dict[str, np.ndarray]]:
        loaded = []
        for row in range(rows):
            with np.load(self.documents(row)) as file:
                loaded.append(dict(file))
        return loaded

    def tidy(self, stages: int, *, keep: bool) -> None:
        """Removes what a stage that is committed no longer needs."""
        shutil.rmtree(self.path / "checkpoints", ignore_errors=True)
        if not keep:
            for old in range(stages):
                self.stage(old).unlink(missing_ok=True)


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A file beside `path` to write to, which then takes its place: a kill leaves the old file or the new
    one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.partial")
    yield partial
    descriptor = os.open(partial, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)
    os.replace(partial, path)


def check_archive(path: Path, *, instead: str) -> None:
    """Raises ValueError if a file of weights is truncated or damaged; `instead` says what to do about it."""
    try:
        with zipfile.ZipFile(path) as archive:
            damaged = archive.testzip()
    except (zipfile.BadZipFile, OSError) as error:
        damaged = str(error)
    if damaged:
        raise ValueError(f"{path} is truncated or damaged ({damaged}); {instead}")
