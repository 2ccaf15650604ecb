"""Prompt tuning (Lester, Al-Rfou and Constant, EMNLP 2021): the model is frozen, and n vectors learn
that stand among a text's embeddings.

    min_P  -log p(y | [e(x_1); P; e(x_2); ...; e(x_T)]),    P [n, D]

P stands behind the first token (`cpt.adapters.prompt`), in the paper before the text. Each domain has its own
prompt (Prompt-ONE), or one learns on through all of them; without a prompt the model is the base. In the
released code (ContinualLM) pre-training fails for want of a module; it would put the prompt behind the text,
after positions have been added, add positions again, and leave a prompt's vector where classifiers read
<s>."""

from collections.abc import Iterable, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from cpt.adapters import export
from cpt.adapters.bank import BASE, Bank
from cpt.adapters.prompt import attach, drawn
from cpt.adapters.routing import Routing
from cpt.core.options import choice
from cpt.data.batch import Batch
from cpt.methods.base import ContinualModule
from cpt.models.loading import positions_of
from cpt.models.objectives import Causal, Objective
from cpt.models.swapping import swapped

STARTS = ("vocabulary", "previous")
ONLY = 0  # where the bank keeps the one prompt of all domains


class Prompt(ContinualModule):
    """Trains a prompt for each domain, or one for all of them, and nothing else."""

    def __init__(
        self,
        *,
        tokens: int,
        per_domain: bool,
        start: str,
        routing: Routing,
        model: PreTrainedModel,
        objective: Objective,
        length: int,
        **shared: Any,
    ) -> None:
        check_tokens(tokens, length=length, model=model)
        start = choice("start", start, allowed=STARTS)
        options = {"tokens": tokens, "causal": isinstance(objective, Causal)}
        scope = attach(model, **options)
        super().__init__(model=model, objective=objective, length=length, scope=scope, **shared)
        [self.name] = scope.names
        self.options, self.start, self.per_domain = options, start, per_domain
        bank = Bank(model, scope.names, base={self.name: self.prompt[:0]})
        if per_domain:
            self.keep_parts(bank, routing)
        else:
            self.bank = bank

    @property
    def prompt(self) -> nn.Parameter:
        """The prompt that learns, [n, D]."""
        return self.model.get_parameter(self.name)

    @torch.no_grad()
    def before_domain(self, probe: Iterable[Batch]) -> None:
        if self.per_domain and self.start == "vocabulary":
            self.prompt.copy_(drawn(self.model, len(self.prompt), self.drawing()))

    def after_domain(self, probe: Iterable[Batch]) -> None:
        self.bank.keep(self.model, self.place(self.domain.index))

    def place(self, domain: int) -> int:
        """Where the bank has a domain's prompt."""
        return domain if self.per_domain else ONLY

    def weights(self, domain: int) -> dict[str, Tensor]:
        """The prompt of a domain, that of the base where there is none."""
        place = self.place(domain)
        return self.bank.weights(place if place in self.bank.domains else BASE)

    def nll(self, batch: Batch, domain: int) -> tuple[Tensor, Tensor]:
        if self.per_domain:
            return super().nll(batch, domain)
        with swapped(self.model, self.weights(domain)):
            nll = self.objective.nll(self.model, batch)
        return nll, torch.ones_like(nll)

    def backbone(self, domain: int) -> PreTrainedModel:
        copy = deepcopy(self.model).requires_grad_(True)
        owner, _, name = self.name.rpartition(".")
        setattr(copy.get_submodule(owner), name, nn.Parameter(self.weights(domain)[self.name].clone()))
        return copy

    def export(self, folder: Path, order: Sequence[str]) -> str:
        names = order if self.per_domain else order[-1:]
        parts = {name: self.weights(number) for number, name in enumerate(names)}
        return export.export(folder, self.model, parts, attach=attach, options=self.options)


def check_tokens(tokens: int, *, length: int, model: PreTrainedModel) -> None:
    """Raises ValueError where a prompt and the samples are longer than the model's positions."""
    limit = positions_of(model)
    most = "or more" if limit is None else f"to {limit - length}, the positions beyond model.length={length}"
    whole = isinstance(tokens, int) and not isinstance(tokens, bool) and tokens >= 0
    if not whole or (limit is not None and length + tokens > limit):
        raise ValueError(f"method.tokens={tokens}; allowed: a whole number, 0 {most}")
