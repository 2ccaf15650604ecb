"""Options that masks share."""

from typing import Literal

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
    show,
)

ActsOn = Literal["gradient", "update", "frozen"]


@config
class SoftMaskOptions(Options):
    """A soft mask and the proxy of general knowledge (cpt.gradient_masks.soft)."""

    units: OneOrMore[Literal["heads", "neurons", "outputs", "tokens"]] = option("what is protected")
    columns: Subset[Literal["heads", "neurons"]] = option("units that own the columns of their reader too")
    apply_to: ActsOn = option("what is scaled: gradient, the step, or the step and its moments")
    normalize: Literal["tanh_abs", "tanh_relu", "minmax", "rank"] = option("to [0, 1], per layer and kind")
    general: Literal["logits", "hidden"] | None = option("what the KL of two passes compares; null: no KL")
    proxy_dropout: OpenShare | None = option("rate of these two passes; null: the model's own")


KNOWN_IN_TIME = ("output", "fisher")  # importances that rows have before the backward pass


@config
class MagnitudeMaskOptions(Options):
    """Options of MIGU's mask."""

    threshold: BelowOne | None = option("T, the share of rows left as they are")
    top_p: PositiveShare | None = option("instead of T: the chosen rows' share of importance", default=None)
    importance: Literal["output", "fisher", "gradient", "weight", "random"] = option(
        "what rows are ranked by: |output|, Fisher before the domain; controls: |gradient|, |weight|, a draw"
    )
    estimator: Literal["per_sample", "batch"] = option("of importance=fisher")
    apply_to: ActsOn = option("what is scaled: gradient, the step, or the step and its moments")
    only: Pattern | None = option("which linear maps: a regular expression for their names")
    biases: bool = option("also the maps' biases")
    head: bool = option("also the linear maps outside the blocks")
    tied: bool = option("of these also the one that shares the embedding's weight")
    skip_first_domain: bool = option("the first domain is learned without the mask")
    backend: Literal["hooks", "backward"] = option("gradients of all rows, then scaled; or of chosen rows")
    seed: Natural = option("of importance=random")
    magnitudes: bool = option(
        "record the held-out texts' product magnitudes of the base and the final model", default=True
    )

    def __post_init__(self) -> None:
        if (self.threshold is None) == (self.top_p is None):
            raise ValueError(
                f"threshold={show(self.threshold)} with top_p={show(self.top_p)} is invalid. "
                "Allowed: exactly one, the other null"
            )
        if self.backend == "backward" and self.importance not in KNOWN_IN_TIME:
            raise ValueError(
                f"backend=backward is invalid with importance={self.importance}. Allowed: importance="
                f"{', '.join(KNOWN_IN_TIME)}, or backend=hooks"
            )
        if self.backend == "backward" and self.apply_to != "gradient":
            raise ValueError(
                f"backend=backward is invalid with apply_to={self.apply_to}. Allowed: apply_to=gradient, or "
                "backend=hooks"
            )


@config
class MomentumFilterOptions(Options):
    """Options of MoFO."""

    share: PositiveShare = option("alpha, the share of each tensor's entries that move")
    form: Literal["released", "whole"] = option(
        "what is filtered: released (not norms, biases, weight decay), or whole (the step of every tensor)"
    )
