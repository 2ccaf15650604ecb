"""Options that masks share."""

from typing import Literal

from cpt.core.exceptions import InvalidOptionError, format_value
from cpt.core.schema import (
    BelowOne,
    Natural,
    OneOrMore,
    OpenShare,
    Options,
    Pattern,
    PositiveShare,
    Subset,
    config,
    option,
)

ActsOn = Literal["gradient", "update", "frozen"]


@config
class SoftMaskOptions(Options):
    """A soft mask and the proxy of general knowledge (cpt.gradient_masks.soft)."""

    units: OneOrMore[Literal["heads", "neurons", "outputs", "tokens"]] = option("units that are protected")
    columns: Subset[Literal["heads", "neurons"]] = option("units that also own columns of the next layer")
    apply_to: ActsOn = option("what factors scale: the gradient, the update, or the update and its moments")
    normalize: Literal["tanh_abs", "tanh_relu", "minmax", "rank"] = option("map of importances to [0, 1]")
    general_importance: Literal["logits", "hidden"] | None = option("outputs compared for general importance")
    proxy_dropout: OpenShare | None = option("dropout rate for general importance; null: the model's own")


KNOWN_BEFORE_BACKWARD = ("output", "fisher")  # importances that rows have before the backward pass


@config
class MagnitudeMaskOptions(Options):
    """Options of MIGU's mask."""

    threshold: BelowOne | None = option("T: the share of rows that are not updated")
    top_p: PositiveShare | None = option("p: share of importance of updated rows", default=None)
    importance: Literal["output", "fisher", "gradient", "weight", "random"] = option(
        "what ranks rows: |output|, or Fisher before the domain; as controls |gradient|, |weight|, random"
    )
    estimator: Literal["per_sample", "batch"] = option("Fisher estimator (used with importance=fisher)")
    apply_to: ActsOn = option("what factors scale: the gradient, the update, or the update and its moments")
    only: Pattern | None = option("regular expression for the names of masked linear layers; null: all")
    biases: bool = option("mask biases as well")
    head: bool = option("mask linear layers outside the blocks as well")
    tied: bool = option("mask a head that is tied to the embedding as well (used with head=true)")
    skip_first_domain: bool = option("train the first domain without the mask")
    backend: Literal["hooks", "backward"] = option("backward: compute gradients of chosen rows only")
    seed: Natural = option("seed (used with importance=random)")
    magnitudes: bool = option("record product magnitudes of held-out texts, base and final", default=True)

    def __post_init__(self) -> None:
        if (self.threshold is None) == (self.top_p is None):
            raise ValueError(
                f"threshold={format_value(self.threshold)} with top_p={format_value(self.top_p)} is invalid. "
                "Allowed: exactly one, the other null"
            )
        if self.backend == "backward" and self.importance not in KNOWN_BEFORE_BACKWARD:
            raise InvalidOptionError(
                "backend",
                "backward",
                context=f"with importance={self.importance}",
                allowed=f"importance={', '.join(KNOWN_BEFORE_BACKWARD)}, or backend=hooks",
            )
        if self.backend == "backward" and self.apply_to != "gradient":
            raise InvalidOptionError(
                "backend",
                "backward",
                context=f"with apply_to={self.apply_to}",
                allowed="apply_to=gradient, or backend=hooks",
            )


@config
class MomentumFilterOptions(Options):
    """Options of MoFO."""

    share: PositiveShare = option("alpha: the share of each tensor's entries that are updated")
    form: Literal["released", "whole"] = option("whole: also norms, biases and weight decay are filtered")
