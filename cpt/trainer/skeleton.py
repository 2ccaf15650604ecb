"""A model without storage, on torch's meta device: its names and shapes are checked before anything is
loaded."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from transformers import PretrainedConfig, PreTrainedModel

from cpt.core.errors import find_reason
from cpt.models import loading


@contextmanager
def on_meta_device() -> Iterator[None]:
    """What is built inside has no storage, and leaves the random numbers of the run as they are."""
    with torch.random.fork_rng(devices=[]), torch.device("meta"):
        yield


def build_skeleton(config: PretrainedConfig, objective: str, *, source: str) -> PreTrainedModel:
    """The model of a configuration on the meta device. Raises ValueError for one of which none can be built;
    `source` is KEY=VALUE."""
    try:
        with on_meta_device():
            return loading.AUTO_MODELS[objective].from_config(config)
    except Exception as error:  # whatever a class raises for sizes and names that it does not know
        raise ValueError(
            f"{source} is invalid: no {config.model_type} model can be built of its configuration "
            f"({describe_cause(error, config)}). Allowed: what transformers knows"
        ) from error


def describe_cause(error: Exception, config: PretrainedConfig) -> str:
    """An error's message. A KeyError says a value alone, to which its key in the configuration is added."""
    cause = find_reason(error)
    for key, value in config.to_dict().items():
        if cause == repr(value):
            cause = f"{key}={value}"
    return cause
