"""Options of AdamW and SGD; other optimizers of torch take their own arguments."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from cpt.core.schema import (
    Allowed,
    BelowOne,
    NonNegative,
    Options,
    Positive,
    Text,
    check_value,
    config,
    option,
    option_types,
    prefix_errors,
)
from cpt.core.sections import RESERVED_KEYS, Choice, Section

Betas = Annotated[tuple[BelowOne, BelowOne], Allowed("two numbers, 0 or more and below 1")]
CARRY = "optimizer state kept across domains: none, moments (and step counts), all (and the schedule)"
CarryName = Literal["none", "moments", "all"]
Carry = Annotated[bool | CarryName, Allowed("none, moments, all")]
RULES = {  # of arguments that optimizers of torch have in common
    "lr": NonNegative,
    "weight_decay": NonNegative,
    "eps": Positive,
    "betas": Betas,
    "momentum": NonNegative,
}


@config
class AdamWOptions(Options):
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
class SGDOptions(Options):
    """Options of plain gradient steps."""

    lr: NonNegative = option("peak learning rate")
    momentum: NonNegative = option("momentum factor")
    weight_decay: NonNegative = option(
        "weight decay of matrices, also of embedding rows whose tokens a domain does not have"
    )
    state_across_domains: Carry = option(CARRY, default="none")


OPTIONS_BY_TARGET: Mapping[str, type[Options]] = {
    "torch.optim.AdamW": AdamWOptions,
    "torch.optim.SGD": SGDOptions,
}


def read_optimizer(section: Section) -> Choice:
    """The optimizer of a section. Raises ValueError for an invalid value."""
    target: Any = section.values.get("_target_")
    check_value(f"{section.name}._target_", target, Text)
    kind = OPTIONS_BY_TARGET.get(target)
    if kind is not None:
        return read_typed_optimizer(section, target, kind)

    with prefix_errors(section.name):
        check_optimizer_arguments(section.values)
        check_value("state_across_domains", section.values.get("state_across_domains", "none"), Carry)
    return section.only(name for name in section.values if name != "state_across_domains").choose()


def read_typed_optimizer(section: Section, target: str, kind: type[Options]) -> Choice:
    """An optimizer with options of a class of this module; torch checks further arguments."""
    typed_names = option_types(kind)
    options = section.only(name for name in section.values if name in typed_names).read(kind)
    arguments = {name: value for name, value in vars(options).items() if name != "state_across_domains"}
    for name, value in section.values.items():
        if name not in RESERVED_KEYS and name not in typed_names:
            arguments[name] = value
    return Choice(target, arguments)


def carried(value: bool | CarryName) -> CarryName:
    """`optim.state_across_domains` as none, moments or all; true is moments, false none."""
    if isinstance(value, bool):
        return "moments" if value else "none"
    return value


def check_optimizer_arguments(arguments: Mapping[str, Any]) -> None:
    """Raises ValueError for an invalid value of an argument in RULES."""
    for name, rule in RULES.items():
        if name in arguments:
            check_value(name, arguments[name], rule)
