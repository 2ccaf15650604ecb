"""Options that masks share."""

from dataclasses import dataclass

from cpt.core.options import Options, option
from cpt.core.rules import number, one_of, or_null, some_of

ACTS_ON = one_of("gradient", "update", "frozen")


@dataclass(frozen=True, kw_only=True)
class SoftMaskOptions(Options):
    """A soft mask and the proxy of general knowledge (cpt.gradient_masks.soft)."""

    units: tuple[str, ...] = option("what is protected", some_of("heads", "neurons", "outputs", "tokens"))
    columns: tuple[str, ...] = option(
        "units that own the columns of the map that reads them, too", some_of("heads", "neurons", none=True)
    )
    acts_on: str = option("what is scaled: gradient, the step, or the step and its moments", ACTS_ON)
    normalise: str = option(
        "how importances come into [0, 1], per layer and kind",
        one_of("tanh_abs", "tanh_relu", "minmax", "rank"),
    )
    general: str | None = option(
        "what the KL of two dropout passes compares; null: general knowledge is not measured",
        or_null(one_of("logits", "hidden")),
    )
    proxy_dropout: float | None = option(
        "rate of these two passes; null: the model's own", or_null(number("above 0 and below 1"))
    )
