"""O-LoRA (Wang et al., Findings of EMNLP 2023): IncLoRA whose new A is orthogonal to the earlier ones.

    L = L_lm + lambda_1 sum over maps, sum_{k<t} L_orth(A_k, A_t) + lambda_2 R
    L_orth = sum over entries of |A_k A_t^T|      (`l1`, the released code)
    L_orth = sum over entries of (A_k A_t^T)^2    (`squared`, the paper)
    R = ||A_t||_F + ||B_t||_F summed over maps, not squared

A_k [r, d_in] are the A's of earlier domains; only A_t and B_t have gradients. The released code loops over
all pairs of parameters at each step; here layers of one width are one product."""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from cpt.adapters.domain_store import DomainParams
from cpt.data.collate import Batch
from cpt.methods.base import MethodContext
from cpt.methods.inclora import IncLoRA
from cpt.methods.options import OLoRAOptions

PENALTIES = ("l1", "squared")
Group = tuple[list[Tensor], Tensor]  # A of G layers, each [r, d]; the earlier ones, [G, t r, d]


def pair_overlap(groups: Iterable[Group], *, penalty: str) -> Tensor:
    """Sum over maps, earlier domains and entries of |A_k A_t^T| or its square, a scalar."""
    terms = []
    for new, earlier in groups:
        products = torch.bmm(earlier, torch.stack(new).transpose(1, 2)).float()
        terms.append(products.abs().sum() if penalty == "l1" else products.square().sum())
    return torch.stack(terms).sum()


def group_by_width(new: Sequence[Tensor], earlier: Sequence[Sequence[Tensor]]) -> list[Group]:
    """Groups layers by width, from A of all layers, now and in each earlier domain."""
    widths: dict[int, list[int]] = {}
    for place, each in enumerate(new):
        widths.setdefault(each.shape[1], []).append(place)
    return [
        ([new[m] for m in maps], torch.stack([torch.cat([domain[m] for domain in earlier]) for m in maps]))
        for maps in widths.values()
    ]


def norms(tensors: Sequence[Tensor]) -> Tensor:
    """The sum of Frobenius norms, a scalar; its gradient at 0 is 0."""
    return torch.stack([torch.linalg.vector_norm(each) for each in tensors]).sum()


class OLoRA(IncLoRA):
    """Trains a new LoRA adapter per domain in directions of the input that earlier ones do not use."""

    options: OLoRAOptions

    def __init__(self, options: OLoRAOptions, context: MethodContext) -> None:
        super().__init__(options, context)
        assert self.scope is not None
        names = self.scope.names
        self.kept = DomainParams(self.model, [n for n in names if ".lora_A." in n or "embedding_A" in n])
        self.trained = [self.model.get_parameter(name) for name in names]
        self.groups: list[Group] | None = None  # made at a domain's first step

    def activate(self, domain: int) -> None:
        super().activate(domain)
        self.groups = None

    def after_domain(self, probe: Iterable[Batch]) -> None:
        self.kept.keep(self.model, self.domain.index)

    def losses(self, batch: Batch) -> dict[str, Tensor]:
        terms = super().losses(batch)
        if self.options.strength:
            terms["orthogonality"] = self.options.strength * self.overlap(like=terms["lm"])
        if self.options.norm:
            terms["norm"] = self.options.norm * norms(self.trained)
        return terms

    def overlap(self, *, like: Tensor) -> Tensor:
        """L_orth over all layers and earlier domains; 0 in the first domain."""
        if not self.kept.domains:
            return torch.zeros_like(like)
        if self.groups is None:
            new = [self.model.get_parameter(name) for name in self.kept.names]
            earlier = [list(self.kept.weights(domain).values()) for domain in self.kept.domains]
            self.groups = group_by_width(new, earlier)
        return pair_overlap(self.groups, penalty=self.options.penalty)
