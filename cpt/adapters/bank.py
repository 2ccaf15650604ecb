"""The parts of a model that a method trains, and a copy of them for each domain.

The model holds one part, which learns. Parts of other domains rest in a bank, and take its place for one call
(`cpt.models.forward.outputs_at(..., weights=...)`) or for good; nothing that rests is ever trained."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from cpt.models.snapshots import PerParameter
from cpt.models.units import Projection

BASE = -1  # the part of construction, with which the model is the base


@dataclass(frozen=True)
class Scope:
    """What of a model is trained: the names of its parameters, and the linear maps among them."""

    names: tuple[str, ...]
    maps: tuple[Projection, ...]


def beyond(model: PreTrainedModel, scope: Scope) -> list[nn.Parameter]:
    """The parameters of a model that are not in the scope."""
    inside = {id(model.get_parameter(name)) for name in scope.names}
    return [parameter for parameter in model.parameters() if id(parameter) not in inside]


class Bank(nn.Module):
    """A copy of some of a model's parameters for each domain that has been learned.

    Kept as one vector per domain, which is part of the state_dict; the base's part is not, since
    construction gives it again: the parameters as they are then, or `base` where that is given."""

    def __init__(
        self, model: nn.Module, names: Iterable[str], *, base: Mapping[str, Tensor] | None = None
    ) -> None:
        super().__init__()
        self.names = tuple(names)
        present = [model.get_parameter(name) for name in self.names]
        self.shapes = [parameter.shape for parameter in present]
        self.sizes = [parameter.numel() for parameter in present]
        start = present if base is None else [base[name] for name in self.names]
        self.base = PerParameter((each.detach().clone() for each in start), persistent=False)

    @property
    def dtypes(self) -> list[torch.dtype]:
        """The types of the parameters, those of the module that the bank is moved with."""
        return [each.dtype for each in self.base.buffers()]

    @property
    def domains(self) -> list[int]:
        """The domains that have a part, by their place in the order, ascending."""
        return sorted(int(name) for name in self._buffers)

    @torch.no_grad()
    def keep(self, model: nn.Module, domain: int) -> None:
        """Makes the model's part, as it is now, that of a domain."""
        present = [model.get_parameter(name).flatten() for name in self.names]
        self.register_buffer(str(domain), torch.cat(present))

    def weights(self, domain: int) -> dict[str, Tensor]:
        """The part of a domain, or of the BASE, by the names of the model's parameters."""
        if domain == BASE:
            return dict(zip(self.names, self.base.buffers(), strict=True))
        split = self.get_buffer(str(domain)).split(self.sizes)
        parts = zip(self.names, split, self.shapes, self.dtypes, strict=True)
        return {name: values.view(shape).to(dtype) for name, values, shape, dtype in parts}

    @torch.no_grad()
    def put(self, model: nn.Module, domain: int) -> None:
        """Puts the part of a domain, or of the BASE, into a model."""
        for name, values in self.weights(domain).items():
            model.get_parameter(name).copy_(values)

    def _load_from_state_dict(self, state_dict: dict[str, Tensor], prefix: str, *args: Any) -> None:
        # The bank becomes what the state holds: it has more domains than a new one, or fewer than this one.
        stored = {key.removeprefix(prefix) for key in state_dict if key.startswith(prefix)}
        like = next(self.base.buffers())
        self._buffers.clear()
        for name in filter(str.isdigit, stored):
            self.register_buffer(name, like.new_empty(sum(self.sizes)))
        super()._load_from_state_dict(state_dict, prefix, *args)
