"""Any tuner of peft that is put into a model's layers, and taken out again with what it has learned."""

from collections.abc import Mapping, Sequence
from copy import deepcopy
from typing import Any

import peft
from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING, PEFT_TYPE_TO_TUNER_MAPPING
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from cpt.adapters.bank import Scope
from cpt.adapters.lora import find_targets
from cpt.core.errors import reason
from cpt.core.rules import show
from cpt.models.units import sublayers

NAME = "default"  # of the adapter, in peft
SHARED = ("VERA",)  # whose layers share what peft does not give to a model that it only injects into


def attach_tuner(
    model: PreTrainedModel, tuner: str, *, targets: str | Sequence[str], arguments: Mapping[str, Any]
) -> Scope:
    """Puts a tuner into the layers of the targets: `auto` are all linear maps but the head, of ln_tuning the
    layers that normalise; else as for LoRA. Only what it adds is trained.

    Raises ValueError for arguments that peft does not take, and for a model that the tuner is not made
    for."""
    kind = "LORA" if tuner == "dora" else tuner.upper()
    given = choose_arguments(model, tuner, targets) | dict(arguments)
    config = PEFT_TYPE_TO_CONFIG_MAPPING[kind]
    known = [name for name in config.__dataclass_fields__ if name not in ("peft_type", "task_type")]
    if unknown := sorted(set(given) - set(known)):
        raise ValueError(f"method.arguments.{unknown[0]} is not known; allowed: {', '.join(known)}")
    try:
        made = config(**given)
        if kind in SHARED:
            PEFT_TYPE_TO_TUNER_MAPPING[kind](model, {NAME: made}, NAME)
        else:
            peft.inject_adapter_in_model(made, model, adapter_name=NAME)
    except (TypeError, ValueError, NotImplementedError, ImportError) as error:
        raise ValueError(
            f"method.tuner={tuner} with method.arguments={show_arguments(arguments)} does not go with a "
            f"{model.config.model_type}: {reason(error)}"
        ) from error
    names = tuple(name for name, parameter in model.named_parameters() if parameter.requires_grad)
    return Scope(names, ())


def choose_arguments(model: PreTrainedModel, tuner: str, targets: str | Sequence[str]) -> dict[str, Any]:
    """What a tuner's config is told of a model."""
    if targets == "auto" and tuner == "ln_tuning":
        return {"target_modules": [n for n, m in model.named_modules() if type(m).__name__.endswith("Norm")]}
    found = find_targets(model, "all-linear" if targets == "auto" else targets)
    given: dict[str, Any] = {"target_modules": list(found)}
    if any(isinstance(module, Conv1D) for module in found.values()) and tuner in ("dora", "ia3", "vera"):
        given["fan_in_fan_out"] = True
    if tuner == "ia3":
        down = {inner.out.name for inner in sublayers(model, ("neurons",))}
        given["feedforward_modules"] = [name for name in found if name in down]
    if tuner == "dora":
        given["use_dora"] = True
    if tuner == "fourierft":
        given["init_weights"] = True  # begins as the base
    return given


def show_arguments(arguments: Mapping[str, Any]) -> str:
    return "{" + ", ".join(f"{name}: {show(value)}" for name, value in arguments.items()) + "}"


def without_tuner(model: PreTrainedModel) -> PreTrainedModel:
    """A copy as its authors wrote it, all of it trainable, with what the tuner has learned in its weights."""
    copy = deepcopy(model)
    layers: dict[str, nn.Module] = {
        name: module for name, module in copy.named_modules() if isinstance(module, BaseTunerLayer)
    }
    for name, layer in layers.items():
        layer.merge()
        copy.set_submodule(name, layer.get_base_layer())
    if hasattr(copy, "peft_config"):
        del copy.peft_config
    return copy.requires_grad_(True)
