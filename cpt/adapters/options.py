"""Options that several methods with parts of the model share."""

from dataclasses import dataclass
from typing import Any

from cpt.core.options import Options, option
from cpt.core.rules import YES_NO, Rule, is_list, is_pattern, is_text, number, one_of, or_null, whole

KEPT = ("memory", "disk")
SCORED = ("posterior", "nearest")


@dataclass(frozen=True, kw_only=True)
class PartsOptions(Options):
    """The parts of learned domains, of methods that keep one for each."""

    keep: str = option("where they rest: in memory, or in the file of the last stage", one_of(*KEPT))


def is_targets(value: Any) -> bool:
    return is_pattern(value) or (is_list(value, is_text) and len(value) > 0)


TARGETS = Rule(is_targets, "all-linear, a regular expression, or a list of names")


@dataclass(frozen=True, kw_only=True)
class BottleneckOptions(Options):
    """Bottlenecks beside a frozen model (cpt.adapters.bottleneck)."""

    placement: str = option(
        "behind each block's last residual sum, its FFN, or attention and FFN",
        one_of("pfeiffer", "ffn", "houlsby"),
    )
    reduction: int = option("the hidden size over this is the bottleneck's", whole(1))
    activation: str = option("between the two maps", one_of("relu", "gelu", "silu"))

    @property
    def bottleneck(self) -> dict[str, Any]:
        """What cpt.adapters.bottleneck.attach_bottlenecks is told."""
        return {name: getattr(self, name) for name in ("placement", "reduction", "activation")}


@dataclass(frozen=True, kw_only=True)
class MapPairOptions(Options):
    """Low-rank pairs beside linear maps (cpt.adapters.lora)."""

    r: int = option("rank of a pair", whole(1))
    alpha: float = option("the pair's product counts alpha / r times", number("above 0"))
    dropout: float = option("of the trained pair's input", number("0 or more and below 1"))
    targets: Any = option(
        "which linear maps: all but the head, names or their ends, or a regular expression for whole names",
        TARGETS,
    )

    @property
    def pair(self) -> dict[str, Any]:
        """What a function that attaches pairs is told; it stands in JSON."""
        targets = self.targets if isinstance(self.targets, str) else list(self.targets)
        return {"r": self.r, "alpha": self.alpha, "dropout": self.dropout, "targets": targets}


@dataclass(frozen=True, kw_only=True)
class PairOptions(MapPairOptions):
    """Low-rank pairs that are summed, whatever the text."""

    embeddings: bool = option(
        "a pair on the input embedding too; a head tied to it becomes a matrix of its own, frozen", YES_NO
    )
    exported: str = option("a plain model, or the frozen weights and peft's files", one_of("merged", "peft"))

    @property
    def pair(self) -> dict[str, Any]:
        """What cpt.adapters.lora.attach_pairs is told."""
        return super().pair | {"embeddings": self.embeddings}


@dataclass(frozen=True, kw_only=True)
class StoredPairOptions(PairOptions):
    """Low-rank pairs of which each domain has its own, and all are summed."""

    stored: str = option(
        "earlier pairs: merged into the frozen weights, or beside them", one_of("merged", "pairs")
    )


@dataclass(frozen=True, kw_only=True)
class GateOptions(Options):
    """Gates on units, a set per domain (cpt.adapters.gates)."""

    s_max: float = option("the gates' steepness at a domain's end", number("above 0"))
    limit: float = option("bound of a gate's |e|", number("above 0"))


@dataclass(frozen=True, kw_only=True)
class Routing(Options):
    """`learned` and `unlearned` say what scores text of domains with and without a part: `domain`, the own
    part; `base` and `last`; `posterior`, the mixture of all; `nearest`, of all the most probable so far, the
    first of equals.

    The prior is `uniform`, `updating`: p <- (1 - decay) p + decay * posterior, row by row, from uniform on,
    or `cached`: the mean posterior of a text's first `cached` rows, uniform until then. Each text begins
    anew, and with several processes each has the prior of its share. `top_k` parts are mixed at each
    position, None for all; `base` says whether the base is among them, as it is before anything is
    learned."""

    learned: str = option("what scores text of a learned domain", one_of("domain", *SCORED))
    unlearned: str = option("what scores all other text", one_of("base", "last", *SCORED))
    prior: str = option("of the posterior", one_of("uniform", "updating", "cached"))
    decay: float = option("of prior=updating: the share of a row's posterior", number("0 to 1"))
    cached: int = option("of prior=cached: rows", whole(1))
    top_k: int | None = option("so many parts are mixed; null: all", or_null(whole(1)))
    base: bool = option("whether the base is one of the parts that are mixed", YES_NO)
