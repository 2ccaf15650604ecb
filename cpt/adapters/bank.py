"""The parts of a model that a method trains, and a copy of them for each domain.

The model holds one part, which learns. Parts of other domains rest in a bank, and take its place for one call
(`cpt.models.swapping.swap_weights`) or for good; nothing that rests is ever trained."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from cpt.core.sharding import is_sharded
from cpt.core.tensors import NamedTensors, load_tensors
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


class Bank(NamedTensors):
    """A copy of some of a model's parameters, by name, for each domain that has been learned.

    The base's part is not in the state_dict, since construction gives it again: the parameters as they are
    then, or `base` where that is given."""

    def __init__(
        self, model: nn.Module, names: Iterable[str], *, base: Mapping[str, Tensor] | None = None
    ) -> None:
        super().__init__()
        present = {name: model.get_parameter(name) for name in names}
        self.shapes = {name: parameter.shape for name, parameter in present.items()}
        self.base = NamedTensors(present if base is None else dict(base), persistent=False)
        self.resting: frozenset[str] = frozenset()  # buffers that lie in a file

    @property
    def names(self) -> tuple[str, ...]:
        """The parameters that make up a part."""
        return tuple(self.shapes)

    def extend(self, model: nn.Module, names: Iterable[str]) -> None:
        """Parts that are kept from now on have these parameters too; earlier parts are as they were."""
        self.shapes |= {name: model.get_parameter(name).shape for name in names}

    @property
    def domains(self) -> list[int]:
        """The domains that have a part, by their place in the order, ascending."""
        return sorted({int(name.partition(":")[0]) for name in self.named()})

    def keep(self, model: nn.Module, domain: int) -> None:
        """Makes the model's part, as it is now, that of a domain."""
        self.update({f"{domain}:{name}": model.get_parameter(name) for name in self.names})

    def weights(self, domain: int) -> dict[str, Tensor]:
        """The part of a domain, or of the BASE, by the names of the model's parameters, where the module is:
        what rests in a file or on the CPU is read to there."""
        if domain == BASE:
            return {name: self.base.at_hand(each) for name, each in self.base.named().items()}
        named, own = self.named(), f"{domain}:"
        return {name.removeprefix(own): self.at_hand(named[name]) for name in named if name.startswith(own)}

    def rest(self, stored: Mapping[str, Tensor]) -> None:
        """Has parts lie in a file from now on: `stored` are the same tensors by the names of the buffers,
        mapped from it. What the file has not got, or has in shards, stays in memory."""
        self.resting = frozenset(
            name
            for name, own in self._buffers.items()
            if type(own) is Tensor and name in stored and stored[name].shape == own.shape
        )
        self._buffers |= {name: stored[name] for name in self.resting}

    def take_mapped(self, stored: Mapping[str, Tensor]) -> None:
        """Has these parts and no others, by the names of the buffers, in the file that they are mapped
        from."""
        self._buffers, self.resting = {**stored}, frozenset(stored)

    def shard(self, parameters: Mapping[str, Tensor]) -> None:
        super().shard(parameters)
        self.resting = frozenset(name for name in self.resting if not is_sharded(self._buffers[name]))

    def _apply(self, fn: Any, recurse: bool = True) -> "Bank":
        # What rests in a file stays there, whatever device the others go to.
        order, resting = list(self._buffers), {name: self._buffers.pop(name) for name in self.resting}
        super()._apply(fn, recurse)
        self._buffers = {name: resting.get(name, self._buffers.get(name)) for name in order}
        return self

    def _load_from_state_dict(self, *args: Any) -> None:
        self.resting = frozenset()
        super()._load_from_state_dict(*args)

    @torch.no_grad()
    def put(self, model: nn.Module, domain: int) -> None:
        """Puts the part of a domain, or of the BASE, into a model."""
        for name, values in self.weights(domain).items():
            model.get_parameter(name).copy_(values)

    def parameter_of(self, name: str) -> str:
        return name.partition(":")[2]

    def room(self, name: str, stored: Tensor) -> Tensor:
        # Of the parameter's shape, on the module's device and in its type.
        parameter, base = name.partition(":")[2], self.base.named()
        like = base.get(parameter, next(iter(base.values())))
        if is_sharded(stored):
            return torch.empty_like(stored, dtype=like.dtype)
        return like.new_empty(self.shapes.get(parameter, stored.shape))


def banks_of(module: nn.Module) -> dict[str, Bank]:
    """The banks in a module, by name."""
    return {name: each for name, each in module.named_modules() if isinstance(each, Bank)}


def rest_parts(module: nn.Module, path: Path) -> None:
    """Has the parts that a module keeps lie in the file of its state, which is mapped into memory: the system
    reads of it what is used, and may forget it again."""
    banks = banks_of(module)
    if not banks or not path.is_file():
        return
    stored = load_tensors(path)
    for prefix, bank in banks.items():
        own = {name: f"{prefix}.{name}" for name in bank._buffers}
        bank.rest({name: stored[whole] for name, whole in own.items() if whole in stored})


def load_resting(module: nn.Module, stored: Mapping[str, Tensor]) -> None:
    """Loads a state that is mapped from its file, where the parts that the module keeps stay. Those that are
    shared out are read."""
    state = dict(stored)
    resting = {
        bank: {name: state.pop(name) for name in [*state] if name.startswith(f"{prefix}.")}
        for prefix, bank in banks_of(module).items()
        if not bank.layout
    }
    module.load_state_dict(state)
    for bank, own in resting.items():
        bank.take_mapped({name.rpartition(".")[2]: each for name, each in own.items()})


def resting_in(module: nn.Module) -> list[Tensor]:
    """The tensors of a module that lie in a file."""
    return [bank._buffers[name] for bank in banks_of(module).values() for name in bank.resting]


def in_memory(module: nn.Module) -> list[Tensor]:
    """The parameters and buffers of a module that lie in no file."""
    resting = {id(each) for each in resting_in(module)}
    return [each for each in (*module.parameters(), *module.buffers()) if id(each) not in resting]
