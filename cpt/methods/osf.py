"""OSF, orthogonal subspace fine-tuning (Nayak et al., 2025, arXiv 2504.07097): a step stays out of the
directions that matter most to what a linear map computes.

Before each domain every map within the blocks is decomposed as it is then,

    W = U_h S_h V_h^T + U_l S_l V_l^T        k largest singular values, and the others
    dW <- (I - U_h U_h^T) dW (I - V_h V_h^T)

With `least` k follows how little a block changes what it is given, on the text before (section 3.3):

    share_b = least + I_b (protected - least)     I_b the mean cosine of a block's input and output, over
                                                  the mean of all blocks

The paper writes the cosine of each map's input and output, which a map that is not square has not: here all
maps of a block have the block's. Before the first domain, of which there is no text before, I_b = 1.

The released code (peft, training_hub) trains the factors U_l, S_l, V_l and projects their gradients; AdamW,
which divides by entry and decays, moves them out of their subspace again. Here W itself is trained, by any
optimizer, and what is projected is the step that is made (`acts_on: update`).

Paper and released code protect the linear maps within the blocks and leave embeddings and head free. With
`protect: all` every matrix of the model is decomposed, embeddings and head too. Norms and biases are vectors,
which have no singular directions: they are free in either case."""

import logging
from collections.abc import Iterable
from fractions import Fraction
from math import floor

from torch import Tensor, ones

from cpt.data.collate import Batch
from cpt.data.datamodule import Domain
from cpt.gradient_masks.subspace import Subspaces
from cpt.methods.base import ContinualModule, Shared
from cpt.methods.options import OSFOptions
from cpt.models.fisher import measure_similarity
from cpt.models.units import blocks, projections, weight_matrices

log = logging.getLogger(__name__)


class OSF(ContinualModule):
    """Learns in the directions in which a map's weights are small."""

    options: OSFOptions

    def __init__(self, options: OSFOptions, shared: Shared) -> None:
        super().__init__(options, shared)
        self.subspaces = Subspaces(acts_on=options.acts_on, protected=options.sides)
        self.subspaces.over(
            weight_matrices(self.model) if options.protect == "all" else projections(self.model)
        )
        self.masks.append(self.subspaces)
        self.blocks = [name for name, _ in blocks(self.model)]
        self.similarity: Tensor
        if options.least is not None:  # all else goes on from the state of runs that knew no such share
            self.register_buffer("similarity", ones(len(self.blocks)))

    def before_domain(self, probe: Iterable[Batch]) -> None:
        shares = self.shares(self.domain)
        sizes = {name: min(weight.shape) for name, weight in self.subspaces.maps.items()}
        self.subspaces.span({name: floor(shares[self.block_of(name)] * size) for name, size in sizes.items()})
        if self.domain.index == 0 and self.subspaces.known():
            self.log_free()
        if self.options.least is not None:
            told = ", ".join(f"{float(share):.2f}" for share in shares[:-1])
            log.info("%s: of the directions of each map, protected by block: %s", self.domain.name, told)

    def after_domain(self, probe: Iterable[Batch]) -> None:
        if self.options.least is not None:
            self.similarity = measure_similarity(self.model, self.objective, probe)

    def log_free(self) -> None:
        """Logs which trained parameters no subspace protects."""
        trained = {name: p for name, p in self.model.named_parameters() if p.requires_grad}
        free = {name: p for name, p in trained.items() if p not in self.subspaces.known()}
        wide = [name for name, p in free.items() if p.ndim > 1]
        log.info(
            "method.protect=%s: %.0f %% of the trained weights move freely: %d norms and biases%s",
            self.options.protect,
            100 * sum(p.numel() for p in free.values()) / sum(p.numel() for p in trained.values()),
            len(free) - len(wide),
            "".join(f", {name}" for name in wide),
        )

    def block_of(self, name: str) -> int:
        """The place of the block that a map is in; outside the blocks the place after the last."""
        blocks = enumerate(self.blocks)
        return next((place for place, block in blocks if name.startswith(f"{block}.")), len(self.blocks))

    def shares(self, domain: Domain) -> list[Fraction]:
        """Of the singular directions of a map, those that a domain leaves alone: for the maps of each block,
        and last for all others."""
        first, growth, most = (
            Fraction(str(each)) for each in (self.options.protected, self.options.growth, self.options.most)
        )
        most = max(first, most)
        alike = min(first + domain.index * growth, most)
        if self.options.least is None:
            return [alike] * (len(self.blocks) + 1)
        least, similar = Fraction(str(self.options.least)), self.similarity.clamp_min(0).tolist()
        mean = sum(similar) / len(similar)
        parts = [Fraction(each / mean) if mean else Fraction(1) for each in similar]
        return [*(min(least + part * (alike - least), most) for part in parts), alike]

    def diagnostics(self) -> dict[str, Tensor]:
        own = {} if self.options.least is None else {"osf/similarity": self.similarity}
        return super().diagnostics() | own
