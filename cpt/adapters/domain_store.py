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
MIN_RELATIVE_WEIGHT = 1e-3  # of a source that `routing_weights` lists, relative to the largest weight


@dataclass(frozen=True)
class Scope:
    """What of a model is trained: the names of its parameters, and the linear layers among them."""

    names: tuple[str, ...]
    projections: tuple[Projection, ...]

    def others(self, model: nn.Module) -> list[nn.Parameter]:
        """The parameters of a model outside of the scope."""
        scope_ids = {id(model.get_parameter(name)) for name in self.names}
        return [parameter for parameter in model.parameters() if id(parameter) not in scope_ids]


class DomainParams(NamedTensors):
    """Some of a model's parameters by name for each trained domain; the base's are in no state_dict."""

    def __init__(
        self, model: nn.Module, names: Iterable[str], *, base: Mapping[str, Tensor] | None = None
    ) -> None:
        super().__init__()
        parameters = {name: model.get_parameter(name) for name in names}
        self.names = tuple(parameters)
        # By default the model at construction. Not in a state_dict: the construction gives it again.
        self.base = NamedTensors(parameters if base is None else dict(base), persistent=False)
        self.mapped_names: frozenset[str] = frozenset()  # of buffers that are memory-mapped from a file

    @property
    def domains(self) -> list[int]:
        """The domains with parameters, by their place in the order, ascending."""
        return sorted({int(name.partition(":")[0]) for name in self.named()})

    def capture(self, model: nn.Module, domain: int) -> None:
        """Stores the model's parameters as those of a domain."""
        self.update({f"{domain}:{name}": model.get_parameter(name) for name in self.names})

    def weights(self, domain: int) -> dict[str, Tensor]:
        """The parameters of a domain, or of the BASE, by name, on the module's device."""
        if domain == BASE:
            return {name: self.base.on_module_device(tensor) for name, tensor in self.base.named().items()}

        # Stored as `DOMAIN:NAME`. Only this domain's are copied to the device.
        weights = {}
        for stored_name, tensor in self.named().items():
            number, _, name = stored_name.partition(":")
            if number == str(domain):
                weights[name] = self.on_module_device(tensor)
        return weights

    @torch.no_grad()
    def load_into(self, model: nn.Module, domain: int) -> None:
        """Copies the parameters of a domain, or of the BASE, into a model."""
        for name, values in self.weights(domain).items():
            model.get_parameter(name).copy_(values)

    def map_to(self, stored: Mapping[str, Tensor], *, replaces_all: bool = False) -> None:
        """Replaces buffers by tensors of the same values that are mapped from a file, by name. A buffer that
        the file lacks, or that is sharded, stays in memory. With `replaces_all` the mapped tensors are all
        buffers afterwards, also those of names that were not there before."""
        if replaces_all:
            self.mapped_names = frozenset(stored)
            self._buffers = dict(stored)
            return
        replaced: dict[str, Tensor] = {}
        for name, tensor in self._buffers.items():
            if type(tensor) is Tensor and name in stored and stored[name].shape == tensor.shape:
                replaced[name] = stored[name]
        self.mapped_names = frozenset(replaced)
        self._buffers.update(replaced)

    def shard(self, parameters: Mapping[str, Tensor]) -> None:
        super().shard(parameters)
        self.mapped_names = frozenset(
            name for name in self.mapped_names if not is_sharded(self._buffers[name])
        )

    def _apply(self, fn: Any, recurse: bool = True) -> "DomainParams":
        # Parameters that are mapped from a file stay there, whatever device the others move to.
        names = list(self._buffers)
        mapped = {name: self._buffers.pop(name) for name in self.mapped_names}
        super()._apply(fn, recurse)
        self._buffers = {name: mapped.get(name, self._buffers.get(name)) for name in names}
        return self

    def _load_from_state_dict(self, *args: Any) -> None:
        self.mapped_names = frozenset()
        super()._load_from_state_dict(*args)

    def parameter_of(self, name: str) -> str:
        # A buffer is called `DOMAIN:NAME`.
        return name.partition(":")[2]


def find_domain_params(module: nn.Module) -> dict[str, DomainParams]:
    """The stores of parameters per domain in a module, by name."""
    return {name: part for name, part in module.named_modules() if isinstance(part, DomainParams)}


def load_mapped(module: nn.Module, stored: Mapping[str, Tensor]) -> None:
    """Loads a state that is mapped from its file, where stored parameters stay mapped unless sharded."""
    state = dict(stored)
    mapped: dict[DomainParams, dict[str, Tensor]] = {}
    for prefix, domain_params in find_domain_params(module).items():
        if domain_params.layout:  # sharded
            continue
        names = [name for name in state if name.startswith(f"{prefix}.")]
        mapped[domain_params] = {name.rpartition(".")[2]: state.pop(name) for name in names}
    # After the rest is loaded: a store that finds nothing in a state becomes empty, and unmapped.
    module.load_state_dict(state)
    for domain_params, tensors in mapped.items():
        domain_params.map_to(tensors, replaces_all=True)


def list_tensors_in_memory(module: nn.Module) -> list[Tensor]:
    """The parameters and buffers of a module that are not mapped from a file."""
    mapped = set()
    for domain_params in find_domain_params(module).values():
        mapped |= {id(domain_params._buffers[name]) for name in domain_params.mapped_names}
    return [tensor for tensor in (*module.parameters(), *module.buffers()) if id(tensor) not in mapped]


class DomainScorer(ABC):
    """Scores texts with parameters of domains, and records which it used for each text."""

    needs_domain = False  # whether a text's domain must be known at test time
    in_sequence = False  # whether a row's score depends on the rows before it

    def __init__(self) -> None:
        # By a text's domain and by source: the sum of the source's weights over positions.
        self.recorded: dict[int, dict[int, Tensor]] = {}

    @property
    @abstractmethod
    def all_sources(self) -> list[int]:
        """All domains with parameters, and the BASE."""

    @abstractmethod
    def nll(self, model: PreTrainedModel, batch: Batch, domain: int) -> Tensor:
        """Negative log-likelihood (nats) at the scored positions, [K], of a batch of a domain's text."""

    def start_evaluation(self) -> None:
        """Forgets what was recorded."""
        self.recorded.clear()

    def record_weights(self, domain: int, sources: list[int], weights: Tensor) -> None:
        """Adds the weights [n, K] with which n sources scored K positions of a domain's text."""
        sums = self.recorded.setdefault(domain, {})
        batch_sums = weights.detach().sum(1, dtype=torch.double)  # [n]
        for source, batch_sum in zip(sources, batch_sums, strict=True):
            sums[source] = sums.get(source, 0) + batch_sum

    def routing_weights(self, domain: int) -> dict[int, float]:
        """The sources that scored a domain's text, with their mean weights over the positions of all
        processes, which sum to 1, without sources of less than a thousandth of the largest. A collective."""
        # All sources, also those that this process has not used: all processes must send as many numbers.
        recorded = self.recorded.get(domain, {})
        local_sums = [float(recorded.get(source, 0)) for source in self.all_sources]
        sums = sum_on_cpu(torch.tensor(local_sums, dtype=torch.double))
        sums = torch.where(sums < MIN_RELATIVE_WEIGHT * sums.max(), 0, sums)
        shares = (sums / sums.sum()).tolist()
        return {source: share for source, share in zip(self.all_sources, shares, strict=True) if share > 0}


class Router(DomainScorer):
    """Scores texts with the stored parameters of domains, by the rules of `Routing`."""

    def __init__(self, domain_params: DomainParams, routing: Routing, objective: Objective) -> None:
        super().__init__()
        self.domain_params = domain_params
        self.routing = routing
        self.objective = objective
        # With learned=domain, text of a trained domain is scored with the parameters of that domain, which
        # then has to be known. The other rules find sources without it.
        self.needs_domain = routing.learned == "domain"
        # Every prior but the uniform one is computed from the rows of a text that were scored before.
        self.in_sequence = routing.prior != "uniform"

        # The text that is being scored, by its domain and its n sources: batches follow each other text by
        # text, and a domain that is trained in between changes the sources. None before the first text.
        self.current_text_key: tuple[int, list[int]] | None = None
        self.prior = torch.empty(0)  # of the sources, for the next row of this text, [n]
        # With prior=cached: the number of rows of this text that are counted so far, at most
        # `routing.cached`, and the sum of their posteriors, [n].
        self.num_cached_rows = 0
        self.posterior_sum = torch.empty(0)

    @property
    def all_sources(self) -> list[int]:
        return [BASE, *self.domain_params.domains]

    def rule(self, domain: int) -> str:
        """The routing's value for text of a domain."""
        return self.routing.learned if domain in self.domain_params.domains else self.routing.unlearned

    def sources(self, domain: int) -> list[int]:
        """The domains (or BASE) whose parameters score text of a domain: one, or those of the mixture."""
        rule = self.rule(domain)
        if rule == "domain":
            return [domain]
        if rule == "base":
            return [BASE]
        if rule == "last":
            return self.all_sources[-1:]
        # A mixture. Before the first domain it is of the base, whatever the routing says.
        if self.routing.base or len(self.all_sources) == 1:
            return self.all_sources
        return self.all_sources[1:]

    def start_evaluation(self) -> None:
        super().start_evaluation()
        self.current_text_key = None

    def start_text(self, domain: int, sources: list[int], device: torch.device) -> None:
        """Starts a text of a domain with the uniform prior over its sources, and without recorded weights."""
        self.current_text_key = (domain, sources)
        self.recorded[domain] = {}
        self.prior = torch.full((len(sources),), 1 / len(sources), dtype=torch.double, device=device)
        self.num_cached_rows = 0
        self.posterior_sum = torch.zeros_like(self.prior)

    def nll(self, model: PreTrainedModel, batch: Batch, domain: int) -> Tensor:
        # The prior moves from row to row of one text; the next text starts with the uniform one again.
        sources = self.sources(domain)
        if self.current_text_key != (domain, sources):
            self.start_text(domain, sources, batch["positions"].device)

        log_likelihoods = []
        for source in sources:
            with swap_weights(model, self.domain_params.weights(source)):
                log_likelihoods.append(-self.objective.nll(model, batch))
        log_likelihood = torch.stack(log_likelihoods)
        if len(sources) == 1:
            self.record_weights(domain, sources, torch.ones_like(log_likelihood))
            return -log_likelihood[0]

        top_k = 1 if self.rule(domain) == "nearest" else self.routing.top_k
        log_weights = self.weigh_and_move_prior(log_likelihood, batch["rows"], top_k=top_k)
        self.record_weights(domain, sources, log_weights.exp())
        # -log sum_j p(D = j | x_<i) p(x_i | x_<i, D = j)
        return -torch.logsumexp(log_weights + log_likelihood, dim=0)

    def weigh_and_move_prior(self, log_likelihood: Tensor, rows: Tensor, *, top_k: int | None) -> Tensor:
        """The log weights [n, K] of n sources at K scored positions: the log posteriors given the earlier
        scored positions of the same row, of the `top_k` most probable sources (None: of all).
        `log_likelihood` [n, K] is that of each source at each position, `rows` [K] the ascending numbers of
        the rows that the positions are in. After each row `self.prior` moves to that of the next row."""
        # `row` [K] numbers the R rows with a scored position from 0; `row_sizes` [R] are their positions.
        _, row, row_sizes = rows.unique_consecutive(return_inverse=True, return_counts=True)

        # log p(x_<i | D = j): running sums over the whole batch, minus those before the row.
        sums = log_likelihood.double().cumsum(1)
        row_ends = sums[:, row_sizes.cumsum(0) - 1]  # [n, R]
        row_starts = torch.cat([row_ends.new_zeros(len(row_ends), 1), row_ends[:, :-1]], dim=1)
        sums_before = sums - log_likelihood - row_starts[:, row]  # within the row, without its own position
        row_totals = row_ends - row_starts

        # One row after another: the prior of a row may depend on the rows before it.
        log_priors = torch.empty_like(row_totals)
        for number, row_total in enumerate(row_totals.unbind(1)):
            log_priors[:, number] = self.prior.log()
            self.move_prior(row_total)
        log_weights = (sums_before + log_priors[:, row]).log_softmax(0)
        if top_k is not None:
            log_weights = keep_largest(log_weights, top_k)
        return log_weights.to(log_likelihood)

    def move_prior(self, log_likelihoods: Tensor) -> None:
        """Moves the prior after a row of a text, from its log-likelihoods [n], one of each source."""
        # A cached prior is fixed after `cached` rows. With an updating prior num_cached_rows stays 0, and
        # `cached` is at least 1: the second condition is then never true.
        if self.routing.prior == "uniform" or self.num_cached_rows == self.routing.cached:
            return
        posterior = (self.prior.log() + log_likelihoods).softmax(0)
        if self.routing.prior == "updating":
            self.prior = torch.lerp(self.prior, posterior, self.routing.decay)
            return
        self.num_cached_rows += 1
        self.posterior_sum = self.posterior_sum + posterior
        if self.num_cached_rows == self.routing.cached:
            self.prior = self.posterior_sum / self.num_cached_rows


def keep_largest(log_weights: Tensor, count: int) -> Tensor:
    """Log weights [n, K] in which the `count` largest of each position are scaled to a sum of 1, and all
    other weights are 0. Among equal weights the first sources count as larger.

    >>> keep_largest(torch.tensor([[0.5], [0.3], [0.2]]).log(), 2).exp()
    tensor([[0.6250],
            [0.3750],
            [0.0000]])
    """
    # A stable sort, as topk does not say which of equals it takes.
    largest = log_weights.sort(dim=0, descending=True, stable=True).indices[:count]
    selected = torch.full_like(log_weights, -torch.inf)
    selected.scatter_(0, largest, log_weights.gather(0, largest))
    return selected.log_softmax(0)
