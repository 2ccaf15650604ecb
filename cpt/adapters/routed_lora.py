"""LoRA adapters along one rank that are weighted at each place of a layer's input: by a router per layer and
token (MoE-LoRA), or once per sample for all layers, as in SAPT (Zhao et al., ACL 2024) and MoCL (Wang et al.,
NAACL 2024).

    h = W x + alpha / r sum_k g_k B_k A_k x = W x + alpha / r [B_1 ... B_t] (g repeated * [A_1; ...; A_t] x)

A hook on the rank features A x [..., t r] applies the weights g [..., t]."""

import inspect
import math
from collections.abc import Mapping
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel

from cpt.adapters import lora
from cpt.adapters.domain_store import Scope
from cpt.core.exceptions import InvalidOptionError
from cpt.models.forward import (
    CACHES,
    cache_arguments,
    find_input_stack,
    find_token_side,
    mean_over_tokens,
    set_mode,
)
from cpt.models.narrow_layers import make_empty_hidden

SAMPLE_ROUTER = "pair_router"  # the name of a SampleRouter in the encoder or body of a model
# Among the weights of all adapters, in their order: those of the newest, and of the earlier ones.
OF_NEWEST = slice(-1, None)
OF_EARLIER = slice(None, -1)


def weigh_ranks(features: Tensor, weights: Tensor) -> Tensor:
    """The rank features [..., t r] of t adapters times the weights [..., t] of each."""
    # An adapter's r ranks follow each other, so that one weight is for r features.
    features_by_adapter = features.unflatten(-1, (weights.shape[-1], -1))  # [..., t, r]
    return (features_by_adapter * weights[..., None].to(features)).flatten(-2)


class TokenRouter(nn.Linear):
    """The weights of a layer's adapters for each token: softmax(W_g x) [..., E], x their input."""

    def weigh(self, module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> Tensor:
        """The forward hook of A."""
        logits = self(args[0])
        gates = logits.to(torch.promote_types(logits.dtype, torch.float32)).softmax(-1)
        return weigh_ranks(output, gates)


def attach_experts(
    model: PreTrainedModel,
    *,
    experts: int,
    r: int,
    alpha: float,
    dropout: float,
    targets: lora.Targets,
    initialization: bool | str = True,
) -> Scope:
    """Adds `experts` LoRA adapters of rank r with a router to each linear layer of the targets; a single
    adapter, which has weight 1, is without a router."""
    # One adapter of all ranks; alpha grows with them, as each expert is scaled by alpha / r.
    scope = lora.attach_lora(
        model,
        r=experts * r,
        alpha=experts * alpha,
        dropout=dropout,
        targets=targets,
        embeddings=False,
        initialization=initialization,
    )
    if experts == 1:
        return scope

    router_names = []
    for name, layer in lora.find_lora_layers(model).items():
        a, _ = lora.get_factors(layer)
        router = TokenRouter(a.shape[1], experts, bias=False, device=a.device, dtype=a.dtype)
        layer.add_module("router", router)
        layer.lora_A[lora.NEWEST].register_forward_hook(router.weigh)
        router_names.append(f"{name}.router.weight")
    return Scope((*scope.names, *router_names), scope.projections)


class SampleRouter(nn.Module):
    """The weights of a model's adapters for each sample, the same for all layers, from a query q of the
    sample and a key k_i of each adapter [D].

    attention   a = softmax_i(q k_i / sqrt(D)),  q = LN(silu(W_up W_down e))             (SAPT)
    cosine      a = softmax_i(scale cos(e, k_i))                                         (MoCL)

    e [D] is a mean over a sample's tokens, in a causal model over those up to the token that is weighted. It
    is a mean of the tokens' embeddings (query=embeddings), or of the last hidden states of the encoder or
    body, computed without adapters, in eval mode and without a gradient (query=encoder). Only the newest
    adapter's key is trained; it starts as U(-1, 1). The router has the device and type of the tensor
    `like`."""

    earlier: Tensor

    def __init__(
        self, width: int, *, key: str, query: str, bottleneck: int, scale: float, causal: bool, like: Tensor
    ) -> None:
        super().__init__()
        self.key_kind = key
        self.query_kind = query
        self.scale = scale
        self.causal = causal
        device = like.device
        dtype = like.dtype
        self.key = nn.Parameter(torch.empty(1, width).uniform_(-1, 1).to(device=device, dtype=dtype))
        self.register_buffer("earlier", torch.empty(0, width, device=device, dtype=dtype))
        if key == "attention":
            self.down = nn.Linear(width, bottleneck, bias=False, device=device, dtype=dtype)
            self.up = nn.Linear(bottleneck, width, bias=False, device=device, dtype=dtype)
            self.norm = nn.LayerNorm(width, device=device, dtype=dtype)

        self.argument_names: tuple[str, ...] = ()  # of the encoder's or body's forward
        # Of the current pass:
        self.needs_embeddings = False  # whether e is to be computed when the embeddings are
        self.mask: Tensor | None = None  # [B, T], 0 at padding
        self.text_shape = (0, 0)  # B and T
        self.is_continued = False  # whether it reads the next tokens of texts in a cache
        self.log_weights: Tensor | None = None  # log a, [B, 1, t]; in a causal model [B, T, t]
        self.cosines: Tensor | None = None  # of the same shape

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"log_weights": None, "cosines": None, "mask": None}  # of one pass

    @property
    def keys(self) -> Tensor:
        """All keys, [t, D], the newest as the last, in 32 bits or more."""
        keys = torch.cat([self.earlier, self.key])
        return keys.to(torch.promote_types(keys.dtype, torch.float32))

    @property
    def row_log_weights(self) -> Tensor:
        """log a of each row of the last pass as a whole, [B, t]."""
        assert self.log_weights is not None
        return self.log_weights[:, -1]

    @torch.no_grad()
    def add_key(self, generator: torch.Generator) -> None:
        """Starts a new key after the earlier ones."""
        # The parameter stays the same one, and only its values are new: the optimizer knows it.
        self.earlier = torch.cat([self.earlier, self.key])
        self.key.copy_(torch.empty(self.key.shape).uniform_(-1, 1, generator=generator))

    def _load_from_state_dict(self, state_dict: dict[str, Tensor], prefix: str, *args: Any) -> None:
        # torch loads into buffers of the same shape only; there is a key for each domain of the state.
        stored = state_dict.get(f"{prefix}earlier", self.earlier)
        self.earlier = self.earlier.new_empty(stored.shape)
        super()._load_from_state_dict(state_dict, prefix, *args)

    def weigh_adapters(self, states: Tensor) -> None:
        """Computes the log weights a of the adapters from the means of states [B, T, D]: over all tokens of a
        row, or in a causal model over those up to each token."""
        self.needs_embeddings = False
        self.text_shape = (states.shape[0], states.shape[1])
        states = states.to(torch.promote_types(states.dtype, torch.float32))
        keys = self.keys
        if self.causal:
            # A token's weights may depend on no later token. Up to padding at the start of a row both the sum
            # and the number of tokens are 0, and so is the mean.
            mask = torch.ones_like(states[..., 0]) if self.mask is None else self.mask.to(states)
            token_weights = mask[..., None]  # 1, at padding 0
            means = (states * token_weights).cumsum(1) / token_weights.cumsum(1).clamp_min(1)
        else:
            means = mean_over_tokens(states, self.mask)[:, None]

        if self.key_kind == "cosine":
            self.cosines = functional.normalize(means.to(keys), dim=-1) @ functional.normalize(keys, dim=-1).T
            scores = self.scale * self.cosines
        else:
            query = self.norm(functional.silu(self.up(self.down(means.to(self.key.dtype)))))
            scores = query.to(keys) @ keys.T / math.sqrt(keys.shape[1])
        self.log_weights = scores.log_softmax(-1)

    def read_inputs(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        """The pre-hook of the encoder or body."""
        inputs = dict(zip(self.argument_names, args, strict=False)) | kwargs
        cache = find_cache(inputs)
        if cache is not None and cache.get_seq_length() > 0 and self.log_weights is not None:
            # Generation continues: the new tokens have the weights of the last one.
            self.is_continued = True
            self.text_shape = (len(self.log_weights), 1)
            return

        self.is_continued = False
        mask = inputs.get("attention_mask")
        embeddings = inputs.get("inputs_embeds")
        self.mask = mask if mask is not None and mask.ndim == 2 else None
        if self.query_kind == "encoder":
            self.weigh_adapters(self.encode_without_adapters(module, inputs))
        elif embeddings is not None:
            self.weigh_adapters(embeddings)
        else:
            # The pass computes the embeddings from ids after this hook: `read_embeddings` then has them.
            self.needs_embeddings = True

    def encode_without_adapters(self, module: nn.Module, inputs: dict[str, Any]) -> Tensor:
        """The last hidden states [B, T, D] of the encoder or body on the inputs of the current pass, in eval
        mode and with weights of 0 for all adapters."""
        ids = inputs.get("input_ids")
        text = cast(Tensor, inputs.get("inputs_embeds") if ids is None else ids)
        self.text_shape = (text.shape[0], text.shape[1])
        # exp(-inf) = 0 is the weight of each adapter in the hooks that read `log_weights`.
        num_adapters = len(self.earlier) + 1
        self.log_weights = self.key.new_full((len(text), 1, num_adapters), -torch.inf)

        # The caches of the current pass are left out, as the keys and values of this one would be stored in
        # them; `cache_arguments` keeps the module from making a cache for this pass alone.
        arguments = {name: value for name, value in inputs.items() if name not in CACHES}
        arguments.update(cache_arguments(module))
        # `forward`, as a call would run the pre-hook `read_inputs` again, which calls this method.
        with torch.no_grad(), set_mode(module, training=False):
            return cast(Tensor, module.forward(**arguments).last_hidden_state)

    def read_embeddings(self, module: nn.Module, args: Any, output: Tensor) -> None:
        """The forward hook of the input embedding."""
        if self.needs_embeddings:
            self.weigh_adapters(output)

    def weights_at(self, features: Tensor) -> Tensor:
        """a [..., t] for a layer's features [N, T', f], [B T, f] or [B, 1, T', f]; raises ValueError for
        unidentified samples."""
        assert self.log_weights is not None
        weights = self.log_weights.exp()
        rows, length = self.text_shape
        if features.ndim == 4 and features.shape[:2] == (rows, 1):
            return extend_weights(weights, features.shape[2])[:, None]
        if self.is_continued:
            weights = weights[:, -1:]
        # Some layers see the tokens of all samples in one list.
        if features.ndim == 2 and len(features) == rows * length:
            return weights.expand(-1, length, -1).flatten(0, 1)
        if features.ndim != 3 or len(features) % rows:
            raise ValueError(
                f"method.target_modules is invalid: an adapter sees {list(features.shape[:-1])} "
                f"for a batch of {[rows, length]}. Allowed: layers that see all tokens of each sample"
            )
        return weights.repeat_interleave(len(features) // rows, 0)  # of several beams

    def weigh(self, adapters: slice, module: nn.Module, args: Any, output: Tensor) -> Tensor:
        """The forward hook of A of the newest adapter, or of the earlier ones."""
        return weigh_ranks(output, self.weights_at(output)[..., adapters])


def extend_weights(weights: Tensor, num_tokens: int) -> Tensor:
    """Weights [B, 1 or T, t] for the first tokens of texts: further ones have those of the last token.
    DeepSeek expands the latents of all tokens in the cache whenever a new one is generated."""
    num_weighted = weights.shape[1]
    if not 1 < num_weighted < num_tokens:
        return weights
    weights_of_new = weights[:, -1:].expand(-1, num_tokens - num_weighted, -1)
    return torch.cat([weights, weights_of_new], dim=1)


def find_cache(inputs: Mapping[str, Any]) -> Any | None:
    """The cache of keys and values among the inputs of a pass, or None."""
    for name in CACHES:
        if inputs.get(name) is not None:
            return inputs[name]
    return None


def attach_routed(
    model: PreTrainedModel,
    *,
    r: int,
    alpha: float,
    dropout: float,
    targets: lora.Targets,
    key: str,
    query: str,
    bottleneck: int,
    scale: float,
    causal: bool,
    initialization: bool | str = True,
) -> Scope:
    """Adds a LoRA adapter to each linear layer of the targets within the model's body, and a router that
    weights it and those of earlier domains for each sample. Raises ValueError for targets without a layer in
    the body."""
    # Not in the head, which sees scored positions alone: whose samples they are is not known there.
    layer_names = [
        name for name in lora.find_targets(model, targets) if find_token_side(model, name) is not None
    ]
    if not layer_names:
        raise InvalidOptionError("method.target_modules", targets, allowed="layers of the body")
    scope = lora.attach_lora(
        model,
        r=r,
        alpha=alpha,
        dropout=dropout,
        targets=layer_names,
        embeddings=False,
        initialization=initialization,
    )

    is_encoder_decoder = model.config.is_encoder_decoder
    stack = find_input_stack(model)
    embedded = stack if is_encoder_decoder else model  # an encoder has an embedding module of its own
    embedding = embedded.get_input_embeddings()
    query_width = embedding.weight.shape[1] if query == "embeddings" else model.config.hidden_size
    router = SampleRouter(
        query_width,
        key=key,
        query=query,
        bottleneck=bottleneck,
        scale=scale,
        causal=causal and not is_encoder_decoder,
        like=make_empty_hidden(model),
    )
    # Inputs may be passed by position.
    router.argument_names = tuple(inspect.signature(stack.forward).parameters)
    stack.add_module(SAMPLE_ROUTER, router)
    stack.register_forward_pre_hook(router.read_inputs, with_kwargs=True)
    embedding.register_forward_hook(router.read_embeddings)
    for layer in lora.find_lora_layers(model).values():
        layer.lora_A[lora.NEWEST].register_forward_hook(partial(router.weigh, OF_NEWEST))

    # In this order: a state's earlier adapters are made first, then they get their hook.
    lora.resize_on_load(model)
    model.register_load_state_dict_pre_hook(route_earlier)
    router_names = [name for name, _ in model.named_parameters() if f"{SAMPLE_ROUTER}." in name]
    return Scope((*scope.names, *router_names), scope.projections)


def find_router(model: nn.Module) -> SampleRouter:
    return next(part for part in model.modules() if isinstance(part, SampleRouter))


def route_earlier(model: nn.Module, *args: Any) -> None:
    """Lets the router weight the earlier adapters, which are new modules whenever there are more of them."""
    router = find_router(model)
    for layer in lora.find_lora_layers(model).values():
        if lora.has_earlier(layer):
            layer.lora_A[lora.EARLIER].register_forward_hook(partial(router.weigh, OF_EARLIER))


def begin_routed(model: PreTrainedModel, generator: torch.Generator) -> None:
    """Starts a new adapter in each layer, and its key; the last ones join the earlier ones."""
    lora.begin_adapter(model, storage="separate", seed=generator.initial_seed())
    route_earlier(model)
    find_router(model).add_key(generator)


def routed_part(model: nn.Module) -> dict[str, Tensor]:
    """All adapters and the router, by their names in the model's state."""
    tensors = {}
    for name, tensor in model.state_dict().items():
        if ".lora_" in name or f"{SAMPLE_ROUTER}." in name:
            tensors[name] = tensor
    return tensors
