"""Whether the Hugging Face Hub can be asked for a checkpoint at all: without a network its client asks again
and again, for half a minute, before it fails."""

import socket
import time
from urllib.parse import urlsplit
from urllib.request import getproxies

from huggingface_hub import constants
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id
from transformers.utils import CONFIG_NAME, cached_file

RETRY_S = 2.0  # after which a name server that did not answer is asked once more


def find_missing_host(checkpoint: str) -> str | None:
    """The host of the Hub if a checkpoint would be asked for there, and the host has no address. None where
    the checkpoint is a folder or in the cache, and where only the client itself can tell: offline by
    HF_HUB_OFFLINE, or with a proxy, which looks up the address itself."""
    host = urlsplit(constants.ENDPOINT).hostname
    if constants.HF_HUB_OFFLINE or host is None or getproxies():
        return None
    if not is_hub_name(checkpoint) or is_on_this_machine(checkpoint) or has_address(host):
        return None
    return host


def is_hub_name(checkpoint: str) -> bool:
    """Whether a name can be one of the Hub, NAME or USER/NAME; others are refused without a network."""
    try:
        validate_repo_id(checkpoint)
    except HFValidationError:
        return False
    return True


def is_on_this_machine(checkpoint: str) -> bool:
    """Whether the config.json of a checkpoint is in a folder or in the cache."""
    try:
        return cached_file(checkpoint, CONFIG_NAME, local_files_only=True) is not None
    except OSError:
        return False


def has_address(host: str) -> bool:
    """Whether a host has an address. A slow name server is waited for; one that does not answer is asked
    twice."""
    for is_last in (False, True):
        try:
            socket.getaddrinfo(host, None)
            return True
        except socket.gaierror as error:
            if is_last or error.errno != socket.EAI_AGAIN:
                return False
            time.sleep(RETRY_S)
    return False
