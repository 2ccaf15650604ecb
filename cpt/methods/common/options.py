"""Options that methods share."""

from dataclasses import dataclass

from cpt.core.options import Options, option
from cpt.core.rules import number, one_of, or_null


@dataclass(frozen=True, kw_only=True)
class ContrastOptions(Options):
    """The contrast of DAS and DGA (cpt.methods.common.contrast)."""

    contrast: float = option("lambda, the term's weight; 0: none of its passes", number("0 or more"))
    contrast_text: str = option("the text that is contrasted", one_of("uncorrupted", "corrupted"))
    contrast_dropout: float | None = option(
        "rate of its passes; null: the model's own", or_null(number("0 or more and below 1"))
    )
    temperature: float = option("tau", number("above 0"))
