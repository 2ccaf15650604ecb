"""Whether a model can be loaded from the Hugging Face Hub: see cpt.core.hub_access."""

from cpt.core.hub_access import find_missing_host


def check_model_access(name: str) -> None:
    """Raises ConnectionError, an OSError, if a model would be asked for at the Hub, whose host has no
    address. The message is only the reason, since callers say what is not loaded."""
    missing_host = find_missing_host(name, "model")
    if missing_host is not None:
        raise ConnectionError(f"{missing_host} has no address here")
