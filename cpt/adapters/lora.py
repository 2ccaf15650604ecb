"""LoRA (Hu et al., ICLR 2022) and other tuners of peft on an unmodified Hugging Face model.

    h = W x + alpha / r B A x,    A [r, d_in] uniform as nn.Linear draws it, B [d_out, r] = 0, W frozen

The newest adapter (A, B) of each layer is peft's `default`, which alone is trained. Those of earlier domains
are merged into W, or kept along the rank of a frozen adapter `earlier`: sum_k B_k A_k = [B_1 … B_t] [A_1; …;
A_t]. Files are written here in peft's format, as PeftModel can not wrap a model that has its layers
already."""

import json
import re
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast
from urllib.parse import quote

import torch
from peft import LoraConfig, PeftType, get_peft_model_state_dict, inject_adapter_in_model
from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING, PEFT_TYPE_TO_TUNER_MAPPING
from peft.tuners.lora import LoraLayer, LoraModel
from peft.tuners.lora.dora import DoraLinearLayer
from peft.tuners.lora.layer import Linear, ParamWrapper
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.other import TrainableTokensWrapper
from peft.utils.transformers_weight_conversion import convert_peft_config_for_transformers
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from cpt.adapters.domain_store import Scope
from cpt.adapters.export import copy_storage
from cpt.adapters.plain_model import copy_without_tuners, find_tuner_layers, save_without_tuners, untie
from cpt.adapters.saved_modules import find_saved_tensors
from cpt.core.distributed import shard_like
from cpt.core.errors import find_reason
from cpt.core.exceptions import InvalidOptionError, format_value
from cpt.core.schema import describe_unknown_name
from cpt.models.forward import find_token_side
from cpt.models.narrow_layers import widen
from cpt.models.quantization import count_stored
from cpt.models.units import Projection, find_expert_parameters, find_projections, find_sublayers

NEWEST = "default"  # names of adapters
EARLIER = "earlier"
Targets = str | Sequence[str]
LoraFactors = tuple[nn.Parameter, nn.Parameter]  # A [r, d_in] and B [d_out, r]
# Linear layers of Mamba's mixers. Its fused kernels take their weights, so that the layers, and adapters in
# them, are not called: out_proj in transformers' Mamba 2 (Falcon H1, Bamba, Granite), all three in Mamba 1.
KERNEL_LAYERS = ("out_proj", "x_proj", "dt_proj")
STATE_SPACE_PARAMETERS = ("A_log", "D")  # by which a mixer of Mamba is known


class FusedLoraLinear(Linear):
    """peft's linear layer with y = (W x + b) + alpha / r B (A x) computed by one addmm, which at rank 8 is
    faster than a product, a scaling and a sum. In 32 bits the last digits differ."""

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        # What peft adds to the plain formula, it computes itself.
        if args or kwargs or self.disable_adapters or self.merged or self.lora_variant:
            return super().forward(x, *args, **kwargs)
        result = self.base_layer(x)
        for name in self.active_adapters:
            if name not in self.lora_A:
                continue
            a = cast(nn.Linear, self.lora_A[name])
            b = cast(nn.Linear, self.lora_B[name])
            scale = self.scaling[name]
            ranks = a(self.lora_dropout[name](self._cast_input_dtype(x, a.weight.dtype)))  # A x, [..., r]
            if ranks.dtype != result.dtype:  # adapters in 32 bits on a layer in 16
                result = (result + b(ranks) * scale).to(result.dtype)
            else:
                flat = torch.addmm(result.flatten(0, -2), ranks.flatten(0, -2), b.weight.T, alpha=scale)
                result = flat.view(result.shape)
        return result


class NamedLoraModel(LoraModel):
    """peft's LoRA on the layers that a configuration names.

    In mixtures of experts, peft takes gate_proj, up_proj and down_proj for the names that experts had in
    transformers 4, and adapts the experts' parameters. Dense and shared feed-forward networks, whose layers
    have these names, it leaves out (huggingface/peft, issue 3711)."""

    def __init__(self, model: nn.Module, config: LoraConfig, adapter_name: str) -> None:
        self.layer_names = config.target_modules
        config.target_modules = []
        super().__init__(model, config, adapter_name)

    def _prepare_adapter_config(self, peft_config: LoraConfig, model_config: Any) -> LoraConfig:
        # peft calls this when it has replaced the names of experts, and before it looks for layers.
        peft_config.target_modules = self.layer_names
        return peft_config


def attach_lora(
    model: PreTrainedModel,
    *,
    r: int,
    alpha: float,
    dropout: float,
    targets: Targets,
    embeddings: bool,
    parameters: Targets = "none",
    use_dora: bool = False,
    initialization: bool | str = True,
) -> Scope:
    """Adds an adapter to each linear layer of the targets (`find_targets`), to each expert in the
    `parameters` (`find_target_parameters`), and to the `embeddings`: a head that is tied to them gets a
    frozen one of its own. Raises ValueError for embeddings of an encoder-decoder.

    With `use_dora` layers are DoRA's (Liu et al., ICML 2024), h = m (W + alpha / r B A) x / ||W + alpha / r
    B A|| with a norm for each output. An `initialization` of pissa (Meng et al., NeurIPS 2024) begins with
    the r largest singular values of W in alpha / r B A, and leaves the rest of W frozen."""
    if embeddings and model.config.is_encoder_decoder:
        raise InvalidOptionError(
            "method.embeddings",
            True,
            reason=f"encoder and decoder of a {model.config.model_type} look tokens up apart",
            allowed="false",
        )
    # Found before adapters are there, which would be found as well.
    layers = find_targets(model, targets)
    segments = find_segments(model)
    adapted_names = list(layers)
    if embeddings:
        adapted_names.append(separate_embedding(model))

    if str(initialization).startswith("pissa"):  # takes its adapters out of the weights
        widen(model, [cast(nn.Parameter, module.weight) for module in layers.values()])
    config = LoraConfig(
        r=r,
        lora_alpha=cast(int, alpha),  # peft computes with fractions as well
        lora_dropout=dropout,
        target_modules=adapted_names,
        target_parameters=find_target_parameters(model, parameters) or None,
        use_dora=use_dora,
        # Without storage there are no singular values.
        init_lora_weights=cast(Any, True if model.device.type == "meta" else initialization),
        fan_in_fan_out=any(isinstance(module, Conv1D) for module in layers.values()),
    )
    NamedLoraModel(model, config, NEWEST)
    for layer in find_lora_layers(model).values():
        prepare_layer(layer)

    names = tuple(name for name, parameter in model.named_parameters() if parameter.requires_grad)
    projections: list[Projection] = []
    if use_dora:  # which runs A and B to compute norms, too: no layers for masks
        return Scope(names, ())
    for name in layers:
        # A head's own layers see scored positions only: no masks.
        if find_token_side(model, name) is not None:
            projections += list_factor_projections(name, model.get_submodule(name), segments.get(name))
    return Scope(names, tuple(projections))


def find_segments(model: PreTrainedModel) -> dict[str, tuple[Tensor, ...]]:
    """The output features of each projection that are ranked together; empty for blocks of unknown form."""
    try:
        return {projection.name: projection.segments for projection in find_projections(model)}
    except ValueError:
        return {}


def separate_embedding(model: PreTrainedModel) -> str:
    """Unties a head from the input embedding; returns the name of the embedding."""
    embedding = model.get_input_embeddings()
    head = model.get_output_embeddings()
    if head is not None and head.weight is embedding.weight:
        untie(model)
    return next(name for name, module in model.named_modules() if module is embedding)


def prepare_layer(layer: Linear) -> None:
    """Gives a new layer of peft the mode (train or eval) of its base layer, and a faster class and layout."""
    layer.train(layer.get_base_layer().training)
    if type(layer) is Linear:
        layer.__class__ = FusedLoraLinear  # its modules and their names stay
    if NEWEST in layer.lora_B:
        # Column after column: on a CPU, B's gradient takes an eighth of the time.
        _, b = get_factors(layer)
        b.data = b.data.T.contiguous().T


def list_factor_projections(
    name: str, layer: nn.Module, segments: tuple[Tensor, ...] | None
) -> tuple[Projection, Projection]:
    """A and B of the newest adapter of a layer as projections. The outputs of B are those of the layer, by
    which they are ranked, within the segments of the base layer if it has some."""
    adapted = cast(Linear, layer)
    a = cast(nn.Linear, adapted.lora_A[NEWEST])
    b = cast(nn.Linear, adapted.lora_B[NEWEST])
    # Without segments all output features are ranked together.
    segments_of_b = segments or (torch.arange(b.out_features),)
    return (
        Projection(f"{name}.lora_A", module=a, axis=0, segments=(torch.arange(a.out_features),)),
        Projection(f"{name}.lora_B", module=b, axis=0, segments=segments_of_b, measured=layer),
    )


@dataclass(frozen=True)
class AdapterReach:
    """The weights of a model, without embeddings and head, that tuners of peft adapt."""

    adapted: int
    total: int
    unreached_experts: tuple[str, ...]  # parameters of three axes: an expert, its outputs, its inputs


def find_adapter_reach(model: PreTrainedModel) -> AdapterReach | None:
    """What the tuners in a model adapt; None of a model without any. Experts are one parameter in
    transformers 5, and no layer that `all-linear` finds."""
    # The weights that have a tuner, and the tuners' own, which are not part of the model.
    adapted_ids = set[int]()
    tuner_ids = set[int]()
    for layer in model.modules():
        if not isinstance(layer, BaseTunerLayer):
            continue
        base = layer.get_base_layer()
        weight = getattr(base, getattr(layer, "parameter_name", "weight"), None)
        if weight is not None:
            adapted_ids.add(id(weight))
        base_ids = {id(parameter) for parameter in base.parameters()}
        layer_ids = {id(parameter) for parameter in cast(nn.Module, layer).parameters()}
        tuner_ids.update(layer_ids - base_ids)
    if not adapted_ids:
        return None

    num_quantized = count_stored(model)

    # Not counted: embeddings and head. Convolutions may have three axes too, and are not experts.
    head = model.get_output_embeddings()
    outside_ids = set[int]()
    if head is not None:
        outside_ids.update(id(parameter) for parameter in head.parameters())
    for module in model.modules():
        if isinstance(module, nn.Embedding):
            outside_ids.update(id(parameter) for parameter in module.parameters())

    adapted = 0
    total = 0
    expert_parameters = find_expert_parameters(model)
    unreached = []
    for name, parameter in model.named_parameters():
        if id(parameter) in outside_ids or id(parameter) in tuner_ids:
            continue
        count = num_quantized.get(id(parameter), parameter.numel())
        total += count
        if id(parameter) in adapted_ids:
            adapted += count
        elif name in expert_parameters:
            unreached.append(name.replace(".base_layer", ""))
    return AdapterReach(adapted, total, tuple(unreached))


def find_targets(model: PreTrainedModel, targets: Targets) -> dict[str, nn.Module]:
    """The linear layers meant by `all-linear`, a regular expression for whole names, or a list of names or
    their ends, without the language-model head, by name. `all-linear` leaves out those of
    `find_kernel_layers`. Raises ValueError if there are none, or for one of those."""
    head = model.get_output_embeddings()
    linear: dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear | Conv1D) and module is not head:
            linear[name] = module

    kernel_layers = find_kernel_layers(model)
    if targets == "all-linear":
        return {name: module for name, module in linear.items() if name not in kernel_layers}
    if isinstance(targets, str):
        matching = {name: module for name, module in linear.items() if re.fullmatch(targets, name)}
    else:
        ends = tuple(f".{end}" for end in targets)
        matching = {name: module for name, module in linear.items() if f".{name}".endswith(ends)}
    if not matching:
        raise InvalidOptionError(
            "method.target_modules",
            targets,
            allowed=f"all-linear, a regular expression or a list that finds some of {list(linear)[:6]} …",
        )
    for name in kernel_layers:
        if name in matching:
            raise InvalidOptionError(
                "method.target_modules",
                targets,
                reason=f"{name} is not called, as a kernel of Mamba reads its weight",
                allowed="layers without those, as all-linear",
            )
    return matching


def find_kernel_layers(model: nn.Module) -> list[str]:
    """The names of the linear layers whose weights the fused kernels of Mamba read."""
    names = []
    for name, module in model.named_modules():
        parameter_names = [key for key, _ in module.named_parameters(recurse=False)]
        if not set(STATE_SPACE_PARAMETERS) <= set(parameter_names):
            continue
        for child_name, child in module.named_children():
            if child_name in KERNEL_LAYERS and isinstance(child, nn.Linear):
                names.append(f"{name}.{child_name}")
    return names


def find_target_parameters(model: PreTrainedModel, targets: Targets) -> list[str]:
    """The names of the parameters of experts meant by `auto` (all), `none`, or a list of names or their ends;
    raises ValueError for a list of which one finds none."""
    names = list(find_expert_parameters(model))
    if targets == "none":
        return []
    if targets == "auto":
        return names
    matching: list[str] = []
    for target in targets:
        of_target = [name for name in names if f".{name}".endswith(f".{target}")]
        if not of_target:
            allowed_names = f"none, or a list of names or ends of names like {', '.join(names[:2])}"
            raise InvalidOptionError(
                "method.target_parameters",
                targets,
                reason=f"{target} is no parameter of experts of this {model.config.model_type}",
                allowed=allowed_names if names else "none",
            )
        matching += of_target
    return list(dict.fromkeys(matching))


def find_lora_layers(model: nn.Module) -> dict[str, Linear]:
    """The layers with adapters, by name: linear ones, and embeddings, which are much alike."""
    layers = {}
    for name, module in model.named_modules():
        if isinstance(module, LoraLayer):
            layers[name] = cast(Linear, module)
    return layers


def get_factors(layer: LoraLayer, adapter: str = NEWEST) -> LoraFactors:
    if adapter in layer.lora_A:
        return cast(LoraFactors, (layer.lora_A[adapter].weight, layer.lora_B[adapter].weight))
    return layer.lora_embedding_A[adapter], layer.lora_embedding_B[adapter]


def count_experts(layer: LoraLayer) -> int:
    """The experts E that an adapter is for; 1 of a matrix. Its A is [E r, d_in], expert after expert, its B
    [d_out, r E], of each rank the experts in turn."""
    return layer.num_experts if isinstance(layer, ParamWrapper) else 1


def map_factors(layer: LoraLayer, adapter: str = NEWEST) -> list[tuple[Tensor, Tensor]]:
    """A [r, d_in] and B [d_out, r] of each matrix that an adapter is for: one, or that of each expert."""
    a, b = get_factors(layer, adapter)
    experts = count_experts(layer)
    if experts == 1:
        return [(a, b)]
    by_expert = b.unflatten(1, (-1, experts)).unbind(-1)
    return list(zip(a.unflatten(0, (experts, -1)).unbind(), by_expert, strict=True))


def get_adapted_weight(layer: LoraLayer) -> nn.Parameter:
    """The frozen weight that an adapter is for."""
    name = layer.parameter_name if isinstance(layer, ParamWrapper) else "weight"
    return cast(nn.Parameter, getattr(layer.get_base_layer(), name))


def has_dora(layer: LoraLayer) -> bool:
    return NEWEST in layer.lora_magnitude_vector


def has_earlier(layer: LoraLayer) -> bool:
    return EARLIER in layer.lora_A or EARLIER in layer.lora_embedding_A


@torch.no_grad()
def reset_newest(model: nn.Module, seed: int) -> None:
    """Draws the newest adapters, with product 0, from the global generator, which it sets."""
    # peft takes no generator.
    torch.manual_seed(seed)
    initialization = cast(Any, model).peft_config[NEWEST].init_lora_weights
    for layer in find_lora_layers(model).values():
        layer.reset_lora_parameters(NEWEST, initialization)
    reset_magnitudes(model)


@torch.no_grad()
def reset_magnitudes(model: nn.Module) -> None:
    """Makes the norms of DoRA those of the weights with their adapters, so that they change nothing."""
    for layer in find_lora_layers(model).values():
        if not has_dora(layer):
            continue
        magnitude = cast(DoraLinearLayer, layer.lora_magnitude_vector[NEWEST])
        a, b = get_factors(layer)
        norms = magnitude.get_weight_norm(layer.get_base_layer().weight, b @ a, layer.scaling[NEWEST])
        magnitude.weight.copy_(norms)


@torch.no_grad()
def merge_newest(model: nn.Module) -> None:
    """Adds the newest adapters to the frozen weights; they themselves stay as they are."""
    for layer in find_lora_layers(model).values():
        weight = get_adapted_weight(layer)
        if has_dora(layer):
            weight.copy_(layer.lora_variant[NEWEST].merge_safe(layer, NEWEST, weight.detach().clone()))
        else:
            weight.add_(shard_like(layer.get_delta_weight(NEWEST).to(weight.dtype), weight))


def join_adapters(layer: LoraLayer) -> tuple[Tensor, Tensor]:
    """All adapters of a layer along the rank: A [E t r, d_in], B [d_out, t r E], as `count_experts` says."""
    adapters = [EARLIER, NEWEST] if has_earlier(layer) else [NEWEST]
    factors = [get_factors(layer, adapter) for adapter in adapters]
    experts = count_experts(layer)
    joined_a = torch.cat([a.unflatten(0, (experts, -1)) for a, _ in factors], dim=1)
    joined_b = torch.cat([b for _, b in factors], dim=1)
    return joined_a.flatten(0, 1), joined_b


@torch.no_grad()
def set_earlier(layer: LoraLayer, config: LoraConfig, a: Tensor, b: Tensor) -> None:
    """Makes A and B the earlier adapters of a layer, without dropout, as of merged ones."""
    newest_a, _ = get_factors(layer)
    is_trained = newest_a.requires_grad
    without_dropout = replace(config, lora_dropout=0.0, init_lora_weights=False)
    layer.update_layer(
        EARLIER, len(a) // count_experts(layer), lora_alpha=config.lora_alpha, config=without_dropout
    )
    # peft divides alpha by the rank of all earlier adapters, where each has alpha / r.
    layer.scaling[EARLIER] = layer.scaling[NEWEST]

    # Activating adapters makes both of them trainable.
    layer.set_adapter([NEWEST, EARLIER])
    for parameter in get_factors(layer):
        parameter.requires_grad_(is_trained)
    earlier_a, earlier_b = get_factors(layer, EARLIER)
    earlier_a.requires_grad_(False).copy_(a)
    earlier_b.requires_grad_(False).copy_(b)


def begin_adapter(model: PreTrainedModel, *, storage: str, seed: int) -> None:
    """Starts a new adapter; the last is merged into the frozen weights (`merged`), or kept (`separate`)."""
    if storage == "merged":
        merge_newest(model)
    else:
        for layer in find_lora_layers(model).values():
            joined_a, joined_b = join_adapters(layer)
            set_earlier(layer, model.peft_config[NEWEST], joined_a, joined_b)
    # At the end: the new adapter starts with product 0, and what the last has learned is elsewhere.
    reset_newest(model, seed)


def resize_on_load(model: PreTrainedModel) -> None:
    """Lets the model load a state_dict with more earlier adapters than it has, or fewer."""

    def replace_earlier(model: PreTrainedModel, state: Mapping[str, Tensor], prefix: str, *args: Any) -> None:
        """The hook before a state_dict is loaded: gives each layer the earlier adapters that the state has
        for it, and takes them from a layer for which it has none. torch loads the other parameters."""
        for name, layer in find_lora_layers(model).items():
            factors = find_earlier(state, f"{prefix}{name}.")
            if factors is not None:
                a, b = factors
                set_earlier(layer, model.peft_config[NEWEST], a, b)
            elif has_earlier(layer):
                layer.delete_adapter(EARLIER)

    model.register_load_state_dict_pre_hook(replace_earlier)


def find_earlier(state: Mapping[str, Tensor], prefix: str) -> tuple[Tensor, Tensor] | None:
    """A and B of the earlier adapters of a layer in a state_dict; None without them."""
    names_of_linear = (f"{prefix}lora_A.{EARLIER}.weight", f"{prefix}lora_B.{EARLIER}.weight")
    names_of_embedding = (f"{prefix}lora_embedding_A.{EARLIER}", f"{prefix}lora_embedding_B.{EARLIER}")
    for name_of_a, name_of_b in (names_of_linear, names_of_embedding):
        if name_of_a in state:
            return state[name_of_a], state[name_of_b]
    return None


def join_all_adapters(model: PreTrainedModel) -> dict[str, Tensor]:
    """All adapters as one, by the names of the newest, with the norms of DoRA."""
    # By the id of the newest parameter: the layers' names are not those of parameters.
    joined: dict[int, Tensor] = {}
    for layer in find_lora_layers(model).values():
        newest_a, newest_b = get_factors(layer)
        joined_a, joined_b = join_adapters(layer)
        joined[id(newest_a)] = joined_a
        joined[id(newest_b)] = joined_b
        if has_dora(layer):
            magnitude = cast(DoraLinearLayer, layer.lora_magnitude_vector[NEWEST]).weight
            joined[id(magnitude)] = magnitude

    by_name = {}
    for name, parameter in model.named_parameters():
        if id(parameter) in joined:
            by_name[name] = joined[id(parameter)]
    return by_name


def subtract_start(
    model: PreTrainedModel, weights: Mapping[str, Tensor], start: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Adapters that add to the base what `weights` add to weights from which their `start` was taken (PiSSA):
    B A - B_0 A_0 = [B, -B_0] [A; A_0]. All are by the names of parameters."""
    names = {id(model.get_parameter(name)): name for name in weights}
    differences = dict(weights)
    for layer in find_lora_layers(model).values():
        a, b = get_factors(layer)
        name_of_a = names[id(a)]
        name_of_b = names[id(b)]
        differences[name_of_a] = torch.cat([weights[name_of_a], start[name_of_a]])
        differences[name_of_b] = torch.cat([weights[name_of_b], -start[name_of_b]], dim=1)
    return differences


def export_adapters(
    folder: Path,
    model: PreTrainedModel,
    parts: Mapping[str, Mapping[str, Tensor]],
    *,
    start: Mapping[str, Tensor],
    saved: Sequence[str],
) -> str:
    """Writes the base, and each domain's adapter in peft's format; returns the expression that loads both.

    `start` are the weights at construction, of parameters that make another model than the base if they are
    left out: those of the modules that are trained fully, by the names in `saved`, and PiSSA's adapters."""
    has_pissa = is_pissa(model.peft_config[NEWEST])
    loading = save_without_tuners(folder, model, merged=has_pissa, weights=start)

    saved_modules = find_saved_tensors(model, saved)
    for name, weights in parts.items():
        adapter_folder = folder / "adapters" / quote(name, safe=" ")
        adapter_folder.mkdir(parents=True, exist_ok=True)
        if has_pissa:
            weights = subtract_start(model, weights, start)
        state = get_peft_model_state_dict(
            model, state_dict=dict(weights), adapter_name=NEWEST, save_embedding_layers=False
        )
        exported = {f"base_model.model.{key}": copy_storage(value) for key, value in state.items()}
        saved_weights = {id(model.get_parameter(key)): weights[key] for key in saved}
        for module_name, tensor_names in saved_modules.items():
            for tensor_name in tensor_names:
                key = f"{module_name}.{tensor_name}"
                value = saved_weights[id(model.get_parameter(key))]
                exported[f"base_model.model.{key}"] = copy_storage(value)
        save_file(exported, adapter_folder / "adapter_model.safetensors")

        # The rank of this part: joined adapters have more than the model's newest.
        name_of_a = next(key for key in weights if "_A." in key)
        layer = model.get_submodule(name_of_a.partition(".lora_")[0])
        rank = len(weights[name_of_a]) // count_experts(cast(LoraLayer, layer))
        config = export_config(model, rank, base_folder=folder)
        config.modules_to_save = list(saved_modules) or None
        config.save_pretrained(str(adapter_folder))
    return f"peft.PeftModel.from_pretrained({loading}, {json.dumps(str(adapter_folder))})"


def is_pissa(config: LoraConfig) -> bool:
    return str(config.init_lora_weights).startswith("pissa")


def export_config(model: PreTrainedModel, rank: int, *, base_folder: Path) -> LoraConfig:
    """The configuration of exported adapters, whose rank is a multiple of the model's where several adapters
    are joined."""
    config = model.peft_config[NEWEST]
    # alpha grows with the rank, as alpha / r is what the adapters were trained with
    exported = replace(config, r=rank, lora_alpha=config.lora_alpha * rank / config.r, inference_mode=True)
    if is_pissa(config):
        exported.init_lora_weights = True  # it would take singular values out of the base again
    exported.base_model_name_or_path = str(base_folder.resolve())
    name_misread_layers(exported, model)

    model_class = type(model)
    if model.config.is_encoder_decoder:
        exported.task_type = "SEQ_2_SEQ_LM"
    elif model_class.__name__.endswith(("ForCausalLM", "LMHeadModel")):
        exported.task_type = "CAUSAL_LM"
    else:  # peft has no task for a masked model
        exported.auto_mapping = {
            "base_model_class": model_class.__name__,
            "parent_library": model_class.__module__,
        }
    return cast(LoraConfig, exported)


def find_misread_layers(config: LoraConfig, model: PreTrainedModel) -> list[str]:
    """The layers of a configuration that peft takes for experts (`NamedLoraModel`) when it loads it."""
    misread_names = []
    for name in cast(Sequence[str], config.target_modules):
        probe = LoraConfig(target_modules=[name])
        try:
            convert_peft_config_for_transformers(probe, model, None)
        except ValueError:  # one of gate_proj and up_proj without the other
            misread_names.append(name)
        else:
            if set(probe.target_modules or ()) != {name}:
                misread_names.append(name)
    return misread_names


def name_misread_layers(config: LoraConfig, model: PreTrainedModel) -> None:
    """Names the weights of the layers that peft takes for experts in place of the layers: so it finds them,
    and computes W + alpha / r B A."""
    misread_names = find_misread_layers(config, model)
    if not misread_names:
        return
    config.target_modules = sorted(set(config.target_modules or ()) - set(misread_names))
    weight_names = [f"{name}.weight" for name in misread_names]
    config.target_parameters = sorted({*(config.target_parameters or ()), *weight_names})
    config.lora_dropout = 0.0  # which adapters of parameters have not


def check_loadable(model: PreTrainedModel) -> None:
    """Raises ValueError for adapters that peft could not load from a file: DoRA's of layers that it takes for
    experts, whose parameters have no DoRA."""
    config = model.peft_config[NEWEST]
    misread_names = find_misread_layers(config, model) if config.use_dora else []
    if misread_names:
        raise InvalidOptionError(
            "method.export_format",
            "peft",
            context="with method.use_dora=true",
            reason=f"peft takes {sorted(misread_names)[0]} of a {model.config.model_type} for an expert",
            allowed="merged",
        )


def attach_tuner(
    model: PreTrainedModel, tuner: str, *, targets: Targets, arguments: Mapping[str, Any]
) -> Scope:
    """Adds a tuner of peft to the layers of the targets; `auto` are all linear layers but the head, for
    ln_tuning the norms. Raises ValueError for unknown arguments, for a model that does not go with it, and
    for what could not be merged into a plain model."""
    kind = PeftType("LORA" if tuner == "dora" else tuner.upper())  # DoRA is an option of LoRA
    settings = choose_default_arguments(model, tuner, targets)
    settings.update(arguments)

    # Before peft is called, whose error would name no option of cpt.
    config_class = PEFT_TYPE_TO_CONFIG_MAPPING[kind]
    fields = config_class.__dataclass_fields__
    allowed_names = [name for name in fields if name not in ("peft_type", "task_type")]
    unknown_names = sorted(set(settings) - set(allowed_names))
    if unknown_names:
        raise ValueError(describe_unknown_name(f"method.arguments.{unknown_names[0]}", allowed_names))
    if settings.get("layer_replication"):
        raise ValueError(
            "method.arguments.layer_replication is invalid: replicated layers share the weights that "
            "adapters are merged into. Allowed: null"
        )

    if tuner == "delora" or rewrites_weights(arguments):  # they compute from weights, in their type
        linear_layers = find_targets(model, "all-linear").values()
        widen(model, [cast(nn.Parameter, layer.weight) for layer in linear_layers])

    # Before the tuner is added: the names that an exported model has to have again.
    plain_names = set(model.state_dict())
    kernel_layers = find_kernel_layers(model)
    setting = f"{tuner} with method.arguments={format_value(dict(arguments))}"
    try:
        config = config_class(**settings)
        if kind == PeftType.VERA:  # its layers share what peft does not inject
            PEFT_TYPE_TO_TUNER_MAPPING[kind](model, {NEWEST: config}, NEWEST)
        elif kind == PeftType.LORA and "target_modules" not in arguments:
            NamedLoraModel(model, config, NEWEST)
        else:
            inject_adapter_in_model(config, model, adapter_name=NEWEST)
    except (TypeError, ValueError, NotImplementedError, ImportError) as error:
        raise ValueError(
            f"method.tuner={setting} is invalid for a {model.config.model_type}: {find_reason(error)}"
        ) from error

    names = tuple(name for name, parameter in model.named_parameters() if parameter.requires_grad)
    if not names:
        raise InvalidOptionError(
            "method.tuner", setting, reason="it leaves nothing to train", allowed="inference_mode=false"
        )
    check_kernel_layers(model, kernel_layers, setting)
    check_embeddings(model, setting)
    if model.device.type == "meta":  # before training, where a copy costs nothing
        check_mergeable(model, plain_names, setting)
    return Scope(names=names, projections=())


def rewrites_weights(arguments: Mapping[str, Any]) -> bool:
    """Whether arguments of a tuner have it change the weights that it adapts: the initializations of LoRA by
    a name, like PiSSA, and KaSA."""
    return isinstance(arguments.get("init_lora_weights"), str) or bool(arguments.get("kasa_config"))


def choose_default_arguments(model: PreTrainedModel, tuner: str, targets: Targets) -> dict[str, Any]:
    """The arguments of a tuner's configuration that follow from the model."""
    if targets == "auto" and tuner == "ln_tuning":
        norms = [name for name, module in model.named_modules() if type(module).__name__.endswith("Norm")]
        return {"target_modules": norms}

    layers = find_targets(model, "all-linear" if targets == "auto" else targets)
    settings: dict[str, Any] = {"target_modules": list(layers)}

    # GPT-2's Conv1D has its weight transposed; only these tuners of peft have an option for it.
    has_conv = any(isinstance(module, Conv1D) for module in layers.values())
    if has_conv and tuner in ("dora", "ia3", "vera"):
        settings["fan_in_fan_out"] = True

    if tuner == "dora":
        settings["use_dora"] = True
    if tuner == "fourierft":
        settings["init_weights"] = True  # starts as the base
    if tuner == "ia3":
        # In an FFN it scales the input of the last layer, elsewhere the output.
        feed_forwards = find_sublayers(model, ("neurons",), skips_mixtures=True)
        down = {sublayer.out.name for sublayer in feed_forwards}
        settings["feedforward_modules"] = [name for name in layers if name in down]
    return settings


def check_kernel_layers(model: PreTrainedModel, kernel_layers: Sequence[str], setting: str) -> None:
    """Raises ValueError for tuners in layers that are not called (`find_kernel_layers`); `setting` is the
    tuner with its arguments, for the message."""
    for name in kernel_layers:
        if isinstance(model.get_submodule(name), BaseTunerLayer):
            raise InvalidOptionError(
                "method.tuner",
                setting,
                reason=f"{name} is not called, as a kernel of Mamba reads its weight",
                allowed="arguments.target_modules without it",
            )


def check_embeddings(model: PreTrainedModel, setting: str) -> None:
    """Raises ValueError for tuners of embeddings and heads that compute something else than a plain model;
    `setting` is the tuner with its arguments, for the message."""
    kind = model.config.model_type
    for name in find_tuner_layers(model):
        layer = model.get_submodule(name)
        has_embedding = any(isinstance(part, nn.Embedding) for part in layer.modules())
        if model.config.is_encoder_decoder and has_embedding:
            raise InvalidOptionError(
                "method.tuner",
                setting,
                reason=f"encoder and decoder of a {kind} do not look tokens up in {name} alone",
                allowed="arguments that leave the embeddings as they are",
            )

        is_selective = isinstance(layer, TrainableTokensWrapper)
        if is_selective and getattr(layer.original_module, "bias", None) is not None:
            raise InvalidOptionError(
                "method.tuner",
                setting,
                reason=f"trainable_token_indices drops the bias of {name}",
                allowed="modules_to_save, a head without a bias",
            )


def check_mergeable(model: PreTrainedModel, plain_names: Set[str], setting: str) -> None:
    """Raises ValueError where a model on the meta device without its tuners lacks names of a plain one, or
    cannot be made; `setting` is the tuner with its arguments, for the message."""
    try:
        plain = copy_without_tuners(model)
    except Exception as error:
        if "meta" in str(error).lower():  # an operation that the meta device lacks
            return
        raise InvalidOptionError(
            "method.tuner",
            setting,
            reason=f"it cannot be merged at the export: {find_reason(error).rstrip('.')}",
            allowed="arguments that peft merges into the model's own weights",
        ) from error

    differing_names = sorted(plain_names ^ set(plain.state_dict()))
    if differing_names:
        raise InvalidOptionError(
            "method.tuner",
            setting,
            reason=f"the export would differ in {differing_names[0]}",
            allowed="arguments that peft merges into the model's own weights",
        )
