"""Files written as a whole or not at all, and archives that are whole."""

import contextlib
import os
import re
import zipfile
from collections.abc import Iterator
from pathlib import Path

from cpt.core.checksums import sync

REFUSED = re.compile(r"\(os error \d+\)|PytorchStreamWriter|inline_container")  # of Rust, of torch.save


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A file beside `path` to write to, which then takes its place: a kill leaves the old file or the new
    one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.partial")
    yield partial
    sync(partial)
    os.replace(partial, path)
    sync(path.parent)


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Raises OSError where a library has an error of its own for a system that does not let it write."""
    try:
        yield
    except OSError:
        raise
    except Exception as error:  # safetensors has one, torch a RuntimeError, tokenizers no more than this
        if not REFUSED.search(str(error)):
            raise
        raise OSError(f"{path} cannot be written ({str(error).splitlines()[0]})") from error


def replace(path: Path, text: str) -> None:
    """Puts a text in the place of a file."""
    with replacing(path) as partial:
        partial.write_text(text, encoding="utf-8")


def check_archive(path: Path, *, instead: str) -> None:
    """Raises ValueError if a file of weights or losses is truncated or damaged; `instead` says what to do
    about it."""
    if not path.exists():
        raise ValueError(f"{path} is gone; {instead}")
    try:
        with zipfile.ZipFile(path) as archive:
            damaged = archive.testzip()
    except Exception as error:  # whatever a byte of an archive may come to: another version, a lock, a size
        damaged = str(error) or type(error).__name__
    if damaged:
        raise ValueError(f"{path} is truncated or damaged ({damaged}); {instead}")
