"""Parameters by their kind or name, with a learning rate and a decay of their own (`optim.lr_multipliers`,
`optim.no_decay`)."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

from torch import nn
from torch.optim import Optimizer
from transformers import PreTrainedModel

from cpt.core.exceptions import InvalidOptionError, format_value
from cpt.core.messages import abbreviate
from cpt.models.units import find_block_matrices, find_blocks
from cpt.models.weights import find_outer_embeddings, find_trainable, list_parameters_within
from cpt.optim.muon import MuonWithAdamW
from cpt.optim.options import PARAMETER_KINDS, ParameterOptions


def find_parameters(model: PreTrainedModel, pattern: str) -> list[nn.Parameter]:
    """The parameters of a kind: `embeddings` (of tokens, positions and types, with a head that is tied to
    them), `head` (the output layer), `norms`, `biases`, `attention`; or those whose name a regular expression
    finds. Adapters belong to the layer that they are in."""
    if pattern == "embeddings":
        blocks: list[nn.Module] = []
        with suppress(ValueError):  # of a model without known blocks
            blocks = [block for _, block in find_blocks(model)]
        return list_parameters_within(model, find_outer_embeddings(model, blocks))
    if pattern == "head":
        head = model.get_output_embeddings()
        return [] if head is None else list_parameters_within(model, [head])
    return list(dict.fromkeys(find_trainable(model, pattern)))


@dataclass(frozen=True)
class ParameterGroup:
    """The trained parameters that a pattern finds."""

    pattern: str
    parameters: tuple[nn.Parameter, ...]

    @property
    def size(self) -> int:
        """How many numbers these are; of sharded parameters in all processes."""
        return sum(parameter.numel() for parameter in self.parameters)


def find_groups(
    model: PreTrainedModel, patterns: Iterable[str], trained: Iterable[nn.Parameter]
) -> list[ParameterGroup]:
    """The trained parameters that each pattern finds in a model, perhaps none."""
    trained_parameters = set(trained)
    groups = []
    for pattern in patterns:
        parameters = [p for p in find_parameters(model, pattern) if p in trained_parameters]
        groups.append(ParameterGroup(pattern, tuple(parameters)))
    return groups


def find_multipliers(
    model: PreTrainedModel, options: ParameterOptions, trained: Iterable[nn.Parameter]
) -> dict[nn.Parameter, float]:
    """The factor on the learning rate of each trained parameter that has one. Raises ValueError for a
    parameter that two patterns give different factors: the order of patterns is not part of a run's identity,
    and must not decide."""
    factors = options.lr_multipliers or {}
    multipliers: dict[nn.Parameter, float] = {}
    first_patterns: dict[nn.Parameter, str] = {}
    for group in find_groups(model, factors, trained):
        factor = factors[group.pattern]
        for parameter in group.parameters:
            if multipliers.get(parameter, factor) != factor:
                raise overlap_error(model, parameter, (first_patterns[parameter], group.pattern), factors)
            multipliers[parameter] = factor
            first_patterns.setdefault(parameter, group.pattern)
    return multipliers


def overlap_error(
    model: nn.Module, parameter: nn.Parameter, patterns: tuple[str, str], factors: Mapping[str, float]
) -> InvalidOptionError:
    """The error for a parameter that two patterns give different factors."""
    # A tied parameter has two names: each of the patterns may find another one.
    all_names = model.named_parameters(remove_duplicate=False)
    names = [name for name, weight in all_names if weight is parameter]
    first, second = patterns
    return InvalidOptionError(
        f"optim.lr_multipliers.{second}",
        factors[second],
        reason=f"{' = '.join(names)} has {format_value(factors[first])} by {first}",
        allowed="patterns that find different parameters, or one factor for both",
    )


def bind_blocks(make_optimizer: Callable[..., Optimizer], model: nn.Module) -> Callable[..., Optimizer]:
    """What makes an optimizer: Muon for the matrices in the blocks of a model. Anything else is returned
    unchanged."""
    if getattr(make_optimizer, "func", None) is not MuonWithAdamW:  # of a plug-in it may be no partial
        return make_optimizer
    return partial(make_optimizer, find_matrices=partial(find_block_matrices, model))


def check_patterns(
    model: PreTrainedModel,
    patterns: Iterable[str],
    trained: Sequence[nn.Parameter],
    *,
    key: str,
    method: str,
) -> None:
    """Raises ValueError for the first pattern of an option that finds no trained parameter of the method."""
    for group in find_groups(model, patterns, trained):
        if group.parameters:
            continue
        trained_ids = {id(parameter) for parameter in trained}
        names = [name for name, parameter in model.named_parameters() if id(parameter) in trained_ids]
        frozen = find_parameters(model, group.pattern)
        reason = "no parameter has such a name"
        if frozen:
            reason = f"none of them is trained with method={method}, freeze and trainable"
        elif group.pattern in PARAMETER_KINDS:
            reason = "the model has none"
        raise InvalidOptionError(
            key,
            group.pattern,
            reason=reason,
            allowed=f"{', '.join(PARAMETER_KINDS)}, or an expression that finds some of {abbreviate(names)}",
        )


def describe_groups(
    model: PreTrainedModel, options: ParameterOptions, trained: Sequence[nn.Parameter]
) -> list[str]:
    """For the log, how many numbers are trained with a learning rate of their own and how many without decay;
    empty without such options."""
    lines = []
    factors = options.lr_multipliers or {}
    if factors:
        parts = []
        grouped = set[nn.Parameter]()
        for group in find_groups(model, factors, trained):
            grouped.update(group.parameters)
            parts.append(
                f"{group.pattern} x {format_value(factors[group.pattern])} ({group.size:,} parameters)"
            )
        num_others = sum(parameter.numel() for parameter in trained if parameter not in grouped)
        lines.append(
            f"Learning rates (optim.lr_multipliers): {', '.join(parts)}, others x 1 ({num_others:,})"
        )
    if options.no_decay:
        parts = [
            f"{group.pattern} ({group.size:,} parameters)"
            for group in find_groups(model, options.no_decay, trained)
        ]
        lines.append(f"No weight decay (optim.no_decay): {', '.join(parts)}")
    return lines
