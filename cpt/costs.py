"""What a method costs: the parameters it trains, and what it keeps beside the model."""

from collections.abc import Mapping

from torch import Tensor, nn
from transformers import PreTrainedModel

from cpt.model import skeleton


def own_names(model: PreTrainedModel) -> set[str]:
    """The names in the state_dict of a model as its authors wrote it, without what was attached since."""
    return set(skeleton(model).state_dict())


def stored_bytes(state: Mapping[str, Tensor], own: set[str]) -> int:
    """Bytes of a method's state_dict beyond the model's own weights; what has two names counts once."""
    # peft moves the weight of a map that it adapts one level down.
    inside = {f"model.{name}" for name in own}
    beside = [value for name, value in state.items() if name.replace(".base_layer", "") not in inside]
    return sum({each.data_ptr(): each.nbytes for each in beside}.values())


def trained_parameters(module: nn.Module) -> int:
    """How many numbers the optimizer moves."""
    return sum(parameter.numel() for parameter in module.parameters() if parameter.requires_grad)
