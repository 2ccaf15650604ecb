"""LoRA (Hu et al., ICLR 2022) on an unmodified Hugging Face model, by the layers of peft.

    h = W x + alpha / r B A x,    A [r, d_in] uniform as nn.Linear draws it, B [d_out, r] = 0, W frozen

The newest pair (A, B) of each map is peft's adapter `default` and the only thing that is trained. Pairs of
earlier domains are added to W, or kept along the rank of a second, frozen adapter `earlier`:
sum_k B_k A_k = [B_1 … B_t] [A_1; …; A_t].

peft's own PeftModel is not used to save: it can not wrap a model that has its layers already. The files are
written in its format, with its state_dict and config. Its tying of adapters is not used either: the tied pair
would be two parameters over one storage, and two storages after a move to a GPU."""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import quote

import torch
from peft import LoraConfig, get_peft_model_state_dict, inject_adapter_in_model
from peft.tuners.lora import LoraLayer
from peft.tuners.lora.layer import Linear
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from cpt.adapters.bank import Scope
from cpt.core.rules import show
from cpt.core.sharding import shard_like
from cpt.models.stacks import tokens_of
from cpt.models.units import Projection, projections

NEWEST, EARLIER = "default", "earlier"
EARLIER_KEYS = [f"lora_{half}.{EARLIER}.weight" for half in "AB"] + [
    f"lora_embedding_{half}.{EARLIER}" for half in "AB"
]


class FusedLoraLinear(Linear):
    """peft's linear layer with its last product added in place: y = (W x + b) + alpha / r B (A x).

    peft makes B (A x) [N, d_out], scales it and adds it, which at rank 8 takes longer than the products.
    addmm does all three. In 32 bits the last digits differ; in 16 bits a sum is rounded once, not thrice."""

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if args or kwargs or self.disable_adapters or self.merged or self.lora_variant:
            return super().forward(x, *args, **kwargs)
        result = self.base_layer(x)
        for name in (each for each in self.active_adapters if each in self.lora_A):
            a, b, scale = self.lora_A[name], self.lora_B[name], self.scaling[name]
            low = a(self.lora_dropout[name](self._cast_input_dtype(x, a.weight.dtype)))
            if low.dtype != result.dtype:  # adapters in 32 bits on a layer in 16
                result = (result + b(low) * scale).to(result.dtype)
            else:
                flat = torch.addmm(result.flatten(0, -2), low.flatten(0, -2), b.weight.T, alpha=scale)
                result = flat.view(result.shape)
        return result


def attach_pairs(
    model: PreTrainedModel,
    *,
    r: int,
    alpha: float,
    dropout: float,
    targets: str | Sequence[str],
    embeddings: bool,
) -> Scope:
    """Puts a pair beside each linear map of the targets: `all-linear`, a regular expression for whole names,
    or a list of names or their ends. The language-model head is none of them. With `embeddings`, the input
    embedding has a pair as well; a head that is tied to it becomes a matrix of its own, which is not trained.

    Raises ValueError for targets that there are not, and for embeddings of a model with a decoder."""
    if embeddings and model.config.is_encoder_decoder:
        raise ValueError(
            f"method.embeddings=true does not go with a {model.config.model_type}, whose encoder and decoder "
            "look tokens up apart; allowed: false"
        )
    maps, segments = find_targets(model, targets), find_fused(model)
    config = LoraConfig(
        r=r,
        lora_alpha=alpha,
        lora_dropout=dropout,
        target_modules=[*maps, *([untied_embedding(model)] if embeddings else [])],
        fan_in_fan_out=any(isinstance(module, Conv1D) for module in maps.values()),
    )
    inject_adapter_in_model(config, model, adapter_name=NEWEST)
    for layer in layers(model).values():
        layer.train(layer.get_base_layer().training)
        if type(layer) is Linear:
            layer.__class__ = FusedLoraLinear  # its modules and their names stay
        if NEWEST in layer.lora_B:
            by_columns(layer.lora_B[NEWEST].weight)
    names = tuple(name for name, parameter in model.named_parameters() if parameter.requires_grad)
    # The head's own maps see the scored positions alone: they have no part in masks.
    inner = [name for name in maps if tokens_of(model, name) is not None]
    return Scope(names, tuple(halves(model, {name: segments.get(name) for name in inner})))


def by_columns(weight: nn.Parameter) -> None:
    """Lays a matrix out column after column in memory: the gradient of B [d_out, r] is then a product with r
    rows, which takes an eighth of the time that one with r columns takes on a CPU."""
    weight.data = weight.data.T.contiguous().T


def find_targets(model: PreTrainedModel, targets: str | Sequence[str]) -> dict[str, nn.Module]:
    """The linear maps that are meant, by name; raises ValueError if there are none."""
    head = model.get_output_embeddings()
    linear = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear | Conv1D) and module is not head
    }
    if targets == "all-linear":
        return linear
    found = {name: module for name, module in linear.items() if meant(name, targets)}
    if not found:
        raise ValueError(
            f"method.targets={show(targets)}; allowed: all-linear, a regular expression or a list that "
            f"finds some of {', '.join(list(linear)[:6])} …"
        )
    return found


def meant(name: str, targets: str | Sequence[str]) -> bool:
    """Whether a map is one of the targets, by the rule of peft."""
    if isinstance(targets, str):
        return re.fullmatch(targets, name) is not None
    return any(name == end or name.endswith(f".{end}") for end in targets)


def find_fused(model: PreTrainedModel) -> dict[str, tuple[Tensor, ...]]:
    """The output features that are ranked together, by name of map; nothing where blocks are not known."""
    try:
        return {each.name: each.segments for each in projections(model)}
    except ValueError:
        return {}


def untied_embedding(model: PreTrainedModel) -> str:
    """The name of the input embedding, whose head has a copy of it from now on if it was tied."""
    table, head = model.get_input_embeddings(), model.get_output_embeddings()
    if head is not None and head.weight is table.weight:
        head.weight = nn.Parameter(table.weight.detach().clone())
        model.config.tie_word_embeddings = False
    return next(name for name, module in model.named_modules() if module is table)


def halves(model: PreTrainedModel, segments: Mapping[str, tuple[Tensor, ...] | None]) -> Iterator[Projection]:
    """A and B of each map: rows of A are ranked by their own output A x, rows of B by the whole layer's."""
    for name, ranked in segments.items():
        layer = model.get_submodule(name)
        a, b = layer.lora_A[NEWEST], layer.lora_B[NEWEST]
        yield Projection(f"{name}.lora_A", a, 0, (torch.arange(a.out_features),))
        yield Projection(f"{name}.lora_B", b, 0, ranked or (torch.arange(b.out_features),), measured=layer)


def layers(model: nn.Module) -> dict[str, LoraLayer]:
    """The layers with pairs, by name."""
    return {name: module for name, module in model.named_modules() if isinstance(module, LoraLayer)}


def pair_of(layer: LoraLayer, adapter: str = NEWEST) -> tuple[nn.Parameter, nn.Parameter]:
    """A [r, d_in] and B [d_out, r] of a layer."""
    if adapter in layer.lora_A:
        return layer.lora_A[adapter].weight, layer.lora_B[adapter].weight
    return layer.lora_embedding_A[adapter], layer.lora_embedding_B[adapter]


def has_earlier(layer: LoraLayer) -> bool:
    return EARLIER in layer.lora_A or EARLIER in layer.lora_embedding_A


@torch.no_grad()
def draw_pair(model: nn.Module, seed: int) -> None:
    """Draws the newest pairs anew, with product 0. Sets the global generator, since peft draws from it and
    all processes must draw the same."""
    torch.manual_seed(seed)
    for layer in layers(model).values():
        layer.reset_lora_parameters(NEWEST, True)


@torch.no_grad()
def merge(model: nn.Module) -> None:
    """Adds the newest pairs to the frozen weights; they themselves stay as they are."""
    for layer in layers(model).values():
        weight = layer.get_base_layer().weight
        weight.add_(shard_like(layer.get_delta_weight(NEWEST).to(weight.dtype), weight))


@torch.no_grad()
def set_aside(model: PreTrainedModel) -> None:
    """Puts copies of the newest pairs behind those of earlier domains, which are frozen."""
    for layer in layers(model).values():
        hold(layer, model.peft_config[NEWEST], *join_pairs(layer))


def join_pairs(layer: LoraLayer) -> tuple[Tensor, Tensor]:
    """All pairs of a layer along the rank: A [t r, d_in], B [d_out, t r]."""
    pairs = [pair_of(layer, EARLIER)] if has_earlier(layer) else []
    a, b = zip(*pairs, pair_of(layer), strict=True)
    return torch.cat(a), torch.cat(b, dim=1)


@torch.no_grad()
def hold(layer: LoraLayer, config: LoraConfig, a: Tensor, b: Tensor) -> None:
    """Makes A and B the earlier pairs of a layer; the newest one is trained or not as before."""
    trained = pair_of(layer)[0].requires_grad
    # Without dropout, which would tell pairs that are kept apart from pairs in W.
    plain = replace(config, lora_dropout=0.0, init_lora_weights=False)
    layer.update_layer(EARLIER, len(a), lora_alpha=config.lora_alpha, config=plain)
    layer.scaling[EARLIER] = layer.scaling[NEWEST]
    layer.set_adapter([NEWEST, EARLIER])
    for parameter in pair_of(layer):
        parameter.requires_grad_(trained)
    for parameter, value in zip(pair_of(layer, EARLIER), (a, b), strict=True):
        parameter.requires_grad_(False).copy_(value)


def begin(model: PreTrainedModel, *, stored: str, seed: int) -> None:
    """Begins a new pair: the last one goes to the frozen weights or to the earlier pairs."""
    (merge if stored == "merged" else set_aside)(model)
    draw_pair(model, seed)


def follow(model: PreTrainedModel) -> None:
    """Lets the model take a state_dict with more earlier pairs than it has, or fewer."""
    model.register_load_state_dict_pre_hook(take_shape)


def take_shape(model: PreTrainedModel, state: Mapping[str, Tensor], prefix: str, *args: Any) -> None:
    """Gives each layer as many earlier pairs as the state has."""
    for name, layer in layers(model).items():
        own = {key.removeprefix(f"{prefix}{name}."): value for key, value in state.items()}
        stored = [own[key] for key in EARLIER_KEYS if key in own]
        if stored:
            hold(layer, model.peft_config[NEWEST], *stored)
        elif has_earlier(layer):
            layer.delete_adapter(EARLIER)


def without_pairs(model: PreTrainedModel, *, merged: bool) -> PreTrainedModel:
    """A copy as its authors wrote it, all of it trainable, with all pairs added to its weights or without."""
    copy = deepcopy(model)
    for name, layer in layers(copy).items():
        if merged:
            layer.merge()
        copy.set_submodule(name, layer.get_base_layer())
    del copy.peft_config
    return copy.requires_grad_(True)


def newest_pairs(model: PreTrainedModel) -> dict[str, Tensor]:
    """All pairs as one by the names of the newest: what peft loads as a single adapter."""
    found = {}
    for layer in layers(model).values():
        found |= {id(p): value for p, value in zip(pair_of(layer), join_pairs(layer), strict=True)}
    return {name: found[id(p)] for name, p in model.named_parameters() if id(p) in found}


def export_pairs(folder: Path, model: PreTrainedModel, parts: Mapping[str, Mapping[str, Tensor]]) -> str:
    """Writes the base to `folder` and each part, pairs by the names of the newest, to adapters/<name> in it,
    as peft does; gives the Python expression that loads it with the last part."""
    base = without_pairs(model, merged=False)
    base.save_pretrained(folder)
    for name, weights in parts.items():
        place = folder / "adapters" / quote(name, safe=" ")
        place.mkdir(parents=True, exist_ok=True)
        save_pairs(place, model, weights, base=folder)
    loading = f"transformers.{type(base).__name__}.from_pretrained({json.dumps(str(folder))})"
    return f"peft.PeftModel.from_pretrained({loading}, {json.dumps(str(place))})"


def save_pairs(place: Path, model: PreTrainedModel, weights: Mapping[str, Tensor], *, base: Path) -> None:
    """Writes one adapter, of whatever rank its weights have, in peft's format, with what AutoPeftModel… needs
    to load it: the base's folder, and its task or, for a masked model, which has none in peft, its class."""
    config = model.peft_config[NEWEST]
    state = get_peft_model_state_dict(
        model, state_dict=dict(weights), adapter_name=NEWEST, save_embedding_layers=False
    )
    rank = len(next(value for name, value in weights.items() if "_A." in name))
    written = {
        f"base_model.model.{name}": value.detach().cpu().clone(memory_format=torch.contiguous_format)
        for name, value in state.items()
    }
    save_file(written, place / "adapter_model.safetensors")
    # alpha grows with the rank, as alpha / r is what the pairs were learned with
    scaled = replace(config, r=rank, lora_alpha=config.lora_alpha * rank / config.r, inference_mode=True)
    scaled.base_model_name_or_path = str(base.resolve())
    if model.config.is_encoder_decoder:
        scaled.task_type = "SEQ_2_SEQ_LM"
    elif type(model).__name__.endswith(("ForCausalLM", "LMHeadModel")):
        scaled.task_type = "CAUSAL_LM"
    else:
        kind = type(model)
        scaled.auto_mapping = {"base_model_class": kind.__name__, "parent_library": kind.__module__}
    scaled.save_pretrained(place)
