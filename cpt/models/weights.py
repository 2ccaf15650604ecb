"""Weights of a model: copied, restored, swapped for a while, penalised for their distance, frozen,
compared."""

import re
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion
from transformers.pytorch_utils import Conv1D

from cpt.core.distributed import is_sharded, shard_like, shard_rows, sum_over_processes, to_local
from cpt.core.exceptions import InvalidOptionError
from cpt.core.tensor_files import open_tensors
from cpt.core.tensors import NamedTensors, PreciseTensors, upcast
from cpt.models.forward import set_mode
from cpt.models.fsdp import named_weights, reshard
from cpt.models.options import Freeze
from cpt.models.quantization import find_quantized_layers
from cpt.models.units import find_blocks, list_needed_blocks
from cpt.optim.rounding import TO_NEAREST, Rounding

IN_ATTENTION = re.compile(r"attention|attn", re.IGNORECASE)
WRAPPED = ".base_layer"  # what peft calls the layer within one of its layers


class Snapshot(NamedTensors):
    """A copy of a model's parameters by name, without those that are `excluded`; later parameters are left
    alone until the next `capture`."""

    def __init__(self, model: nn.Module, *, persistent: bool, excluded: Collection[str] = ()) -> None:
        parameters = {name: weight for name, weight in model.named_parameters() if name not in excluded}
        super().__init__(parameters, persistent=persistent)
        self.excluded = excluded

    @torch.no_grad()
    def capture(self, model: nn.Module, *, share: float = 1.0) -> None:
        """Copies the model's parameters as they are now, or moves the copy by a share of the way to them."""
        current = {name: weight for name, weight in named_weights(model).items() if name not in self.excluded}
        copies = self.named()
        common_names = list_shared_names(current, copies)
        self.move(copies, current, common_names, share)
        self.update({name: weight for name, weight in current.items() if name not in common_names})

    @torch.no_grad()
    def restore(self, model: nn.Module, *, share: float = 1.0, rounding: Rounding = TO_NEAREST) -> None:
        """Restores the copy in place, or moves the parameters by a share of the way to it."""
        current = named_weights(model)
        copies = self.named()
        names = list_shared_names(current, copies)
        if rounding is TO_NEAREST:
            self.move(current, copies, names, share)
            return
        for name in names:
            weight = to_local(current[name])
            copy = self.on_module_device(to_local(copies[name]))
            rounding.store(current[name], rounding.widen(weight).lerp(rounding.widen(copy), share))

    def move(
        self, tensors: Mapping[str, Tensor], targets: Mapping[str, Tensor], names: Sequence[str], share: float
    ) -> None:
        """Moves tensors in place by a share of the way to targets, whose bits they have at a share of 1."""
        local_tensors = [to_local(tensors[name]) for name in names]
        local_targets = [to_local(targets[name]) for name in names]
        if not self.offloaded:
            pairs = zip(local_tensors, local_targets, strict=True)
            matching_targets = [target.to(tensor) for tensor, target in pairs]
            torch._foreach_lerp_(local_tensors, matching_targets, share)
            return
        # One after another, so that the module's device holds one tensor at a time.
        for tensor, target in zip(local_tensors, local_targets, strict=True):
            device_tensor = tensor.to(self.device)
            device_tensor.lerp_(target.to(device_tensor), share)
            if device_tensor is not tensor:
                tensor.copy_(device_tensor)

    @contextmanager
    def teaching(self, model: nn.Module) -> Iterator[None]:
        """The model with the copy's weights, in eval mode and without gradients, inside the context."""
        with torch.no_grad(), set_mode(model, training=False), swap_weights(model, self.named()):
            yield


class PreciseSnapshot(Snapshot, PreciseTensors):
    """A copy in at least 32 bits, so that many small changes add up."""

    def update(self, tensors: Mapping[str, Tensor]) -> None:
        super().update({name: upcast(tensor) for name, tensor in tensors.items()})

    @contextmanager
    def teaching(self, model: nn.Module) -> Iterator[None]:
        # In the types of the model's parameters, which may be of 16 bits.
        weights = {name: copy.to(model.get_parameter(name).dtype) for name, copy in self.named().items()}
        with torch.no_grad(), set_mode(model, training=False), swap_weights(model, weights):
            yield


def list_shared_names(first: Mapping[str, Tensor], second: Mapping[str, Tensor]) -> list[str]:
    """The names of the tensors that are in both mappings with equal shapes, in the order of the first."""
    return [name for name, tensor in first.items() if name in second and second[name].shape == tensor.shape]


class _QuadraticPenalty(torch.autograd.Function):
    """The penalty with its gradient w (p - a) in closed form; `is_offloaded`: anchors on another device."""

    @staticmethod
    def forward(
        ctx: Any, is_offloaded: bool, anchors: list[Tensor], weights: list[Tensor] | None, *parameters: Tensor
    ) -> Tensor:
        local_parameters = [to_local(parameter) for parameter in parameters]
        local_anchors = [to_local(anchor) for anchor in anchors]
        local_weights = None if weights is None else [to_local(weight) for weight in weights]
        if is_offloaded:
            terms, scaled = penalize_one_by_one(local_parameters, local_anchors, local_weights)
        else:
            terms, scaled = penalize_at_once(local_parameters, local_anchors, local_weights)
        ctx.gradients = shard_rows(scaled, parameters)
        return sum_over_processes(terms, parameters) / 2

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        gradients = ctx.gradients
        del ctx.gradients  # scaled in place: valid for one backward pass
        local_gradients = [to_local(parameter_gradient) for parameter_gradient in gradients]
        torch._foreach_mul_(local_gradients, gradient)
        return None, None, None, *gradients


def penalize_at_once(
    parameters: list[Tensor], anchors: list[Tensor], weights: list[Tensor] | None
) -> tuple[list[Tensor], list[Tensor]]:
    """For each parameter the term sum_i w_i (p_i - a_i)^2, a scalar, and w (p - a)."""
    differences = torch._foreach_sub(parameters, anchors)
    scaled = list(differences if weights is None else torch._foreach_mul(differences, weights))
    terms = []
    for difference, product in zip(differences, scaled, strict=True):
        terms.append(torch.dot(difference.flatten(), product.flatten()))
    return terms, scaled


def penalize_one_by_one(
    parameters: list[Tensor], anchors: list[Tensor], weights: list[Tensor] | None
) -> tuple[list[Tensor], list[Tensor]]:
    """For each parameter the term sum_i w_i (p_i - a_i)^2, a scalar, and w (p - a); the anchors and weights
    are on another device, from which one at a time is copied."""
    terms = []
    scaled = []
    for index, (parameter, anchor) in enumerate(zip(parameters, anchors, strict=True)):
        difference = parameter - anchor.to(parameter.device)
        product = difference
        if weights is not None:
            product = difference * weights[index].to(parameter.device)
        scaled.append(product)
        terms.append(torch.dot(difference.flatten(), product.flatten()))
    return terms, scaled


def quadratic_penalty(
    model: nn.Module,
    anchors: Mapping[str, Tensor],
    weights: Mapping[str, Tensor] | None = None,
    *,
    is_offloaded: bool = False,
) -> Tensor:
    """1/2 sum_i w_i (p_i - a_i)^2, a scalar, over the trained parameters p that have an anchor a and a weight
    w by name, w = 1 without weights; for one backward pass. `is_offloaded`: anchors and weights are on
    another device than the model."""
    trained = {name: weight for name, weight in named_weights(model).items() if weight.requires_grad}
    penalized = anchors
    if weights is not None:
        penalized = {name: anchors[name] for name in list_shared_names(anchors, weights)}
    names = list_shared_names(trained, penalized)
    return _QuadraticPenalty.apply(
        is_offloaded,
        [anchors[name] for name in names],
        None if weights is None else [weights[name] for name in names],
        *[trained[name] for name in names],
    )


@contextmanager
def swap_weights(model: nn.Module, weights: Mapping[str, Tensor]) -> Iterator[None]:
    """Inside the context the model has other weights, by the names of its parameters, also where these are
    tied. Gradients go to the other weights; in a sharded model they go nowhere. Raises AttributeError for an
    unknown name."""
    reshard(model)
    parameters = {name: model.get_parameter(name) for name in weights}
    sharded_weights = {name: weights[name] for name in weights if is_sharded(parameters[name])}
    replacements: dict[int, Tensor] = {}  # by the id of the parameter, whatever names it has
    for name, parameter in parameters.items():
        if name not in sharded_weights:
            replacements[id(parameter)] = weights[name].to(parameter.device)

    slots = []  # (module, attribute, its parameter), several for a tied parameter
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            if id(parameter) in replacements:
                slots.append((module, name, parameter))
    previous_rows = overwrite_rows(model, sharded_weights)
    try:
        for module, name, parameter in slots:
            # as torch.func.functional_call does
            module._parameters[name] = cast(nn.Parameter, replacements[id(parameter)])
        yield
    finally:
        for module, name, parameter in slots:
            module._parameters[name] = parameter
        overwrite_rows(model, previous_rows)


@torch.no_grad()
def overwrite_rows(model: nn.Module, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Overwrites the local rows of sharded parameters, by name; returns a copy of the previous ones."""
    if not weights:
        return {}
    parameters = named_weights(model)
    previous = {name: parameters[name].detach().clone() for name in weights}
    for name, weight in weights.items():
        parameter = parameters[name]
        to_local(parameter).copy_(to_local(shard_like(weight, parameter)))
    return previous


def find_frozen(model: PreTrainedModel, freeze: Freeze) -> list[nn.Parameter]:
    """The parameters that no method trains, as the options say: embeddings, the first blocks, both with their
    adapters, and all that no entry of `trainable` finds (with `biases`, BitFit; Ben Zaken et al., ACL 2022).
    Raises ValueError for more blocks than there are, for a model without known blocks, and for an entry of
    `trainable` that finds nothing."""
    frozen: list[nn.Parameter] = []
    if freeze.embeddings or freeze.layers:
        key = "freeze.layers" if freeze.layers else "freeze.embeddings"
        allowed = "freeze.layers=0 freeze.embeddings=false; trainable=… finds parameters by their names"
        blocks = list_needed_blocks(model, key=key, value=freeze.layers or True, allowed=allowed)
        if freeze.layers > len(blocks):
            raise InvalidOptionError(
                "freeze.layers", freeze.layers, allowed=f"0 to {len(blocks)}, all blocks"
            )
        for block in blocks[: freeze.layers]:
            frozen += block.parameters()
        if freeze.embeddings:
            frozen += list_parameters_within(model, find_outer_embeddings(model, blocks))
    if freeze.trainable is not None:
        trained = find_all_trainable(model, freeze.trainable)
        frozen += [parameter for parameter in model.parameters() if parameter not in trained]
    return list(dict.fromkeys(frozen))


def find_outer_embeddings(model: nn.Module, blocks: Sequence[nn.Module]) -> list[nn.Embedding]:
    """The embeddings of tokens, positions and types: those outside of the blocks."""
    block_modules = set[nn.Module]()
    for block in blocks:
        block_modules.update(block.modules())
    tables = [module for module in model.modules() if isinstance(module, nn.Embedding)]
    return [table for table in tables if table not in block_modules]


def list_parameters_within(model: nn.Module, layers: Sequence[nn.Module]) -> list[nn.Parameter]:
    """The parameters of layers, and of the adapters around them."""
    names = {module: name for name, module in model.named_modules()}
    parameters: dict[nn.Parameter, None] = {}
    for layer in layers:
        outer = model.get_submodule(names[layer].removesuffix(WRAPPED))
        parameters.update(dict.fromkeys(outer.parameters()))
    return list(parameters)


def find_all_trainable(model: nn.Module, trainable: str | Sequence[str]) -> set[nn.Parameter]:
    """The parameters of one or several entries; raises ValueError for an entry that finds nothing."""
    trained = set[nn.Parameter]()
    for entry in list_trainable_entries(trainable):
        parameters = find_trainable(model, entry)
        if not parameters:
            names = ", ".join([name for name, _ in model.named_parameters()][:6])
            raise InvalidOptionError(
                "trainable",
                entry,
                allowed=f"norms, biases, attention, or an expression that finds some of {names} …",
            )
        trained.update(parameters)
    return trained


def list_trainable_entries(trainable: str | Sequence[str] | None) -> list[str]:
    """The entries of the option `trainable`, which may be a single one; none for null."""
    if trainable is None:
        return []
    return [trainable] if isinstance(trainable, str) else list(trainable)


def find_trainable(model: nn.Module, entry: str) -> list[nn.Parameter]:
    """The parameters of all norms, biases or `attention` layers, or those that an expression finds."""
    parameters: list[nn.Parameter] = []
    if entry == "norms":
        for module in model.modules():
            if type(module).__name__.endswith("Norm"):
                parameters += module.parameters(recurse=False)
    elif entry == "biases":
        for name, parameter in model.named_parameters():
            if name.rpartition(".")[2] == "bias":
                parameters.append(parameter)
    elif entry == "attention":
        for name, module in model.named_modules():
            if IN_ATTENTION.search(name) and isinstance(module, nn.Linear | Conv1D):
                parameters += module.parameters()
    else:
        for name, parameter in model.named_parameters():
            if re.search(entry, name):
                parameters.append(parameter)
    return parameters


@torch.no_grad()
def measure_movement(base: PreTrainedModel, folder: Path) -> dict[str, list[float]]:
    """[||w - w0|| / ||w0||, share of the numbers that changed] by kind of weights and of "all", where w0 are
    the weights of the base and w those in the safetensors of a folder. A kind with a tensor that the files
    lack, or have in another shape, is left out; "all" is there if no kind is left out."""
    # By kind: squared lengths of w - w0 and w0, the count of numbers that changed, and that of all numbers.
    sums: dict[str, Tensor] = defaultdict(lambda: torch.zeros(4, dtype=torch.float64))
    incomplete_kinds = set[str]()
    kinds = name_kinds(base)
    quantized = {id(layer.weight): layer for layer in find_quantized_layers(base).values()}
    with ExitStack() as stack:
        open_files = {}  # by the name of a tensor, the open file that holds it
        for path in sorted(folder.glob("*.safetensors")):
            file = stack.enter_context(open_tensors(path))
            open_files.update(dict.fromkeys(file.keys(), file))
        for name, parameter in base.named_parameters():
            layer = quantized.get(id(parameter))
            weight = parameter.detach() if layer is None else layer.plain_weight(torch.float32)
            old = weight.cpu().float()
            new = read_exported(base, name, old, open_files)
            if new is None:
                incomplete_kinds.add(kinds[name])
                continue
            squared_norm = float(torch.linalg.vector_norm(old)) ** 2
            num_changed = int(torch.count_nonzero(new != old))
            squared_move = float(torch.linalg.vector_norm(new.sub_(old))) ** 2
            sums[kinds[name]] += torch.tensor(
                [squared_move, squared_norm, num_changed, old.numel()], dtype=torch.float64
            )

    # A sum over all kinds would be of fewer weights than it says where one is incomplete.
    totals = {kind: values.tolist() for kind, values in sums.items() if kind not in incomplete_kinds}
    if totals and not incomplete_kinds:
        totals["all"] = torch.stack(list(sums.values())).sum(0).tolist()
    movement = {}
    for kind, (squared_move, squared_norm, num_changed, count) in totals.items():
        relative = (squared_move / squared_norm) ** 0.5 if squared_norm else 0.0
        movement[kind] = [relative, num_changed / count]
    return movement


def name_kinds(model: PreTrainedModel) -> dict[str, str]:
    """The kind of each parameter as reports call it, by the name of the parameter."""
    block_ids = set[int]()
    with suppress(ValueError):  # of a model without known blocks
        for _, block in find_blocks(model):
            block_ids.update(id(parameter) for parameter in block.parameters())
    table_ids = set[int]()
    for module in model.modules():
        if isinstance(module, nn.Embedding):
            table_ids.update(id(parameter) for parameter in module.parameters())

    kinds = {}
    for name, parameter in model.named_parameters():
        if parameter.ndim == 1:
            kinds[name] = "norms and biases"
        elif id(parameter) in block_ids:
            kinds[name] = "attention" if IN_ATTENTION.search(name) else "other maps of blocks"
        elif id(parameter) in table_ids:
            kinds[name] = "embeddings"
        else:
            kinds[name] = "head and the rest"
    return kinds


def read_exported(
    base: PreTrainedModel, name: str, weight: Tensor, open_files: Mapping[str, Any]
) -> Tensor | None:
    """A copy of the exported value, in float32, of a base model's weight; None where the files lack it, or
    have it in another shape. `open_files`: the open safetensors file of each tensor, by tensor name."""
    # In files a parameter may have another name. One that is stored as several tensors, as fused experts are,
    # has the shape of none of them.
    stored_names = list(revert_weight_conversion(base, {name: weight}))
    for stored_name in stored_names:
        if stored_name in open_files:
            tensor = open_files[stored_name].get_tensor(stored_name)
            if tensor.shape == weight.shape:
                return cast(Tensor, tensor.float())
    return None
