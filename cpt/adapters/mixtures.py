"""Low-rank pairs that lie along one rank and are weighed at each place of a map's input.

    h = W x + alpha / r sum_k g_k B_k A_k x = W x + alpha / r [B_1 ... B_t] (g repeated * [A_1; ...; A_t] x)

One hook on the rank features A x [..., t r] does it, whatever gives the weights g [..., t], each of which
stands there r times; alpha / r stays."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from cpt.adapters import lora
from cpt.adapters.bank import Scope


def weigh_ranks(features: Tensor, weights: Tensor) -> Tensor:
    """The rank features [..., t r] of t pairs, each pair's times its weight, of weights [..., t]."""
    apart = features.unflatten(-1, (weights.shape[-1], -1))
    return (apart * weights[..., None].to(features)).flatten(-2)


class TokenRouter(nn.Linear):
    """The weights of a map's pairs at each place on its own: g = softmax(W_g x), x the pairs' input, its
    dropout included."""

    def gates(self, x: Tensor) -> Tensor:
        """g [..., E] at places with inputs [..., d_in], in 32 bits or more."""
        logits = self(x)
        return logits.to(torch.promote_types(logits.dtype, torch.float32)).softmax(-1)

    def weigh(self, module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> Tensor:
        """The hook of A."""
        return weigh_ranks(output, self.gates(args[0]))


def attach_experts(
    model: PreTrainedModel,
    *,
    experts: int,
    r: int,
    alpha: float,
    dropout: float,
    targets: str | Sequence[str],
) -> Scope:
    """Puts so many pairs of rank r beside each linear map of the targets (`cpt.adapters.lora.attach_pairs`),
    with a router of their own; what is to be trained. With one expert it is a pair alone."""
    pairs = {"r": experts * r, "alpha": experts * alpha, "dropout": dropout, "targets": targets}
    scope = lora.attach_pairs(model, **pairs, embeddings=False)
    routers = []
    for name, layer in lora.layers(model).items():
        a, _ = lora.pair_of(layer)
        router = TokenRouter(a.shape[1], experts, bias=False, device=a.device, dtype=a.dtype)
        layer.add_module("router", router)
        layer.lora_A[lora.NEWEST].register_forward_hook(router.weigh)
        routers.append(f"{name}.router.weight")
    return Scope((*scope.names, *routers), scope.maps)
