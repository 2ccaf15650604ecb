"""Options of AdamW and SGD; other optimizers of torch take their own arguments."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from cpt.core.options import Choice, Options, option, prefix_errors
from cpt.core.rules import TEXT, YES_NO, Rule, is_list, is_number, number, or_null
from cpt.core.sections import GIVEN, Section

BETAS = Rule(
    lambda value: is_list(value, lambda beta: is_number(beta) and 0 <= beta < 1) and len(value) == 2,
    "two numbers, 0 or more and below 1",
)
CARRY = (
    "what each domain goes on with of the one before: none, moments (and counts of steps), all (the "
    "schedule's place too: it sees one domain)"
)
CARRIES = Rule(
    lambda value: isinstance(value, bool) or value in ("none", "moments", "all"), "none, moments, all"
)
RULES = {  # of arguments that optimizers of torch have in common
    "lr": number("0 or more"),
    "weight_decay": number("0 or more"),
    "eps": number("above 0"),
    "betas": BETAS,
    "momentum": number("0 or more"),
}


@dataclass(frozen=True, kw_only=True)
class AdamWOptions(Options):
    """Options of AdamW; decay reaches matrices only, not biases and norms."""

    lr: float = option("peak learning rate", RULES["lr"])
    betas: Any = option("of the moments", BETAS)
    eps: float = option("added to the root of the second moment", RULES["eps"])
    weight_decay: float = option("of matrices, times the learning rate", RULES["weight_decay"])
    fused: bool | None = option(
        "a step in one pass over each parameter; null: as torch chooses", or_null(YES_NO), default=None
    )
    carry: Any = option(CARRY, CARRIES, default="none")


@dataclass(frozen=True, kw_only=True)
class SGDOptions(Options):
    """Options of plain gradient steps."""

    lr: float = option("peak learning rate", RULES["lr"])
    momentum: float = option("share of the step before", RULES["momentum"])
    weight_decay: float = option("of matrices, times the learning rate", RULES["weight_decay"])
    carry: Any = option(CARRY, CARRIES, default="none")


KNOWN: Mapping[str, type[Options]] = {"torch.optim.AdamW": AdamWOptions, "torch.optim.SGD": SGDOptions}
# Further arguments of theirs, which are handed on as they are given.
FURTHER = {
    "torch.optim.AdamW": ("amsgrad", "maximize", "foreach", "capturable", "differentiable"),
    "torch.optim.SGD": ("dampening", "nesterov", "maximize", "foreach", "differentiable", "fused"),
}


def read_optimizer(given: Section) -> Choice | None:
    """The optimizer of a section; None if a value is missing. Raises ValueError for an invalid value."""
    target = given.values.get("_target_")
    if given.complete or target is not None:
        TEXT.check(f"{given.place}._target_", target)
    kind = KNOWN.get(target)
    if kind is not None:
        further = {name: value for name, value in given.values.items() if name in FURTHER[target]}
        options = given.only(name for name in given.values if name not in (*GIVEN, *further)).read(kind)
        if options is None:
            return None
        return Choice(target, without_carry(Choice(target, options).arguments) | further)
    with prefix_errors(given.place):
        check_optimizer_arguments(given.values)
        CARRIES.check("carry", given.values.get("carry", "none"))
    return given.only(name for name in given.values if name != "carry").choose()


def carried(given: bool | str) -> str:
    """`optim.carry` as none, moments or all."""
    return ("moments" if given else "none") if isinstance(given, bool) else given


def without_carry(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The optimizer's own arguments."""
    return {name: value for name, value in arguments.items() if name != "carry"}


def check_optimizer_arguments(given: Mapping[str, Any]) -> None:
    """Raises ValueError for an invalid value of an argument in RULES."""
    for name, rule in RULES.items():
        if name in given:
            rule.check(name, given[name])
