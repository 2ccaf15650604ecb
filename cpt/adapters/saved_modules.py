"""Modules of a frozen model that are trained fully in addition to adapters (`method.modules_to_save`).

Their own weights are trained, without the copy that peft makes: a head that is tied to the embedding is one
parameter with it, and stays so."""

from collections.abc import Iterable, Sequence

from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.other import AuxiliaryTrainingWrapper
from torch import nn
from transformers import PreTrainedModel

from cpt.core.exceptions import InvalidOptionError
from cpt.core.messages import abbreviate
from cpt.models.parameter_groups import find_parameters

KINDS = ("embeddings", "head")
OPTION = "method.modules_to_save"


def train_fully(model: PreTrainedModel, modules: Sequence[str]) -> tuple[str, ...]:
    """Lets the parameters of modules require gradients: `embeddings` and `head` (`find_parameters`), or names
    of modules or their ends. Returns the names of the parameters.

    Raises ValueError for a name without a module, and for modules that have adapters."""
    if not modules:
        return ()
    adapted_ids = find_adapted(model)
    saved_ids = set[int]()
    for name in modules:
        parameters = find_saved(model, name)
        if not parameters:
            examples = abbreviate(list_leaf_modules(model))
            raise InvalidOptionError(
                OPTION,
                name,
                reason="no module with weights has such a name",
                allowed=f"embeddings, head, or names or ends of names like {examples}",
            )
        if any(id(parameter) in adapted_ids for parameter in parameters):
            raise InvalidOptionError(
                OPTION,
                name,
                reason="it has an adapter, which is merged into what it would train",
                allowed="modules that target_modules, embeddings=true and the tuner leave as they are",
            )

        for parameter in parameters:
            parameter.requires_grad_(True)
            saved_ids.add(id(parameter))
    return tuple(name for name, parameter in model.named_parameters() if id(parameter) in saved_ids)


def find_saved(model: PreTrainedModel, name: str) -> list[nn.Parameter]:
    """The parameters of a kind, or of the modules with a name or an end of it."""
    if name in KINDS:
        return find_parameters(model, name)
    parameters: dict[nn.Parameter, None] = {}
    for module_name, module in model.named_modules(remove_duplicate=False):
        if f".{module_name}".endswith(f".{name}"):
            parameters.update(dict.fromkeys(module.parameters()))
    return list(parameters)


def find_adapted(model: nn.Module) -> set[int]:
    """The ids of the parameters in layers of peft: their own, and those that they adapt."""
    ids = set[int]()
    for module in model.modules():
        if isinstance(module, BaseTunerLayer | AuxiliaryTrainingWrapper):
            ids.update(id(parameter) for parameter in module.parameters())
    return ids


def list_leaf_modules(model: nn.Module) -> list[str]:
    """The names of modules with parameters of their own, the last first: heads come at the end."""
    names = []
    for name, module in model.named_modules():
        if any(True for _ in module.parameters(recurse=False)) and ".lora_" not in name:
            names.append(name)
    return names[::-1]


def find_saved_tensors(model: nn.Module, names: Iterable[str]) -> dict[str, list[str]]:
    """The outermost modules of which all parameters are in `names`, and the names of their tensors within
    them, a tied one in each: what files of peft hold of modules that are trained fully."""
    saved_ids = {id(model.get_parameter(name)) for name in names}
    tensors: dict[str, list[str]] = {}
    for module_name, module in model.named_modules(remove_duplicate=False):
        is_inside = any(module_name.startswith(f"{outer}.") for outer in tensors)
        parameters = dict(module.named_parameters(remove_duplicate=False))
        is_saved = all(id(parameter) in saved_ids for parameter in parameters.values())
        if parameters and is_saved and not is_inside:
            tensors[module_name] = list(parameters)
    return tensors
