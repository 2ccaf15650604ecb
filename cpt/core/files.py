"""Atomic file writes, checksums, and archives that are checked before they are loaded."""

import contextlib
import errno
import hashlib
import json
import os
import re
import resource
import shutil
import tempfile
import zipfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import xxhash
import yaml
from filelock import FileLock, Timeout

from cpt.core.exceptions import InvalidOptionError
from cpt.core.messages import count_noun

CHECKSUMS = "checksums.json"
PARTIAL = ".partial"  # ends the names of what is being written
LOCK = ".lock"  # in a folder that is being written: held by the process that writes it
WRITE_ERROR = re.compile(r"\(os error \d+\)|PytorchStreamWriter|inline_container")  # of Rust, of torch.save
TORCH_ERROR = re.compile(r"PytorchStreamWriter|inline_container")
NO_ROOM_ERRNOS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # the disk, the user's quota, the size of a file
FREE_SPACE_SUFFIX = "bytes free"
SIZE_LIMIT_SUFFIX = "in a file"
Loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # the former is ten times as fast
ChecksumTable = dict[str, tuple[int, str]]  # size and hash of files, by their path within a folder


def read_yaml(path: Path) -> Any:
    """The content of a YAML file, None if there is no such file. Raises OSError, UnicodeDecodeError and
    yaml.YAMLError."""
    if not path.exists():
        return None
    return yaml.load(path.read_text(encoding="utf-8"), Loader=Loader)


def sync(path: Path) -> None:
    """Returns when a file, or the names of the files in a folder, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def check_output(folder: Path) -> None:
    """Raises ValueError for a folder of --output that exists, unless it is empty."""
    is_empty_folder = folder.is_dir() and not any(folder.iterdir())
    if folder.exists() and not is_empty_folder:
        raise InvalidOptionError(
            "--output", folder, reason="it exists", allowed="a new folder, or an empty one"
        )


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A temporary path that replaces `path` on success: a kill leaves the old file or the new one. Raises
    OSError as `writing`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + PARTIAL)
    with writing(path):
        yield partial
        sync(partial)
        os.replace(partial, path)
        sync(path.parent)


def write_atomically(path: Path, text: str) -> None:
    """Writes a text file atomically."""
    with replacing(path) as partial:
        partial.write_text(text, encoding="utf-8")


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turns errors of a write inside the context into an OSError that names the path: that of a system call
    without a path, and those that safetensors, torch and tokenizers raise in other classes. Where room is
    lacking, it says how much there is."""
    try:
        yield
    except OSError as error:
        if error.errno is None or (error.filename is not None and error.errno not in NO_ROOM_ERRNOS):
            raise
        raise explain_write_error(error, path) from error
    except Exception as error:
        if not WRITE_ERROR.search(str(error)):
            raise
        cause = describe_write_error(error)
        raise OSError(f"{path} cannot be written ({cause}; {describe_free_space(path)})") from error


@contextlib.contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """A temporary folder that becomes `folder`, which is missing or empty, on success; an error inside the
    context leaves nothing. What killed processes left of the same folder is removed first."""
    absolute = folder.absolute()
    existing = next(path for path in (absolute, *absolute.parents) if path.is_dir())
    remove_leftovers(existing, absolute.name)
    prefix = f".{absolute.name}-"
    with tempfile.TemporaryDirectory(prefix=prefix, suffix=PARTIAL, dir=existing) as temporary:
        # The temporary folder is readable by its owner alone, the one within it as the umask says.
        partial = Path(temporary) / absolute.name
        partial.mkdir()
        with FileLock(Path(temporary) / LOCK, timeout=0):
            yield partial
            if absolute.is_dir():  # it stays: it may be the working directory, or where a disk is mounted
                for path in partial.iterdir():
                    os.replace(path, absolute / path.name)
            else:
                absolute.parent.mkdir(parents=True, exist_ok=True)
                os.replace(partial, absolute)


def remove_leftovers(parent: Path, name: str) -> None:
    """Removes the temporary folders for a folder of this name (`new_folder`) whose processes have ended."""
    pattern = re.compile(rf"\.{re.escape(name)}-\w{{8}}{re.escape(PARTIAL)}")
    for path in sorted(parent.iterdir()):
        lock = path / LOCK
        if not pattern.fullmatch(path.name) or not lock.exists():
            continue
        with contextlib.suppress(Timeout), FileLock(lock, timeout=0):
            shutil.rmtree(path, ignore_errors=True)


def describe_write_error(error: Exception) -> str:
    """Why a write of a library failed: the first line of its message. Messages of torch name a position in
    the archive and no reason, and are replaced. With the limit of a file's size where it may be the cause."""
    reason = str(error).splitlines()[0]
    is_of_size = f"(os error {errno.EFBIG})" in reason
    if TORCH_ERROR.search(reason):
        reason = "the file would be incomplete"
        is_of_size = True  # or of the disk, which torch does not say
    limit = describe_size_limit() if is_of_size else ""
    return f"{reason}, {limit}" if limit else reason


def explain_write_error(error: OSError, path: Path) -> OSError:
    """The error of a failed write with its path, which is `path` if `error` names none, and where room is
    lacking with how much there is in its `strerror`, if it is not there already."""
    strerror = str(error.strerror)
    room = ""
    if error.errno in NO_ROOM_ERRNOS and not strerror.endswith((FREE_SPACE_SUFFIX, SIZE_LIMIT_SUFFIX)):
        room = describe_size_limit() if error.errno == errno.EFBIG else describe_free_space(path)
    if room:
        strerror = f"{strerror}, {room}"
    return OSError(error.errno, strerror, error.filename or str(path))


def describe_size_limit() -> str:
    """`ulimit -f allows 4,096 bytes in a file`, by the limit of this process; empty if it has none, and a
    file is larger than its file system allows."""
    limit, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    if limit == resource.RLIM_INFINITY:
        return ""
    return f"ulimit -f allows {count_noun(limit, 'byte')} {SIZE_LIMIT_SUFFIX}"


def describe_free_space(path: Path) -> str:
    """`12,288 bytes free`, on the disk of a path that need not exist."""
    for folder in (path, *path.absolute().parents):
        try:
            return f"{shutil.disk_usage(folder).free:,} {FREE_SPACE_SUFFIX}"
        except OSError:
            continue
    return f"unknown {FREE_SPACE_SUFFIX}"


def check_archive(path: Path, *, remedy: str) -> None:
    """Raises ValueError if a zip file is missing or damaged; `remedy` says what to do about it."""
    if not path.exists():
        raise ValueError(f"{path} is missing; {remedy}")
    try:
        with zipfile.ZipFile(path) as archive:
            damaged = archive.testzip()
    except Exception as error:  # a flipped byte may name another zip version, encryption, or a huge size
        damaged = str(error) or type(error).__name__
    if damaged:
        raise ValueError(f"{path} is truncated or damaged ({damaged}); {remedy}")


def hash_file(path: Path) -> str:
    """xxh3 of a file, 32 hexadecimal digits: detects accidents, not forgery."""
    with path.open("rb", buffering=0) as file:
        return hashlib.file_digest(file, xxhash.xxh3_128).hexdigest()


def hash_files(folder: Path, paths: Iterable[Path]) -> ChecksumTable:
    names = {path.relative_to(folder).as_posix(): path for path in sorted(paths)}
    return {name: (path.stat().st_size, hash_file(path)) for name, path in names.items()}


def write_checksums(folder: Path, paths: Iterable[Path], *, unread: ChecksumTable | None = None) -> None:
    """Writes `checksums.json` of files in a folder, which are flushed to disk first; `unread` are the
    checksums of further files, which are not read."""
    paths = list(paths)
    for path in (*paths, *{path.parent for path in paths}):
        sync(path)
    table = (unread or {}) | hash_files(folder, paths)
    write_atomically(folder / CHECKSUMS, json.dumps({"files": table}, indent=0))


def read_checksums(folder: Path) -> ChecksumTable:
    """Raises ValueError if `checksums.json` is missing or damaged, PermissionError if it may not be read."""
    try:
        entries = json.loads((folder / CHECKSUMS).read_text(encoding="utf-8"))["files"]
        table = {name: (size, digest) for name, (size, digest) in entries.items()}
    except FileNotFoundError:
        raise ValueError(f"{CHECKSUMS} is missing") from None
    except PermissionError:
        raise
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{CHECKSUMS} is damaged") from error

    # Sizes are added up by callers, and damaged JSON may have any value in their place.
    if not all(isinstance(size, int) for size, _ in table.values()):
        raise ValueError(f"{CHECKSUMS} is damaged")
    return table


def find_damage(folder: Path, table: ChecksumTable, *, full: bool) -> Iterator[str]:
    """A message on each file that is missing, has another size or, if `full`, another hash than in the table.
    Raises PermissionError for a file that may not be read: it is not known to be damaged."""
    for name, (size, digest) in table.items():
        path = folder / name
        try:
            current_size = path.stat().st_size
            if current_size != size:
                yield f"{name} has {count_noun(current_size, 'byte')}, not {size:,}"
            elif full and hash_file(path) != digest:
                yield f"{name} differs from its checksum"
        except FileNotFoundError:
            yield f"{name} is missing"
        except PermissionError:
            raise
        except OSError as error:  # a bad disk, or another process has just removed it
            yield f"{name} cannot be read ({error.strerror})"


def write_checked_json(path: Path, value: Any) -> None:
    """Writes a JSON value with its hash, atomically."""
    digest = xxhash.xxh3_128_hexdigest(json.dumps(value).encode())
    write_atomically(path, json.dumps({"kept": value, "own": digest}))


def read_checked_json(path: Path, *, remedy: str) -> Any:
    """Raises ValueError for a file that is missing or damaged; `remedy` says what to do about it."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if content["own"] != xxhash.xxh3_128_hexdigest(json.dumps(content["kept"]).encode()):
            raise ValueError("it differs from its checksum")
    except FileNotFoundError:
        raise ValueError(f"{path} is missing; {remedy}") from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is damaged ({error}); {remedy}") from None
    return content["kept"]
