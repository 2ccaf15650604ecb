"""Plain models of models with layers of peft: a copy in memory, or files that are written layer by layer."""

import json
from collections import Counter
from collections.abc import Mapping, Set
from copy import deepcopy
from pathlib import Path
from typing import Any, cast

import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.other import AuxiliaryTrainingWrapper
from torch import Tensor, nn
from transformers import PreTrainedModel

from cpt.models.loading import make_skeleton
from cpt.models.narrow_layers import NarrowLayer, find_hidden_dtype, widen
from cpt.models.quantization import QuantizedLinear, dequantize_layers, find_quantized_layers
from cpt.models.streamed_files import can_stream, write_model


def copy_without_tuners(
    model: PreTrainedModel, *, merged: bool = True, weights: Mapping[str, Tensor] | None = None
) -> PreTrainedModel:
    """An unmodified copy, all of it trainable, with what peft's layers have learned if `merged`; `weights`
    replace those of the model first, by the names of its parameters.

    A head that is tied to the embedding stays tied if both are still the same; else the configuration says
    that they are not."""
    copy = deepcopy(model)
    widen(copy, copy.parameters())  # adapters are merged in 32 bits
    with torch.no_grad():
        for name, values in (weights or {}).items():
            copy.get_parameter(name).copy_(values)

    # Found before the first layer is unwrapped: a tied head has to be seen with its embedding.
    shared = find_shared_parameters(copy)
    dtype = find_hidden_dtype(copy)
    for name in find_tuner_layers(copy):
        layer = copy.get_submodule(name)
        if merged:
            separate_shared(layer, shared)
        copy.set_submodule(name, make_plain_layer(layer, merged=merged, dtype=dtype))
    dequantize_layers(copy, dtype)  # those without a tuner
    if hasattr(copy, "peft_config"):
        del copy.peft_config
    settle_ties(copy)
    return copy.requires_grad_(True)


def find_shared_parameters(model: nn.Module) -> set[int]:
    """The ids of the parameters that several modules share."""
    num_owners = Counter[int]()
    for module in model.modules():
        num_owners.update(id(parameter) for parameter in module.parameters(recurse=False))
    return {parameter_id for parameter_id, count in num_owners.items() if count > 1}


def find_tuner_layers(model: nn.Module) -> list[str]:
    """The names of peft's layers, without those inside of others."""
    # A module is named before those inside of it.
    names: list[str] = []
    for name, module in model.named_modules():
        is_inside = any(name.startswith(f"{outer}.") for outer in names)
        if isinstance(module, BaseTunerLayer | AuxiliaryTrainingWrapper) and not is_inside:
            names.append(name)
    return names


def make_plain_layer(layer: Any, *, merged: bool, dtype: torch.dtype) -> nn.Module:
    """The layer of the plain model that a layer of peft stands for, which is changed: as it was trained if
    `merged`, else as it was. One in few bits gets weights of a type."""
    base_layer = getattr(layer, "base_layer", None)
    if not isinstance(base_layer, QuantizedLinear):
        return unwrap(layer, merged=merged)
    # In 32 bits: the sum of weights and adapter is rounded once.
    layer.base_layer = base_layer.make_linear(torch.float32)
    return base_layer.make_plain(cast(nn.Linear, unwrap(layer, merged=merged)), dtype)


def unwrap(layer: Any, *, merged: bool) -> nn.Module:
    """The layer within a layer of peft: as it was trained if `merged`, else as it was."""
    if isinstance(layer, AuxiliaryTrainingWrapper) and not merged:
        return cast(nn.Module, layer.original_module)
    if hasattr(layer, "unload_and_optionally_merge_module"):  # wrappers, parameters, attention of torch
        return cast(
            nn.Module,
            layer.unload_and_optionally_merge_module(merge=merged, safe_merge=False, adapter_names=None),
        )
    if merged:
        layer.merge()
    return cast(nn.Module, layer.get_base_layer())


@torch.no_grad()
def separate_shared(layer: nn.Module, shared: Set[int]) -> None:
    """Gives a layer of peft copies of its own of parameters, by id, that other layers have too, as a tied
    head: what it has learned is merged into them and must not reach the others."""
    for module in layer.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if id(parameter) in shared:
                setattr(module, name, nn.Parameter(parameter.detach().clone()))


def settle_ties(model: PreTrainedModel) -> None:
    """Ties a head and an embedding that are configured as tied and equal; if they differ, the configuration
    becomes untied."""
    head = model.get_output_embeddings()
    if head is None or not model.config.tie_word_embeddings:
        return
    table = model.get_input_embeddings()
    # On the meta device there are no values to compare.
    if head.weight is table.weight or head.weight.device.type == "meta":
        return
    if torch.equal(head.weight, table.weight):
        head.weight = table.weight
    else:
        untie(model)


@torch.no_grad()
def untie(model: PreTrainedModel) -> None:
    """Configures head and embedding as untied, and gives each a parameter of its own where a model of that
    configuration has two: also the second bias of heads as RoBERTa's, which loading would draw at random."""
    model.config.tie_word_embeddings = False
    # By the new configuration: what is still one parameter there stays one here.
    untied_parameters = dict(make_skeleton(model).named_parameters(remove_duplicate=False))
    first_names: dict[int, str] = {}  # by the id of a parameter, the first of its names
    for name, parameter in list(model.named_parameters(remove_duplicate=False)):
        first_name = first_names.setdefault(id(parameter), name)
        if name == first_name or name not in untied_parameters:
            continue
        is_tied = untied_parameters[name] is untied_parameters.get(first_name)
        if not is_tied:
            owner, _, attribute = name.rpartition(".")
            copy = nn.Parameter(parameter.detach().clone(), requires_grad=parameter.requires_grad)
            setattr(model.get_submodule(owner), attribute, copy)


class PlainWeights:
    """The weights of the model that `copy_without_tuners` makes, by name, computed when they are read: those
    of a layer of peft together, in a copy of this layer alone. No layer of peft may share a parameter with
    another module."""

    def __init__(
        self, model: PreTrainedModel, *, merged: bool, changed_weights: Mapping[str, Tensor] | None
    ) -> None:
        self.model = model
        self.merged = merged
        self.dtype = find_hidden_dtype(model)
        self.state = model.state_dict()
        self.parameters = dict(model.named_parameters(remove_duplicate=False))
        # By the id of a parameter, which may have several names.
        self.changed_values: dict[int, Tensor] = {}
        for name, values in (changed_weights or {}).items():
            self.changed_values[id(self.parameters[name])] = values

        # Layers that have another form in the plain model.
        self.replaced_names = set(find_tuner_layers(model))
        for name in find_quantized_layers(model):
            if not self.find_replaced(name):
                self.replaced_names.add(name)
        # Of the layer that was read last.
        self.layer_name = ""
        self.layer_weights: dict[str, Tensor] = {}

    def find_replaced(self, name: str) -> str:
        """The name of the replaced layer that a weight or a module is in; "" for others."""
        while name:
            name = name.rpartition(".")[0]
            if name in self.replaced_names:
                return name
        return ""

    def find_changed(self, name: str) -> Tensor | None:
        """The values that replace those of a parameter of the model, if there are any."""
        parameter = self.parameters.get(name)  # None: a buffer
        if parameter is None:
            return None
        return self.changed_values.get(id(parameter))

    @torch.no_grad()
    def read(self, name: str) -> Tensor:
        """A weight by its name in the plain model. Raises KeyError for a name that it does not have."""
        layer_name = self.find_replaced(name)
        if not layer_name:
            return self.read_unreplaced(name)
        if layer_name != self.layer_name:
            self.layer_weights = {}  # before the next layer is in memory
            self.layer_weights = self.compute_layer(layer_name)
            self.layer_name = layer_name
        return self.layer_weights[name.removeprefix(f"{layer_name}.")]

    def read_unreplaced(self, name: str) -> Tensor:
        """A weight of a layer that is not replaced, in the type with which the layer computes."""
        tensor = self.find_changed(name)
        if tensor is None:
            tensor = self.state[name]
        layer_name, _, weight_name = name.rpartition(".")
        layer = self.model.get_submodule(layer_name)
        if isinstance(layer, NarrowLayer) and weight_name == "weight":
            return tensor.to(layer.compute_dtype)
        return tensor

    def compute_layer(self, name: str) -> dict[str, Tensor]:
        """The weights of a replaced layer, by their names within it."""
        layer = deepcopy(self.model.get_submodule(name))
        widen(layer, layer.parameters())
        for weight_name, weight in layer.named_parameters():
            values = self.find_changed(f"{name}.{weight_name}")
            if values is not None:
                weight.copy_(values)
        if isinstance(layer, QuantizedLinear):
            plain = layer.make_plain(layer.make_linear(self.dtype), self.dtype)
        else:
            plain = make_plain_layer(layer, merged=self.merged, dtype=self.dtype)
        return plain.state_dict()


def save_without_tuners(
    folder: Path,
    model: PreTrainedModel,
    *,
    merged: bool = True,
    weights: Mapping[str, Tensor] | None = None,
) -> str:
    """Writes the model that `copy_without_tuners` makes with the same arguments; returns the expression that
    loads it. No copy of the model is in memory, but one of each layer in turn, unless layers of peft share
    parameters with others, as a tied head does, or transformers stores several weights as one tensor."""
    skeleton = make_plain_skeleton(model)
    if needs_copy(model) or not can_stream(skeleton):
        copy_without_tuners(model, merged=merged, weights=weights).save_pretrained(folder)
    else:
        plain_weights = PlainWeights(model, merged=merged, changed_weights=weights)
        write_model(folder, skeleton, plain_weights.read)
    quoted_folder = json.dumps(str(folder), ensure_ascii=False)
    return f"transformers.{type(skeleton).__name__}.from_pretrained({quoted_folder})"


def needs_copy(model: PreTrainedModel) -> bool:
    """Whether a model cannot lose its layers of peft one by one. Either one of them has a parameter that
    another module has too; or head and embedding are tied in the configuration but two parameters, which
    `settle_ties` can only compare in a copy without these layers."""
    head = model.get_output_embeddings()
    is_configured_tied = head is not None and model.config.tie_word_embeddings
    if is_configured_tied and head.weight is not model.get_input_embeddings().weight:
        return True
    shared = find_shared_parameters(model)
    for name in find_tuner_layers(model):
        if any(id(parameter) in shared for parameter in model.get_submodule(name).parameters()):
            return True
    return False


def make_plain_skeleton(model: PreTrainedModel) -> PreTrainedModel:
    """A model without storage and without layers of peft, which says what transformers stores of it."""
    skeleton = make_skeleton(model).to(find_hidden_dtype(model))
    # How the checkpoint that was loaded names and divides its tensors.
    if hasattr(model, "_weight_conversions"):
        skeleton._weight_conversions = model._weight_conversions
    if model.can_generate():
        skeleton.generation_config = model.generation_config
    return skeleton
