"""Options that methods share."""

from dataclasses import dataclass

from cpt.core.options import Options, option
from cpt.core.rules import YES_NO, number, one_of, or_null, whole

ESTIMATORS = ("per_sample", "batch")  # of cpt.models.fisher
RULES = ("average", "task_arithmetic", "ties", "dare", "dare_ties", "slerp", "fisher")


@dataclass(frozen=True, kw_only=True)
class ContrastOptions(Options):
    """The contrast of DAS and DGA (cpt.methods.das)."""

    contrast: float = option("lambda, the term's weight; 0: none of its passes", number("0 or more"))
    contrast_text: str = option("the text that is contrasted", one_of("uncorrupted", "corrupted"))
    contrast_dropout: float | None = option(
        "rate of its passes; null: the model's own", or_null(number("0 or more and below 1"))
    )
    contrast_samples: float = option(
        "share of each batch's samples that are contrasted", number("above 0, at most 1")
    )
    contrast_every: int = option(
        "steps from one with the contrast to the next, in which its weight is as many times lambda", whole(1)
    )
    contrast_negatives: str = option(
        "whether the passes of what was known have gradients", one_of("trained", "fixed")
    )
    temperature: float = option("tau", number("above 0"))


@dataclass(frozen=True, kw_only=True)
class ConsolidationOptions(Options):
    """How the importances of weights are measured and joined (cpt.methods.ewc)."""

    strength: float = option("the penalty's weight", number("0 or more"))
    estimator: str = option("of the gradients of samples, or of batches", one_of(*ESTIMATORS))
    merge: str = option("of a domain's importances with those before", one_of("mean", "decay"))
    gamma: float = option("of merge=decay: the factor on the importances so far", number("0 to 1"))


@dataclass(frozen=True, kw_only=True)
class MergingOptions(Options):
    """How the weights that domains end with become one model (cpt.methods.merge)."""

    rule: str = option("how the weights of domains become one model", one_of(*RULES))
    start: str = option(
        "what a domain starts from: the merged model, the base, or what the one before has ended with; the "
        "default follows the rule",
        one_of("merged", "base", "previous"),
    )
    scale: float = option(
        "lambda, of task_arithmetic, ties and dare; the default follows the rule", number("0 or more")
    )
    density: float = option("of ties: the share of tau's entries that is kept", number("above 0, at most 1"))
    trimmed: str = option("of ties: the largest of each tensor, or of the model", one_of("tensor", "model"))
    drop: float = option("p of dare: how likely an entry is dropped", number("0 or more and below 1"))
    share: float = option("u of slerp: the share of the newest domain", number("0 to 1"))
    base: bool = option("of average and slerp: the base is one of the models", YES_NO)
    epsilon: float = option("of fisher: added to each entry of F", number("above 0"))
    estimator: str = option("of fisher: squares the gradients of samples, or of batches", one_of(*ESTIMATORS))

    @property
    def keeps_all(self) -> bool:
        """Whether the merged model is what the domain has ended with, so that merging changes nothing."""
        whole = self.rule == "task_arithmetic" or (self.rule == "dare" and self.drop == 0)
        unchanged = (whole and self.scale == 1) or (self.rule == "slerp" and self.share == 1)
        return unchanged and self.start != "base"

    @property
    def signs(self) -> bool:
        """Whether domains vote for the sign of each entry."""
        return self.rule in ("ties", "dare_ties")
