"""OSF, orthogonal subspace fine-tuning (Nayak et al., 2025, arXiv 2504.07097): steps avoid the directions
that matter most to a linear layer, as it is before each domain:

    W = U_h S_h V_h^T + U_l S_l V_l^T        k largest singular values, and the others
    dW <- (I - U_h U_h^T) dW (I - V_h V_h^T)

With `min_protected_share`, k depends on how little a block changes its input, on the text of the domain
before (section 3.3):

    share_b = min + I_b (share - min)     I_b the mean cosine of a block's input and output, over the mean
                                          of all blocks; 1 before the first domain

`protected_layers: all` decomposes embeddings and head too. Norms and biases are vectors and always free."""

from collections.abc import Iterable
from fractions import Fraction
from math import floor

from torch import Tensor, ones

from cpt.data.collate import Batch
from cpt.data.options import Domain
from cpt.gradient_masks.constraints import Subspaces
from cpt.methods.base import ContinualMethod, MethodContext
from cpt.methods.options import OSFOptions
from cpt.models.fisher import measure_block_similarity
from cpt.models.units import find_blocks, find_projections, find_weight_matrices


class OSF(ContinualMethod):
    """Trains in the directions in which a layer's weights are small."""

    options: OSFOptions
    reads_importance_batches = True

    def __init__(self, options: OSFOptions, context: MethodContext) -> None:
        super().__init__(options, context)
        self.subspaces = Subspaces(apply_to=options.apply_to, protected=options.sides)
        if options.protected_layers == "all":
            self.subspaces.set_layers(find_weight_matrices(self.model))
        else:
            self.subspaces.set_layers(find_projections(self.model, skips_mixtures=True))
        self.masks.append(self.subspaces)
        self.blocks = [name for name, _ in find_blocks(self.model)]

        # The mean cosine of each block's input and output on the text of the last domain, [blocks]. 1 before
        # the first: with equal similarities all blocks are protected alike.
        self.similarity: Tensor
        if options.min_protected_share is not None:
            self.register_buffer("similarity", ones(len(self.blocks)))

    def before_domain(self, importance_batches: Iterable[Batch]) -> None:
        *block_shares, share_outside_blocks = self.protected_shares(self.domain)
        share_by_block = dict(zip(self.blocks, block_shares, strict=True))

        ranks = {}
        for name, weight in self.subspaces.weights.items():
            block = self.find_block(name)
            share = share_outside_blocks if block is None else share_by_block[block]
            ranks[name] = floor(share * min(weight.shape))  # of min(n, m) singular directions
        self.subspaces.protect_directions(ranks)

    def find_block(self, layer: str) -> str | None:
        """The name of the block that a layer of this name is in; None for embeddings and head."""
        for block in self.blocks:
            if layer.startswith(f"{block}."):
                return block
        return None

    def after_domain(self, importance_batches: Iterable[Batch]) -> None:
        if self.options.min_protected_share is not None:
            self.similarity = measure_block_similarity(self.model, self.objective, importance_batches)

    def protected_shares(self, domain: Domain) -> list[Fraction]:
        """The protected share of a layer's singular directions, by block and last for all other layers."""
        options = self.options
        # Decimal fractions, as 0.29 in binary is less: of 100 directions it would protect 28.
        first_share = Fraction(str(options.protected_share))
        growth = Fraction(str(options.growth))
        # `protected_share` is what the first domain has, also where the upper bound is below it.
        upper_bound = max(first_share, Fraction(str(options.max_protected_share)))
        common_share = min(first_share + domain.index * growth, upper_bound)
        if options.min_protected_share is None:
            return [common_share] * (len(self.blocks) + 1)

        # share_b = lowest + I_b (common - lowest), with I_b the block's similarity over their mean
        lowest_share = Fraction(str(options.min_protected_share))
        similarities = self.similarity.clamp_min(0).tolist()
        mean_similarity = sum(similarities) / len(similarities)
        shares = []
        for similarity in similarities:
            # With a mean of 0 all similarities are 0, and blocks are protected alike.
            importance = Fraction(similarity / mean_similarity) if mean_similarity else Fraction(1)
            shares.append(min(lowest_share + importance * (common_share - lowest_share), upper_bound))
        return [*shares, common_share]

    def diagnostics(self) -> dict[str, Tensor]:
        diagnostics = super().diagnostics()
        if self.options.min_protected_share is not None:
            diagnostics["osf/similarity"] = self.similarity
        return diagnostics
