"""Whether the Hugging Face Hub can be asked for a repository at all: without a network its client asks again
and again, for half a minute, before it fails."""

import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit
from urllib.request import getproxies

from huggingface_hub import constants
from huggingface_hub.errors import HFValidationError
from huggingface_hub.file_download import repo_folder_name
from huggingface_hub.utils import validate_repo_id

RETRY_S = 2.0  # after which a name server that did not answer is asked once more
RepositoryKind = Literal["model", "dataset"]


def check_model_access(name: str) -> None:
    """Raises ConnectionError, an OSError, if a model would be asked for at the Hub, whose host has no
    address. The message is only the reason, since callers say what is not loaded."""
    missing_host = find_missing_host(name, "model")
    if missing_host is not None:
        raise ConnectionError(f"{missing_host} has no address here")


def check_data_set_access(path: str) -> None:
    """Raises ConnectionError, an OSError, if a data set would be asked for at the Hub, whose host has no
    address."""
    missing_host = find_missing_host(path, "dataset")
    if missing_host is not None:
        raise ConnectionError(
            f"no such folder, and not loaded from the Hub: {missing_host} has no address here"
        )


def find_missing_host(name: str, kind: RepositoryKind) -> str | None:
    """The host of the Hub if a repository would be asked for there, and the host has no address. None where
    the name is a folder or in the cache, and where only the client itself can tell (`find_silent_host`)."""
    # Names of the Hub are short: a path that the file system refuses for its length is not looked for.
    if not is_hub_name(name) or Path(name).exists() or is_in_hub_cache(name, kind):
        return None
    return find_silent_host()


def find_silent_host() -> str | None:
    """The host of the Hub if it has no address. None also where only the client itself can tell: offline by
    HF_HUB_OFFLINE, or with a proxy, which looks up the address itself."""
    host = urlsplit(constants.ENDPOINT).hostname
    has_proxy = bool(getproxies().keys() - {"no"})  # `no` lists the hosts that are asked without one
    if constants.HF_HUB_OFFLINE or host is None or has_proxy or has_address(host):
        return None
    return host


def is_hub_name(name: str) -> bool:
    """Whether a name can be one of the Hub, NAME or USER/NAME; others are refused without a network."""
    try:
        validate_repo_id(name)
    except HFValidationError:
        return False
    return True


def is_in_hub_cache(name: str, kind: RepositoryKind) -> bool:
    """Whether files of a repository were downloaded before, or a data set was prepared."""
    return any(True for _ in list_cached_files(name, kind))


def list_cached_files(name: str, kind: RepositoryKind) -> Iterator[Path]:
    """The files of a repository in the cache of the Hub, and those that `datasets` has made of a data set."""
    downloads = Path(constants.HF_HUB_CACHE) / repo_folder_name(repo_id=name, repo_type=kind)
    yield from downloads.glob("snapshots/*/*")
    if kind == "dataset":
        import datasets  # seconds that a check of a model need not wait for
        from datasets.naming import camelcase_to_snakecase

        user, slash, short_name = name.rpartition("/")
        folder_name = f"{user}{'___' if slash else ''}{camelcase_to_snakecase(short_name)}"
        yield from Path(datasets.config.HF_DATASETS_CACHE).expanduser().glob(f"{folder_name}/*/*/*")


def has_address(host: str) -> bool:
    """Whether a host has an address. A slow name server is waited for; one that does not answer is asked
    twice."""
    for is_last in (False, True):
        try:
            socket.getaddrinfo(host, None)
            return True
        except socket.gaierror as error:
            if error.errno != socket.EAI_AGAIN:
                return False
        if not is_last:
            time.sleep(RETRY_S)
    return False
