"""OSF, orthogonal subspace fine-tuning (Nayak et al., 2025, arXiv 2504.07097): steps avoid the directions
that matter most to a linear layer, as it is before each domain:

    W = U_h S_h V_h^T + U_l S_l V_l^T        k largest singular values, and the others
    dW <- (I - U_h U_h^T) dW (I - V_h V_h^T)

With `least`, k depends on how little a block changes its input, on the text of the domain before (section
3.3):

    share_b = least + I_b (protected - least)     I_b the mean cosine of a block's input and output, over
                                                  the mean of all blocks; 1 before the first domain

`protect: all` decomposes embeddings and head too. Norms and biases are vectors and always free."""

from collections.abc import Iterable
from fractions import Fraction
from math import floor

from torch import Tensor, ones

from cpt.data.collate import Batch
from cpt.data.options import Domain
from cpt.gradient_masks.constraints import Subspaces
from cpt.methods.base import ContinualMethod, MethodContext
from cpt.methods.options import OSFOptions
from cpt.models.fisher import measure_similarity
from cpt.models.units import find_blocks, find_projections, find_weight_matrices


class OSF(ContinualMethod):
    """Trains in the directions in which a layer's weights are small."""

    options: OSFOptions

    def __init__(self, options: OSFOptions, context: MethodContext) -> None:
        super().__init__(options, context)
        self.subspaces = Subspaces(apply_to=options.apply_to, protected=options.sides)
        find_maps = find_weight_matrices if options.protect == "all" else find_projections
        self.subspaces.set_layers(find_maps(self.model))
        self.masks.append(self.subspaces)
        self.blocks = [name for name, _ in find_blocks(self.model)]
        self.similarity: Tensor
        if options.least is not None:
            self.register_buffer("similarity", ones(len(self.blocks)))

    def before_domain(self, importance_batches: Iterable[Batch]) -> None:
        shares, ranks = self.shares(self.domain), {}
        for name, weight in self.subspaces.maps.items():
            inside = (place for place, each in enumerate(self.blocks) if name.startswith(f"{each}."))
            ranks[name] = floor(shares[next(inside, -1)] * min(weight.shape))
        self.subspaces.protect_directions(ranks)

    def after_domain(self, importance_batches: Iterable[Batch]) -> None:
        if self.options.least is not None:
            self.similarity = measure_similarity(self.model, self.objective, importance_batches)

    def shares(self, domain: Domain) -> list[Fraction]:
        """The protected share of a layer's singular directions, by block and last for all other layers."""
        options = self.options
        first, growth, most = (Fraction(str(x)) for x in (options.protected, options.growth, options.most))
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
