"""OSF, orthogonal subspace fine-tuning (Nayak et al., 2025, arXiv 2504.07097): a step stays out of the
directions that matter most to what a linear map computes.

Before each domain every map within the blocks is decomposed as it is then,

    W = U_h S_h V_h^T + U_l S_l V_l^T        k largest singular values, and the others
    dW <- (I - U_h U_h^T) dW (I - V_h V_h^T)

The released code (peft, training_hub) trains the factors U_l, S_l, V_l and projects their gradients; AdamW,
which divides by entry and decays, moves them out of their subspace again. Here W itself is trained, by any
optimizer, and what is projected is the step that is made (`acts_on: update`)."""

from collections.abc import Iterable
from dataclasses import dataclass
from fractions import Fraction
from math import floor

from cpt.core.options import Options, option
from cpt.core.rules import number, one_of
from cpt.data.batch import Batch
from cpt.data.datamodule import Domain
from cpt.masks.subspaces import Subspaces
from cpt.methods.base import ContinualModule, Shared
from cpt.models.units import projections


@dataclass(frozen=True, kw_only=True)
class OSFOptions(Options):
    """Options of OSF."""

    protected: float = option(
        "share of each map's singular directions, in the first domain", number("0 to 1")
    )
    growth: float = option("share that each further domain adds", number("0 to 1"))
    most: float = option("share that there is at most", number("0 to 1"))
    sides: str = option(
        "what is protected: all in either subspace, or only what is in both", one_of("both", "block")
    )
    acts_on: str = option("what is projected: the gradient, or the step", one_of("gradient", "update"))


class OSF(ContinualModule):
    """Learns in the directions in which a map's weights are small."""

    options: OSFOptions

    def __init__(self, options: OSFOptions, shared: Shared) -> None:
        super().__init__(options, shared)
        self.subspaces = Subspaces(acts_on=options.acts_on, protected=options.sides)
        self.subspaces.over(projections(self.model))
        self.masks.append(self.subspaces)

    def before_domain(self, probe: Iterable[Batch]) -> None:
        share = self.share(self.domain)
        sizes = {name: min(weight.shape) for name, weight in self.subspaces.maps.items()}
        self.subspaces.span({name: floor(share * size) for name, size in sizes.items()})

    def share(self, domain: Domain) -> Fraction:
        """Of a map's singular directions, those that a domain leaves alone."""
        first, growth, most = (
            Fraction(str(each)) for each in (self.options.protected, self.options.growth, self.options.most)
        )
        return min(first + domain.index * growth, max(first, most))
