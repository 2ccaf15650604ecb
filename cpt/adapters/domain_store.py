"""Per-domain parameters and their routing.

The model holds the active domain's parameters; those of other domains are stored frozen and can be swapped in
for one forward pass or permanently. A text is scored with its domain's own, the base's, the last ones, or a
mixture by Bayes as in DEMIX (Gururangan et al., NAACL 2022, section 5): with experts j and a prior over them,

    p(x_i | x_<i) = sum_j p(x_i | x_<i, D = j) p(D = j | x_<i),    p(D = j | x_<i) ~ p(D = j) p(x_<i | D = j)

x_<i are the scored tokens before i in the same row."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from cpt.adapters.options import Routing
from cpt.core.distributed import is_sharded, sum_on_cpu
from cpt.core.tensors import NamedTensors
from cpt.data.collate import Batch
from cpt.models.objectives import Objective
from cpt.models.units import Projection
from cpt.models.weights import swap_weights

BASE = -1  # the parameters at construction, with which the model is the base


@dataclass(frozen=True)
class Scope:
    """What of a model is trained: the names of its parameters, and the linear layers among them."""

    names: tuple[str, ...]
    maps: tuple[Projection, ...]

    def others(self, model: nn.Module) -> list[nn.Parameter]:
        inside = {id(model.get_parameter(name)) for name in self.names}
        return [parameter for parameter in model.parameters() if id(parameter) not in inside]


class DomainParams(NamedTensors):
    """Some of a model's parameters by name for each trained domain; the base's are in no state_dict."""

    def __init__(
        self, model: nn.Module, names: Iterable[str], *, base: Mapping[str, Tensor] | None = None
    ) -> None:
        super().__init__()
        present = {name: model.get_parameter(name) for name in names}
        self.names = tuple(present)
        self.base = NamedTensors(present if base is None else dict(base), persistent=False)
        self.mapped: frozenset[str] = frozenset()  # buffers that are memory-mapped from a file

    @property
    def domains(self) -> list[int]:
        """The domains with parameters, by their place in the order, ascending."""
        return sorted({int(name.partition(":")[0]) for name in self.named()})

    def capture(self, model: nn.Module, domain: int) -> None:
        self.update({f"{domain}:{name}": model.get_parameter(name) for name in self.names})

    def weights(self, domain: int) -> dict[str, Tensor]:
        """The parameters of a domain, or of the BASE, by name, on the module's device."""
        if domain == BASE:
            return {name: self.base.on_module_device(each) for name, each in self.base.named().items()}
        named, own = self.named(), f"{domain}:"
        return {
            name.removeprefix(own): self.on_module_device(named[name])
            for name in named
            if name.startswith(own)
        }

    @torch.no_grad()
    def load_into(self, model: nn.Module, domain: int) -> None:
        for name, values in self.weights(domain).items():
            model.get_parameter(name).copy_(values)

    def map_to(self, stored: Mapping[str, Tensor], *, only: bool = False) -> None:
        """Replaces buffers by the same tensors mapped from a file, by name; what the file lacks, or has in
        shards, stays in memory. With `only`, the file's are all there are."""
        own = self._buffers.items()
        same = [n for n, t in own if type(t) is Tensor and n in stored and stored[n].shape == t.shape]
        self.mapped = frozenset(stored if only else same)
        self._buffers = {**stored} if only else self._buffers | {name: stored[name] for name in same}

    def shard(self, parameters: Mapping[str, Tensor]) -> None:
        super().shard(parameters)
        self.mapped = frozenset(name for name in self.mapped if not is_sharded(self._buffers[name]))

    def _apply(self, fn: Any, recurse: bool = True) -> "DomainParams":
        # What is mapped from a file stays there, whatever device the others go to.
        order, mapped = list(self._buffers), {name: self._buffers.pop(name) for name in self.mapped}
        super()._apply(fn, recurse)
        self._buffers = {name: mapped.get(name, self._buffers.get(name)) for name in order}
        return self

    def _load_from_state_dict(self, *args: Any) -> None:
        self.mapped = frozenset()
        super()._load_from_state_dict(*args)

    def parameter_of(self, name: str) -> str:
        return name.partition(":")[2]


def find_domain_params(module: nn.Module) -> dict[str, DomainParams]:
    return {name: each for name, each in module.named_modules() if isinstance(each, DomainParams)}


def load_mapped(module: nn.Module, stored: Mapping[str, Tensor]) -> None:
    """Loads a state that is mapped from its file, where stored parameters stay mapped unless sharded."""
    state, mapped = dict(stored), {}
    for prefix, each in find_domain_params(module).items():
        if not each.layout:
            mapped[each] = {name: state.pop(name) for name in [*state] if name.startswith(f"{prefix}.")}
    module.load_state_dict(state)
    for each, own in mapped.items():
        each.map_to({name.rpartition(".")[2]: tensor for name, tensor in own.items()}, only=True)


def in_memory(module: nn.Module) -> list[Tensor]:
    """The parameters and buffers of a module that are not mapped from a file."""
    mapped = {id(each._buffers[name]) for each in find_domain_params(module).values() for name in each.mapped}
    return [each for each in (*module.parameters(), *module.buffers()) if id(each) not in mapped]


class DomainScorer(ABC):
    """Scores texts with parameters of domains, and records which it used for each text."""

    needs_domain = False  # whether a text's domain must be known at test time
    in_sequence = False  # whether a row's score depends on the rows before it

    def __init__(self) -> None:
        self.taken: dict[int, dict[int, Tensor]] = {}  # by text's domain and part: weights over positions

    @property
    @abstractmethod
    def parts(self) -> list[int]:
        """All domains with parameters, and the BASE."""

    @abstractmethod
    def nll(self, model: PreTrainedModel, batch: Batch, domain: int) -> Tensor:
        """Negative log-likelihood (nats) at the scored positions, [K], of a batch of a domain's text."""

    def begin(self) -> None:
        """Starts an evaluation: forgets what was recorded."""
        self.taken.clear()

    def record_weights(self, domain: int, parts: list[int], weights: Tensor) -> None:
        """Records the weights [n, K] of the parts."""
        taken = self.taken.setdefault(domain, {})
        for part, weight in zip(parts, weights.detach().sum(1, dtype=torch.double), strict=True):
            taken[part] = taken.get(part, 0) + weight

    def routing_weights(self, domain: int) -> dict[int, float]:
        """The parts that scored a domain's text, with their mean weights over the positions of all processes,
        which sum to 1, without parts of less than a thousandth of the largest. A collective."""
        taken = self.taken.get(domain, {})
        own = [float(taken.get(part, 0)) for part in self.parts]
        sums = sum_on_cpu(torch.tensor(own, dtype=torch.double))
        kept = torch.where(sums < 1e-3 * sums.max(), 0, sums)
        shares = (kept / kept.sum()).tolist()
        return {part: share for part, share in zip(self.parts, shares, strict=True) if share > 0}


class Router(DomainScorer):
    """Scores texts with the stored parameters of domains, by the rules of `Routing`."""

    def __init__(self, domain_params: DomainParams, routing: Routing, objective: Objective) -> None:
        super().__init__()
        self.domain_params, self.routing, self.objective = domain_params, routing, objective
        self.needs_domain, self.in_sequence = routing.learned == "domain", routing.prior != "uniform"
        self.text: tuple[int, list[int]] | None = None  # being scored: its domain and parts
        self.rows = 0  # of it, that a cached prior is made of
        self.prior = torch.empty(0)  # of its parts, [n]
        self.cache = torch.empty(0)  # sum of the posteriors of a cached prior, [n]

    @property
    def parts(self) -> list[int]:
        return [BASE, *self.domain_params.domains]

    def rule(self, domain: int) -> str:
        """The routing's value for text of a domain."""
        return self.routing.learned if domain in self.domain_params.domains else self.routing.unlearned

    def mixed(self, domain: int) -> list[int]:
        """The parts that score text of a domain: one, or those of the mixture."""
        parts, rule = self.parts, self.rule(domain)
        alone = {"domain": domain, "base": BASE, "last": parts[-1]}
        mixture = parts if self.routing.base or len(parts) == 1 else parts[1:]
        return [alone[rule]] if rule in alone else mixture

    def begin(self) -> None:
        super().begin()
        self.text = None

    def nll(self, model: PreTrainedModel, batch: Batch, domain: int) -> Tensor:
        parts = self.mixed(domain)
        if self.text != (domain, parts):  # another text: from the uniform prior on
            self.text, self.rows, self.taken[domain] = (domain, parts), 0, {}
            device = batch["positions"].device
            self.prior = torch.full((len(parts),), 1 / len(parts), dtype=torch.double, device=device)
            self.cache = torch.zeros_like(self.prior)
        found = []
        for part in parts:
            with swap_weights(model, self.domain_params.weights(part)):
                found.append(-self.objective.nll(model, batch))
        likelihood = torch.stack(found)
        if len(parts) == 1:
            self.record_weights(domain, parts, torch.ones_like(likelihood))
            return -likelihood[0]
        top_k = 1 if self.rule(domain) == "nearest" else self.routing.top_k
        weights = self.weights(likelihood, batch["rows"], top_k=top_k)
        self.record_weights(domain, parts, weights.exp())
        return -torch.logsumexp(weights + likelihood, dim=0)

    def weights(self, likelihood: Tensor, rows: Tensor, *, top_k: int | None) -> Tensor:
        """Log weights [n, K] of n parts at positions of `rows` [K], ascending, from their log-likelihoods
        [n, K] there: the posteriors before each position. Moves the prior at the end of each row."""
        _, row, sizes = rows.unique_consecutive(return_inverse=True, return_counts=True)
        sums = likelihood.double().cumsum(1)
        ends = sums[:, sizes.cumsum(0) - 1]
        starts = torch.cat([ends.new_zeros(len(ends), 1), ends[:, :-1]], dim=1)
        before, totals = sums - likelihood - starts[:, row], ends - starts
        priors = torch.empty_like(totals)
        for place, total in enumerate(totals.unbind(1)):
            priors[:, place] = self.prior.log()
            if self.routing.prior == "uniform" or self.rows == self.routing.cached:
                continue
            posterior = (self.prior.log() + total).softmax(0)
            if self.routing.prior == "updating":
                self.prior = torch.lerp(self.prior, posterior, self.routing.decay)
                continue
            self.rows, self.cache = self.rows + 1, self.cache + posterior
            if self.rows == self.routing.cached:
                self.prior = self.cache / self.rows
        weights = (before + priors[:, row]).log_softmax(0)
        return (weights if top_k is None else keep_largest(weights, top_k)).to(likelihood)


def keep_largest(weights: Tensor, count: int) -> Tensor:
    """Log weights [n, K] of which the `count` largest, of equals the first, sum to 1 at each position."""
    best = weights.sort(dim=0, descending=True, stable=True).indices[:count]
    kept = torch.full_like(weights, -torch.inf).scatter(0, best, weights.gather(0, best))
    return kept.log_softmax(0)
