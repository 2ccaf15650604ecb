"""What every method shares: plain further pre-training, with the places where a method differs.

A method overrides the small hooks below `ContinualModule`'s constructor; `cpt.methods.staged`, which alone
touches Lightning's, calls them."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from transformers import PreTrainedModel

from cpt.adapters.domain_store import DomainParams, DomainScorer, Router, Scope
from cpt.adapters.options import Routing
from cpt.core.randomness import key
from cpt.core.schema import Options
from cpt.data.collate import Batch
from cpt.data.datamodule import Domain, DomainSequence
from cpt.data.replay import ReplayConfig
from cpt.evaluation.perplexity import DocumentNLL
from cpt.gradient_masks.base import Before, GradientMask, Held, Protection
from cpt.methods.staged import Staged
from cpt.models.objectives import Objective
from cpt.models.options import Freeze
from cpt.models.weights import Snapshot, frozen_parameters
from cpt.optim.nan_guard import NanGuard
from cpt.optim.schedulers import Progress
from cpt.optim.state import CarriedState


@dataclass(frozen=True, kw_only=True)
class Shared:
    """What a run gives every method beside its own options."""

    model: PreTrainedModel
    objective: Objective
    length: int  # tokens of a sample
    masks: Sequence[GradientMask]  # of the config; a method's own come after them
    replay: ReplayConfig
    freeze: Freeze
    optimizer: Callable[..., Optimizer]  # of parameter groups
    schedule: Callable[[Progress], float]
    seed: int


class ContinualModule(Staged):
    """Learns a sequence of domains by plain further pre-training. A method overrides what it changes.

    All that the method knows is in its `state_dict`: state is a buffer, neutral at construction. `scope` says
    what of the model the method trains where that is not all of it. A method with a part of the model per
    domain calls `keep_parts`: what is kept, scored and handed on is then the part that belongs to a domain.
    """

    needs_all = False  # whether all domains must be known before the first is learned
    alone = False  # whether each domain is learned from the base, so that its model stands for it alone

    counts_steps = False  # whether a step depends on how many the domain has, beyond its rate
    period = 1  # steps after which what a step computes is the same again

    needs_32_bits = False  # whether weights that are shared out must not be coarser

    options: Options

    def __init__(self, options: Options, shared: Shared, *, scope: Scope | None = None) -> None:
        super().__init__()
        self.options, self.scope = options, scope
        self.model, self.objective, self.length = shared.model, shared.objective, shared.length
        self.masks = cast(list[GradientMask], nn.ModuleList(shared.masks))
        self.replay, self.freezing = shared.replay, shared.freeze
        self.beside = nn.ModuleDict()  # the companions by name
        self.make_optimizer, self.schedule, self.seed = shared.optimizer, shared.schedule, shared.seed
        self.carried: CarriedState | None = None
        self.trunk: Snapshot | None = None  # where a domain's decay is a branch
        self.bank: DomainParams | None = None
        self.router: DomainScorer | None = None
        self.guard = NanGuard()
        self.pending: list[Before] = []
        self.held: list[Held] = []
        self.shaped: list[Domain] = []  # the stages whose shape the model has
        self.evaluation: dict[str, DocumentNLL] = {}
        self.columns: list[str] = []  # texts by the number that batches of an evaluation know them by
        self.watch()

    def watch(self) -> None:
        """Shows the masks what is trained of the model as it is now."""
        for mask in self.masks:
            mask.watch(self.model, self.scope.maps if self.scope else None)

    @property
    def frozen(self) -> list[nn.Parameter]:
        """What of the model as it is now is not trained, whatever the method."""
        inside = self.scope.others(self.model) if self.scope else []
        return frozen_parameters(self.model, self.freezing) + inside

    def keep_parts(self, bank: DomainParams, routing: Routing) -> None:
        """Keeps a part per domain from now on, and scores texts with the parts that the routing says."""
        self.bank, self.router = bank, Router(bank, routing, self.objective)

    def companions(self) -> dict[str, nn.Module]:
        """Other models that the method trains or keeps, by name: teachers, fast learners, generators. Asked
        for once, when the method is made; then they are in `self.beside`, go where the model goes, and are
        in the state_dict. What of them requires a gradient is trained; one without any is always in eval
        mode. What is masked, frozen, scored and exported is the model alone, unless the method says more."""
        return {}

    def train(self, mode: bool = True) -> "ContinualModule":
        super().train(mode)
        for each in self.beside.values():
            each.train(mode and any(parameter.requires_grad for parameter in each.parameters()))
        return self

    @property
    def needs_domain(self) -> bool:
        """Whether `nll` must be told the domain of a text that has been learned."""
        return self.router is not None and self.router.needs_domain

    def stages(self, order: Sequence[str]) -> list[Domain]:
        """What is learned, one stage after another: each domain of the order."""
        return [Domain(name, index, (name,)) for index, name in enumerate(order)]

    def shape(self, stage: Domain) -> None:
        """Grows the model for a stage: blocks, heads, rows; sees no data. Called once per stage, in order,
        before the optimizer is made, and for a resumed run for all stages so far before their state is
        loaded: what it makes depends on the stage, and what it draws is a function of seed and stage. What
        is to be trained must be in the `scope`, if there is one."""

    def activate(self, domain: int) -> None:
        """Switches experts, adapters, requires_grad for a domain; sees no data; idempotent. Here: freezes
        what the config says."""
        for parameter in self.frozen:
            parameter.requires_grad_(False)

    def before_domain(self, probe: Iterable[Batch]) -> None:
        """Work before a domain's first step; not repeated when the domain is resumed."""

    def losses(self, batch: Batch) -> dict[str, Tensor]:
        """Named terms, scalars; their sum is minimised. Their mean over processes and accumulated parts
        counts."""
        return {"lm": self.objective.nll(self.model, batch).sum() * batch["weight"]}

    def see_gradients(self) -> None:
        """Looks at the gradients of an optimizer step, averaged over all processes and accumulated parts,
        before masks change them."""

    def gradients(self, optimizer: Optimizer) -> None:
        """Changes the gradients of an optimizer step: once, when those of all processes and accumulated parts
        are averaged in `parameter.grad`, after masks on gradients, before clipping. Processes must agree on
        what they make of them. A step may still be left out, so that only `after_update` may count steps."""

    def after_update(self) -> None:
        """Work after an optimizer step, masks applied: once, however many parts its batch came in."""

    def after_domain(self, probe: Iterable[Batch]) -> None:
        """Work after a domain's last step, in eval mode and with gradients cleared before and after. The
        probes are batches on the module's device, the process's share of them; it may be empty. Here: keeps
        the domain's part, if the model has parts."""
        if self.bank is not None:
            self.bank.keep(self.model, self.domain.index)

    def nll(self, batch: Batch, domain: int) -> tuple[Tensor, Tensor]:
        """Sum of the negative log-likelihood (nats) and number of predictions at each scored position, both
        [K], for text of the domain with this place in the order (-1: general text)."""
        score = self.objective.nll if self.router is None else partial(self.router.nll, domain=domain)
        nll = score(self.model, batch)
        return nll, torch.ones_like(nll)

    def used(self, domain: int) -> dict[int, float]:
        """Which parts scored the text of a domain in the last evaluation, by the domains that they belong to
        (-1: the base), with weights whose sum is 1; nothing where the model is not in parts. Asked by every
        process."""
        return {} if self.router is None else self.router.used(domain)

    @property
    def in_sequence(self) -> bool:
        """Whether what is scored depends on the rows before it."""
        return self.router is not None and self.router.in_sequence

    def lasting(self, domain: int) -> int | None:
        """The part that alone decides what text of a domain scores, by the domain that it belongs to (-1: the
        base), where nothing beside parts is ever trained: it scores the same until it is trained itself. None
        where more decides."""
        alone = type(self).nll is ContinualModule.nll and type(self.router) is Router
        if not alone or type(self.bank) is not DomainParams or self.scope is None:
            return None
        if not set(self.scope.names) <= set(self.bank.names):
            return None
        parts = cast(Router, self.router).mixed(domain)
        return parts[0] if len(parts) == 1 else None

    def backbone(self, domain: int) -> PreTrainedModel:
        """The model that stands for a domain: what is exported and what an end task fine-tunes a copy of.

        Of a method that trains parts it is a copy already, in which all is trainable."""
        if self.scope is None:
            return self.model
        copy = deepcopy(self.model).requires_grad_(True)
        if self.bank is not None:
            self.bank.put(copy, domain)
        return copy

    def export(self, folder: Path, order: Sequence[str]) -> str:
        """Writes the model for others to load, after the domains of the order have been learned; gives the
        Python expression that loads it."""
        last = self.backbone(len(order) - 1)
        last.save_pretrained(folder)
        return f'transformers.{type(last).__name__}.from_pretrained("{folder}")'

    def protects(self) -> dict[nn.Parameter, Protection]:
        """What of a movement lies inside what is protected for the whole domain, by parameter: how much moves
        there is measured. Here: what the masks say, of the first that protects a parameter."""
        found: dict[nn.Parameter, Protection] = {}
        for mask in self.masks:
            found = mask.protects() | found
        return found

    def diagnostics(self) -> dict[str, Tensor]:
        """What there is to look at after a domain, by name; kept in the run folder."""
        return {name: values for mask in self.masks for name, values in mask.diagnostics().items()}

    @property
    def domain(self) -> Domain:
        """The domain that is being learned, or was the last."""
        data: DomainSequence = self.trainer.datamodule  # type: ignore[attr-defined]  # Lightning sets it
        return data.domain

    def drawing(self) -> torch.Generator:
        """For what is drawn before a domain and must be alike in all processes; draws on the CPU."""
        return torch.Generator().manual_seed(key(self.seed, self.domain.name, "alike") % 2**63)

    @property
    def progress(self) -> float:
        """How much of the domain's steps is done: 0 at the first of them, 1 at the last."""
        return self.trainer.global_step / max(1, self.trainer.max_steps - 1)

    def rates(self) -> dict[nn.Parameter, float]:
        """Parameters that learn at a multiple of the learning rate. Here: none."""
        return {}

    def parameter_groups(self) -> Iterator[dict]:
        """What is trained, as an optimizer takes it: matrices, and all else, which does not decay, with what
        their learning rate is multiplied by."""
        rates = self.rates()
        for times in dict.fromkeys([1, *rates.values()]):
            own = [p for p in self.parameters() if p.requires_grad and rates.get(p, 1) == times]
            yield {"params": [p for p in own if p.ndim >= 2], "times": times}
            yield {"params": [p for p in own if p.ndim < 2], "times": times, "weight_decay": 0.0}
