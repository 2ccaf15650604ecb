"""Low-rank pairs of which each domain has its own, weighed for each sample by what the sample is about: SAPT
(Zhao et al., ACL 2024) and MoCL (Wang et al., NAACL 2024).

    h = W x + alpha / r sum_k a_k B_k A_k x,    a [B, t] found before the body runs, for all maps the same

The pairs are those of `cpt.adapters.lora`: one that is trained, and the earlier ones, frozen, along one rank
(`cpt.adapters.mixtures`). Gradients go through all of them to what stands below."""

import inspect
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel

from cpt.adapters import lora
from cpt.adapters.bank import Scope
from cpt.adapters.mixtures import weigh_ranks
from cpt.core.rules import show
from cpt.models.forward import in_mode, mean_over, reader, uncached
from cpt.models.stacks import tokens_of

NAME = "pair_router"  # in the part of a model that reads
PASSING = ("logits", "cosines", "mask")  # of one pass, and no part of a copy


class SampleRouter(nn.Module):
    """The weights of a model's pairs for each sample, the same beside all maps: what a query q of the sample
    and a key k_i of each pair [D] come to.

    attention   a = softmax_i(q k_i / sqrt(D)),  q = LN(silu(W_up W_down e))             (SAPT)
    cosine      a = softmax_i(scale cos(e, k_i))                                         (MoCL)

    e [D] is the mean over a sample's tokens of their `embeddings`, or of the last hidden states of the
    `encoder`: of what reads in the model, without any pair, in eval mode and without a gradient. In a causal
    model a place must not know what comes behind it: e is there the mean up to the place itself. What is
    written with a key-value cache is weighed as the last place of its beginning is.

    A key starts as U(-1, 1). The newest pair's key is trained; those of the `earlier` pairs are not."""

    def __init__(
        self, width: int, *, key: str, query: str, bottleneck: int, scale: float, causal: bool, like: Tensor
    ) -> None:
        super().__init__()
        self.by, self.of, self.scale, self.causal = key, query, scale, causal
        made = {"device": like.device, "dtype": like.dtype}
        self.key = nn.Parameter(torch.empty(1, width).uniform_(-1, 1).to(**made))
        self.register_buffer("earlier", torch.empty(0, width, **made))
        if key == "attention":
            self.down = nn.Linear(width, bottleneck, bias=False, **made)
            self.up = nn.Linear(bottleneck, width, bias=False, **made)
            self.norm = nn.LayerNorm(width, **made)
        self.names: tuple[str, ...] = ()  # of what the model's reader takes
        self.inside = False  # whether the reader's pass is under way and e is not known yet
        self.mask: Tensor | None = None  # [B, T], 0 at padding
        self.text = (0, 0)  # B and T
        self.logits: Tensor | None = None  # log a, [B, 1, t]; in a causal model [B, T, t]
        self.cosines: Tensor | None = None  # of the same shape

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | dict.fromkeys(PASSING)

    @property
    def keys(self) -> Tensor:
        """All keys, [t, D], the newest as the last, in 32 bits or more."""
        keys = torch.cat([self.earlier, self.key])
        return keys.to(torch.promote_types(keys.dtype, torch.float32))

    @property
    def whole(self) -> Tensor:
        """log a of each row of the last pass as a whole, [B, t]."""
        assert self.logits is not None
        return self.logits[:, -1]

    @torch.no_grad()
    def begin(self, generator: torch.Generator) -> None:
        """Begins a new key behind the earlier ones."""
        self.earlier = torch.cat([self.earlier, self.key])
        self.key.copy_(torch.empty(self.key.shape).uniform_(-1, 1, generator=generator))

    def _load_from_state_dict(self, state_dict: dict[str, Tensor], prefix: str, *args: Any) -> None:
        stored = state_dict.get(f"{prefix}earlier", self.earlier)
        self.earlier = self.earlier.new_empty(stored.shape)
        super()._load_from_state_dict(state_dict, prefix, *args)

    def attend(self, means: Tensor) -> None:
        """Finds log a of e [B, 1 or T, D]."""
        keys = self.keys
        if self.by == "cosine":
            self.cosines = functional.normalize(means.to(keys), dim=-1) @ functional.normalize(keys, dim=-1).T
            scores = self.scale * self.cosines
        else:
            query = self.norm(functional.silu(self.up(self.down(means.to(self.key.dtype)))))
            scores = query.to(keys) @ keys.T / math.sqrt(keys.shape[1])
        self.logits = scores.log_softmax(-1)

    def read(self, states: Tensor) -> None:
        """Finds log a of what e is the mean of, [B, T, D]."""
        self.inside, self.text = False, (states.shape[0], states.shape[1])
        states = states.to(torch.promote_types(states.dtype, torch.float32))
        self.attend(running_mean(states, self.mask) if self.causal else mean_over(states, self.mask)[:, None])

    def open(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        """The reader's pre-hook."""
        given = dict(zip(self.names, args, strict=False)) | kwargs
        if is_going_on(given.get("past_key_values")) and self.logits is not None:
            self.logits, self.text = self.logits[:, -1:], (len(self.logits), 1)
            return
        mask, embeddings = given.get("attention_mask"), given.get("inputs_embeds")
        self.mask = mask if mask is not None and mask.ndim == 2 else None
        if self.of == "encoder":
            self.read(self.without_pairs(module, given))
        elif embeddings is not None:
            self.read(embeddings)
        else:
            self.inside = True

    def embed(self, module: nn.Module, args: Any, output: Tensor) -> None:
        """The hook of the input embedding."""
        if self.inside:
            self.read(output)

    @torch.no_grad()
    def without_pairs(self, module: nn.Module, given: Mapping[str, Any]) -> Tensor:
        """The reader's last hidden states [B, T, D], all pairs at weight 0; no hook of its own is called."""
        text = given["inputs_embeds"] if given.get("input_ids") is None else given["input_ids"]
        self.text = (text.shape[0], text.shape[1])
        self.logits = self.key.new_full((len(text), 1, len(self.earlier) + 1), -torch.inf)
        with in_mode(module, training=False):
            inputs = {name: value for name, value in given.items() if name != "past_key_values"}
            return module.forward(**inputs | uncached(module)).last_hidden_state

    def weights_at(self, features: Tensor) -> Tensor:
        """a for a map's features [N, T', f], or [B T, f] of all places, in a shape that goes with theirs,
        [..., t]. Raises ValueError where it can not be told which sample they are of."""
        assert self.logits is not None
        weights, (rows, places) = self.logits.exp(), self.text
        if features.ndim == 2 and len(features) == rows * places:
            return weights.expand(-1, places, -1).flatten(0, 1)
        if features.ndim != 3 or len(features) % rows:
            raise ValueError(
                f"a pair of method=sapt sees {list(features.shape[:-1])} for a batch of {[rows, places]}; "
                "allowed: method.targets of maps that see all tokens of each sample"
            )
        return weights.repeat_interleave(len(features) // rows, 0)  # of several beams

    def weigh_newest(self, module: nn.Module, args: Any, output: Tensor) -> Tensor:
        """The hook of A of the newest pair."""
        return weigh_ranks(output, self.weights_at(output)[..., -1:])

    def weigh_earlier(self, module: nn.Module, args: Any, output: Tensor) -> Tensor:
        """The hook of A of the earlier pairs."""
        return weigh_ranks(output, self.weights_at(output)[..., :-1])


def running_mean(states: Tensor, mask: Tensor | None) -> Tensor:
    """At each place the mean of the states [B, T, D] up to it that are no padding, [B, T, D]; 0 before the
    first."""
    present = torch.ones_like(states[..., :1]) if mask is None else mask[..., None].to(states)
    return (states * present).cumsum(1) / present.cumsum(1).clamp_min(1)


def is_going_on(cache: Any) -> bool:
    """Whether a key-value cache holds what stands before the tokens that are given."""
    return cache is not None and cache.get_seq_length() > 0


def attach_routed(
    model: PreTrainedModel,
    *,
    r: int,
    alpha: float,
    dropout: float,
    targets: str | Sequence[str],
    key: str,
    query: str,
    bottleneck: int,
    scale: float,
    causal: bool,
) -> Scope:
    """Puts a pair beside each linear map of the targets within the model's body, and a router that weighs it
    and those of earlier domains (`begin_routed`) for each sample; what is to be trained. The maps of a head
    see the scored places of all samples in one row, so they have none.

    Raises ValueError for targets that find no map within the body."""
    maps = [name for name in lora.find_targets(model, targets) if tokens_of(model, name) is not None]
    if not maps:
        raise ValueError(f"method.targets={show(targets)}; allowed: what finds maps outside the head")
    pair = {"r": r, "alpha": alpha, "dropout": dropout, "targets": maps}
    scope = lora.attach_pairs(model, **pair, embeddings=False)
    both, inner = model.config.is_encoder_decoder, reader(model)
    table = (inner if both else model).get_input_embeddings()
    router = SampleRouter(
        table.weight.shape[1] if query == "embeddings" else model.config.hidden_size,
        **{"key": key, "query": query, "bottleneck": bottleneck, "scale": scale},
        causal=causal and not both,
        like=table.weight,
    )
    router.names = tuple(inspect.signature(inner.forward).parameters)
    inner.add_module(NAME, router)
    inner.register_forward_pre_hook(router.open, with_kwargs=True)
    table.register_forward_hook(router.embed)
    for layer in lora.layers(model).values():
        layer.lora_A[lora.NEWEST].register_forward_hook(router.weigh_newest)
    lora.follow(model)
    model.register_load_state_dict_pre_hook(follow_earlier)
    names = [name for name, each in model.named_parameters() if f"{NAME}." in name]
    return Scope((*scope.names, *names), scope.maps)


def router_of(model: nn.Module) -> SampleRouter:
    """The router of a model's pairs."""
    return next(part for part in model.modules() if isinstance(part, SampleRouter))


def follow_earlier(model: nn.Module, *args: Any) -> None:
    """Has the router weigh the earlier pairs, which are new modules whenever there are more of them."""
    router = router_of(model)
    for layer in lora.layers(model).values():
        if lora.has_earlier(layer):
            layer.lora_A[lora.EARLIER].register_forward_hook(router.weigh_earlier)


def begin_routed(model: PreTrainedModel, generator: torch.Generator) -> None:
    """Begins a new pair beside each map, and its key; the last ones go to the earlier ones."""
    lora.begin(model, stored="pairs", seed=generator.initial_seed())
    follow_earlier(model)
    router_of(model).begin(generator)


def routed_part(model: nn.Module) -> dict[str, Tensor]:
    """All pairs and the router, by their names in the model's state."""
    return {name: v for name, v in model.state_dict().items() if ".lora_" in name or f"{NAME}." in name}
