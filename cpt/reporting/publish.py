"""The exported model of a run as a repository of the Hugging Face Hub: its files, and their upload."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from huggingface_hub import CommitOperationAdd, HfApi
from huggingface_hub.errors import HTTPError, LocalTokenNotFoundError, OfflineModeIsEnabled
from huggingface_hub.utils import get_token, validate_repo_id

from cpt.core.exceptions import InvalidOptionError
from cpt.core.messages import count_noun
from cpt.core.tokenizer_files import TOKENIZER_FILES
from cpt.reporting.formats import format_bytes

OPTION = "--push"
# What an exported model consists of. Other files in its folder are not published.
PUBLISHED = (
    "README.md",
    "LICENSE*",
    "config.json",
    "generation_config.json",
    "*.safetensors",
    "*.safetensors.index.json",
    *TOKENIZER_FILES,
    "parts.json",
    "parts/*.safetensors",
    "adapters/*/adapter_config.json",
    "adapters/*/adapter_model.safetensors",
)
ADAPTER_CONFIG = "adapter_config.json"
# Of the Hub's answer and of the network (the class of huggingface_hub's own library for requests), and those
# that are raised before a request is made.
HUB_ERRORS = (HTTPError, LocalTokenNotFoundError, OfflineModeIsEnabled, ConnectionError, TimeoutError)


@dataclass(frozen=True, kw_only=True)
class Publication:
    """A repository, and the files of a folder that it is to have, by their paths in the folder."""

    name: str
    folder: Path
    published: list[str]
    left_out: list[str]
    is_private: bool

    def describe(self) -> list[str]:
        """The repository, then a line for each file."""
        visibility = "private" if self.is_private else "public"
        num_bytes = sum((self.folder / path).stat().st_size for path in self.published)
        file_count = count_noun(len(self.published), "file")
        lines = [f"{self.name} ({visibility}): {file_count}, {format_bytes(num_bytes)}"]
        for path in self.published:
            lines.append(f"  {path}  {format_bytes((self.folder / path).stat().st_size)}")
        for path in self.left_out:
            lines.append(f"  left out: {path}")
        return lines


def check_repository(name: str, *, needs_token: bool) -> None:
    """Raises ValueError for a name that no repository can have, and where a token is needed but missing."""
    try:
        validate_repo_id(name)
    except ValueError as error:
        reason = take_first_line(str(error))
        raise InvalidOptionError(OPTION, name, reason=reason, allowed="USER/MODEL or MODEL") from None
    if needs_token and not get_token():
        raise InvalidOptionError(
            OPTION,
            name,
            reason="there is no token of the Hub",
            allowed="after `hf auth login`, or with HF_TOKEN in the environment",
        )


def plan_publication(folder: Path, *, name: str, is_private: bool) -> Publication:
    """Which files of an exported model are published, and which are left out."""
    published = []
    left_out = []
    for path in sorted(folder.rglob("*")):
        if not path.is_file():
            continue
        relative_path = path.relative_to(folder).as_posix()
        is_published = any(matches(relative_path, pattern) for pattern in PUBLISHED)
        if is_published:
            published.append(relative_path)
        else:
            left_out.append(relative_path)
    return Publication(
        name=name, folder=folder, published=published, left_out=left_out, is_private=is_private
    )


def matches(path: str, pattern: str) -> bool:
    """Whether a path has the folders of a pattern and names that fit: `*` stands for no slash."""
    parts = path.split("/")
    pattern_parts = pattern.split("/")
    return len(parts) == len(pattern_parts) and all(map(fnmatch, parts, pattern_parts))


def push(publication: Publication, *, updates: bool) -> str:
    """Creates the repository and uploads its files in one commit; returns the address. If it `updates`, the
    repository may exist. Raises ValueError with one line for what the Hub or the network refuses."""
    api = HfApi()
    try:
        repository = api.create_repo(publication.name, private=publication.is_private, exist_ok=updates)
    except HUB_ERRORS as error:
        raise make_upload_error(error, publication, step="the repository was not created") from error
    try:
        api.create_commit(
            repository.repo_id,
            make_operations(publication, repository.repo_id),
            commit_message="Upload the exported model",
        )
    except HUB_ERRORS as error:
        step = "the repository is there, its files were not uploaded: push again with --update"
        raise make_upload_error(error, publication, step=step) from error
    return str(repository)


def make_upload_error(error: Exception, publication: Publication, *, step: str) -> ValueError:
    """A failure of the Hub or of the network as one line; `step` says what was not done."""
    response = getattr(error, "response", None)  # none where the Hub was not reached
    status = getattr(response, "status_code", None)
    allowed = "the same command again"
    if status == 409:
        return InvalidOptionError(
            OPTION, publication.name, reason="the repository exists", allowed="another name, or --update"
        )
    if status in (401, 403):
        cause = f"the token may not write there ({status})"
        allowed = "a name of your own, or a token with write access (`hf auth login`)"
    elif status is not None:
        server_message = getattr(error, "server_message", None) or str(error)
        cause = f"the Hub answered {status}: {take_first_line(server_message)}"
    else:
        cause = f"the Hub cannot be reached: {take_first_line(str(error)) or type(error).__name__}"
    return InvalidOptionError(OPTION, publication.name, reason=f"{cause}; {step}", allowed=allowed)


def take_first_line(text: str) -> str:
    """The first line of a message without its full stop; empty of an empty text."""
    lines = text.strip().splitlines()
    return lines[0].rstrip(".") if lines else ""


def make_operations(publication: Publication, repo_id: str) -> Sequence[CommitOperationAdd]:
    """The files as they are, but that adapters name the repository as their base, not a folder of this
    machine."""
    operations = []
    for path in publication.published:
        source: str | bytes = str(publication.folder / path)
        if Path(path).name == ADAPTER_CONFIG:
            config: dict[str, Any] = json.loads((publication.folder / path).read_text(encoding="utf-8"))
            config["base_model_name_or_path"] = repo_id
            source = (json.dumps(config, indent=2, sort_keys=True) + "\n").encode()
        operations.append(CommitOperationAdd(path_in_repo=path, path_or_fileobj=source))
    return operations
