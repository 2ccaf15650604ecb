"""Options of the optimizers in conf/optim, and what they lack; other optimizers of torch take their own
arguments."""

from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Annotated, Any, Literal

from annotated_types import Ge, Le, Lt

from cpt.core.schema import (
    Allowed,
    BelowOne,
    Count,
    NonNegative,
    Number,
    Options,
    Pattern,
    Positive,
    Text,
    check_value,
    config,
    list_option_types,
    option,
    prefix_errors,
)
from cpt.core.sections import RESERVED_KEYS, Choice, Section

Betas = Annotated[tuple[BelowOne, BelowOne], Allowed("two numbers, 0 or more and below 1")]
CARRY = "optimizer state kept across domains: none, moments (and step counts), all (and the schedule)"
CarryName = Literal["none", "moments", "all"]
Carry = Annotated[bool | CarryName, Allowed("none, moments, all")]
# Names of kinds of parameters, in addition to regular expressions on their names.
PARAMETER_KINDS = ("embeddings", "head", "norms", "biases", "attention")
Multipliers = Annotated[
    Mapping[str, Any],
    Allowed(
        f"{{PARAMETERS: FACTOR}}, with {', '.join(PARAMETER_KINDS)} or regular expressions on names of "
        "parameters"
    ),
]
Multiplier = Annotated[
    Positive, Allowed("above 0; freeze.embeddings=true and trainable=… choose what is not trained")
]
Undecayed = Annotated[
    tuple[Pattern, ...],
    Allowed(f"a list of {', '.join(PARAMETER_KINDS)} or regular expressions on names of parameters"),
]
AdafactorEpsilons = Annotated[
    tuple[NonNegative | None, NonNegative],
    Allowed("two numbers, 0 or more, of which the first may be null"),
]
RoundingName = Literal["auto", "stochastic", "nearest"]
RULES = {  # of arguments that optimizers of torch have in common
    "lr": NonNegative,
    "weight_decay": NonNegative,
    "eps": Positive,
    "betas": Betas,
    "momentum": NonNegative,
}


@config
class ParameterOptions(Options):
    """How fast parameters are trained, which decay, and how steps are rounded, with any optimizer."""

    lr_multipliers: Multipliers | None = option(
        "factors on the learning rate by parameters, {embeddings: 0.1}: embeddings, head, norms, biases, "
        "attention, or regular expressions on their names",
        default=None,
    )
    no_decay: Undecayed = option("parameters without weight decay, named as in lr_multipliers", default=())
    rounding: RoundingName = option(
        "how steps become weights in bf16-true: stochastic loses none, nearest those below the distance of "
        "two numbers; auto: stochastic, but nearest in a run that began so",
        default="auto",
    )

    def __post_init__(self) -> None:
        for pattern, factor in (self.lr_multipliers or {}).items():
            check_value("lr_multipliers", pattern, Pattern)
            check_value(f"lr_multipliers.{pattern}", factor, Multiplier)


SAME_FOR_ALL = ParameterOptions()


@config
class AdamWOptions(ParameterOptions):
    """Options of AdamW; decay reaches matrices only, not biases and norms."""

    lr: NonNegative = option("peak learning rate")
    betas: Betas = option("decay rates of the moments")
    eps: Positive = option("added to the square root of the second moment")
    weight_decay: NonNegative = option(
        "weight decay of matrices, also of embedding rows whose tokens a domain does not have"
    )
    fused: bool | None = option("use the fused implementation; null: the choice of torch", default=None)
    state_across_domains: Carry = option(CARRY, default="none")


@config
class SGDOptions(ParameterOptions):
    """Options of plain gradient steps."""

    lr: NonNegative = option("peak learning rate")
    momentum: NonNegative = option("momentum factor")
    weight_decay: NonNegative = option(
        "weight decay of matrices, also of embedding rows whose tokens a domain does not have"
    )
    state_across_domains: Carry = option(CARRY, default="none")


@config
class AdamW8bitOptions(ParameterOptions):
    """Options of AdamW with moments in 8 bits."""

    lr: NonNegative = option("peak learning rate")
    betas: Betas = option("decay rates of the moments")
    eps: Positive = option("added to the square root of the second moment")
    weight_decay: NonNegative = option(
        "weight decay of matrices, also of embedding rows whose tokens a domain does not have"
    )
    min_8bit_size: Count = option("weights from which on a parameter has moments in 8 bits; else in 32")
    state_across_domains: Carry = option(CARRY, default="none")


@config
class MuonWithAdamWOptions(ParameterOptions):
    """Options of Muon, and of AdamW for what is not a matrix of a block."""

    lr: NonNegative = option("peak learning rate of both")
    momentum: BelowOne = option("Muon: decay rate of the momentum")
    nesterov: bool = option("Muon: Nesterov momentum")
    ns_steps: Annotated[Count, Lt(100)] = option("Muon: Newton-Schulz iterations")
    adjust_lr_fn: Literal["match_rms_adamw", "original"] = option(
        "Muon: how the rate depends on the shape of a matrix; match_rms_adamw: steps as large as AdamW's"
    )
    betas: Betas = option("AdamW: decay rates of the moments")
    eps: Positive = option("AdamW: added to the square root of the second moment")
    weight_decay: NonNegative = option(
        "weight decay of matrices, also of embedding rows whose tokens a domain does not have"
    )
    fused: bool | None = option(
        "AdamW: use the fused implementation; null: the choice of torch", default=None
    )
    state_across_domains: Carry = option(CARRY, default="none")


@config
class AdafactorOptions(ParameterOptions):
    """Options of Adafactor."""

    lr: NonNegative = option("peak learning rate, relative to the root mean square of a parameter")
    beta2_decay: Annotated[Number, Le(0), Allowed("0 or less")] = option(
        "b: the decay rate of the second moment at step t is 1 - t^b"
    )
    eps: AdafactorEpsilons = option(
        "added to the squared gradient (null: that of the type), and least root mean square of a parameter"
    )
    d: Annotated[Number, Ge(1)] = option("largest root mean square of an update before the rate")
    weight_decay: NonNegative = option(
        "weight decay of matrices, also of embedding rows whose tokens a domain does not have"
    )
    state_across_domains: Carry = option(CARRY, default="none")


@dataclass(frozen=True, kw_only=True)
class OptimizerKind:
    """What cpt knows of an optimizer's class."""

    options: type[Options]
    name: str  # of the choice of conf/optim
    extra: str = ""  # of pyproject.toml, with the library that it needs, of the same name
    has_moments: bool = True  # whether it keeps a moment for each weight, which masks can read and scale
    supports_shards: bool = True  # whether it takes weights that are sharded

    @property
    def is_installed(self) -> bool:
        return not self.extra or find_spec(self.extra) is not None


KINDS: Mapping[str, OptimizerKind] = {
    "torch.optim.AdamW": OptimizerKind(options=AdamWOptions, name="adamw"),
    "torch.optim.SGD": OptimizerKind(options=SGDOptions, name="sgd"),
    "cpt.optim.muon.MuonWithAdamW": OptimizerKind(options=MuonWithAdamWOptions, name="muon"),
    # Factors of a matrix are of all its rows, and a block of 256 weights crosses the ends of shards.
    "torch.optim.Adafactor": OptimizerKind(
        options=AdafactorOptions, name="adafactor", has_moments=False, supports_shards=False
    ),
    "cpt.optim.adamw_8bit.AdamW8bit": OptimizerKind(
        options=AdamW8bitOptions,
        name="adamw_8bit",
        extra="bitsandbytes",
        has_moments=False,
        supports_shards=False,
    ),
}
# Options of cpt, which the optimizer does not get.
NOT_OF_OPTIMIZER = ("state_across_domains", *list_option_types(ParameterOptions))


def read_optimizer(section: Section) -> Choice:
    """The optimizer of a section. Raises ValueError for an invalid value."""
    target: Any = section.values.get("_target_")
    check_value(f"{section.name}._target_", target, Text)
    kind = KINDS.get(target)
    if kind is not None:
        return read_typed_optimizer(section, target, kind.options)

    with prefix_errors(section.name):
        check_optimizer_arguments(section.values)
        check_value("state_across_domains", section.values.get("state_across_domains", "none"), Carry)
    return section.only(name for name in section.values if name not in NOT_OF_OPTIMIZER).choose()


def read_parameter_options(section: Section) -> ParameterOptions:
    """The options of parameters in the section of an optimizer. Raises ValueError for an invalid value."""
    names = list_option_types(ParameterOptions)
    return section.only(name for name in section.values if name in names).read(ParameterOptions)


def read_typed_optimizer(section: Section, target: str, kind: type[Options]) -> Choice:
    """An optimizer with options of a class of this module; torch checks further arguments."""
    typed_names = list_option_types(kind)
    options = section.only(name for name in section.values if name in typed_names).read(kind)
    arguments = {name: value for name, value in vars(options).items() if name not in NOT_OF_OPTIMIZER}
    for name, value in section.values.items():
        if name not in RESERVED_KEYS and name not in typed_names:
            arguments[name] = value
    return Choice(target, arguments)


def resolve_carry(value: bool | CarryName) -> CarryName:
    """`optim.state_across_domains` as none, moments or all; true is moments, false none."""
    if isinstance(value, bool):
        return "moments" if value else "none"
    return value


def check_optimizer_arguments(arguments: Mapping[str, Any]) -> None:
    """Raises ValueError for an invalid value of an argument in RULES."""
    for name, rule in RULES.items():
        if name in arguments:
            check_value(name, arguments[name], rule)
