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
from cpt.core.sections import GIVEN, Choice, Section

Betas = Annotated[tuple[BelowOne, BelowOne], Allowed("two numbers, 0 or more and below 1")]
CARRY = "optimizer state kept across domains: none, moments (and step counts), all (and the schedule)"
Carry = Annotated[bool | Literal["none", "moments", "all"], Allowed("none, moments, all")]
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


KNOWN: Mapping[str, type[Options]] = {"torch.optim.AdamW": AdamWOptions, "torch.optim.SGD": SGDOptions}


def read_optimizer(given: Section) -> Choice:
    """The optimizer of a section. Raises ValueError for an invalid value."""
    target: Any = given.values.get("_target_")
    check_value(f"{given.place}._target_", target, Text)
    if (kind := KNOWN.get(target)) is not None:
        known = option_types(kind)
        further = {name: each for name, each in given.values.items() if name not in (*GIVEN, *known)}
        options = given.only(name for name in given.values if name in known).read(kind)
        own = {name: each for name, each in vars(options).items() if name != "state_across_domains"}
        return Choice(target, own | further)
    with prefix_errors(given.place):
        check_optimizer_arguments(given.values)
        check_value("state_across_domains", given.values.get("state_across_domains", "none"), Carry)
    return given.only(name for name in given.values if name != "state_across_domains").choose()


def carried(given: bool | str) -> str:
    """`optim.state_across_domains` as none, moments or all."""
    return ("moments" if given else "none") if isinstance(given, bool) else given


def check_optimizer_arguments(given: Mapping[str, Any]) -> None:
    """Raises ValueError for an invalid value of an argument in RULES."""
    for name, rule in RULES.items():
        if name in given:
            check_value(name, given[name], rule)
