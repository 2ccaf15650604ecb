"""Prompt tuning (Lester, Al-Rfou and Constant, EMNLP 2021): the model is frozen, and n vectors among a text's
embeddings are trained.

    min_P  -log p(y | [e(x_1); P; e(x_2); ...; e(x_T)]),    P [n, D]

P follows the first token (`cpt.adapters.soft_prompt`); in the paper it precedes the text. Each domain has its
own prompt (Prompt-ONE), or all share one; without a prompt the model is the base. In the released code
(ContinualLM) pre-training fails on a missing module; it would put the prompt after the text and its
positions, add positions again, and leave a prompt vector where classifiers read <s>."""

from collections.abc import Iterable, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from cpt.adapters import export
from cpt.adapters.domain_store import BASE, DomainParams
from cpt.adapters.options import Routing
from cpt.adapters.soft_prompt import attach_prompt, draw_prompt
from cpt.data.collate import Batch
from cpt.methods.base import ContinualMethod, MethodContext
from cpt.methods.options import ProgPromptOptions, PromptOptions
from cpt.models.loading import positions_of
from cpt.models.weights import swap_weights

STARTS = ("vocabulary", "previous")
ONLY = 0  # the bank's place of a prompt for all domains


class PromptMethod(ContinualMethod):
    """Trains prompts only, which are stored per domain in a `store`."""

    bank: DomainParams

    def __init__(
        self,
        options: PromptOptions | ProgPromptOptions,
        context: MethodContext,
        store: type[DomainParams],
        *,
        method: str,
        routing: Routing | None,
    ) -> None:
        check_tokens(options.tokens, length=context.length, model=context.model)
        check_rows(context, method=method)
        self.prompting: dict[str, Any] = {"tokens": options.tokens, "causal": context.objective.causal}
        scope = attach_prompt(context.model, **self.prompting)
        super().__init__(options, context, scope=scope)
        [self.name] = scope.names
        self.bank = store(self.model, scope.names, base={self.name: self.prompt[:0]})
        if routing is not None:
            self.use_domain_params(self.bank, routing)

    @property
    def prompt(self) -> nn.Parameter:
        """The prompt in training, [n, D]."""
        return self.model.get_parameter(self.name)

    def weights(self, domain: int) -> dict[str, Tensor]:
        """The stored prompt that text of a domain is read with, by name."""
        return self.bank.weights(domain)

    def model_for(self, domain: int) -> PreTrainedModel:
        copy = deepcopy(self.model).requires_grad_(True)
        owner, _, name = self.name.rpartition(".")
        setattr(copy.get_submodule(owner), name, nn.Parameter(self.weights(domain)[self.name].clone()))
        return copy

    def export(self, folder: Path, order: Sequence[str]) -> str:
        parts = {name: self.weights(index) for index, name in enumerate(order)}
        return export.export_parts(folder, self.model, parts, attach=attach_prompt, options=self.prompting)


class Prompt(PromptMethod):
    """Trains a prompt for each domain, or one for all of them."""

    options: PromptOptions

    def __init__(self, options: PromptOptions, context: MethodContext) -> None:
        routing = options.routing if options.per_domain else None
        super().__init__(options, context, DomainParams, method="prompt", routing=routing)

    @torch.no_grad()
    def before_domain(self, probe: Iterable[Batch]) -> None:
        if self.options.per_domain and self.options.start == "vocabulary":
            self.prompt.copy_(draw_prompt(self.model, len(self.prompt), self.drawing()))

    def after_domain(self, probe: Iterable[Batch]) -> None:
        self.bank.keep(self.model, self.domain.index if self.options.per_domain else ONLY)

    def weights(self, domain: int) -> dict[str, Tensor]:
        place = domain if self.options.per_domain else ONLY
        return self.bank.weights(place if place in self.bank.domains else BASE)

    def nll(self, batch: Batch, domain: int) -> tuple[Tensor, Tensor]:
        if self.options.per_domain:
            return super().nll(batch, domain)
        with swap_weights(self.model, self.weights(domain)):
            nll = self.objective.nll(self.model, batch)
        return nll, torch.ones_like(nll)

    def export(self, folder: Path, order: Sequence[str]) -> str:
        return super().export(folder, order if self.options.per_domain else order[-1:])


def check_rows(context: MethodContext, *, method: str) -> None:
    """Raises ValueError where samples share rows."""
    if context.objective.sharing is not None or context.objective.isolated:
        raise ValueError(
            f"domains.packing=isolated does not go with method={method}, whose vectors stand behind the "
            "first token of a row; allowed: domains.packing=none of examples, concat of text"
        )


def check_tokens(tokens: int, *, length: int, model: PreTrainedModel, option: str = "method.tokens") -> None:
    """Raises ValueError where prompt and sample exceed the model's positions."""
    limit = positions_of(model)
    most = "or more" if limit is None else f"to {limit - length}, the positions beyond model.length={length}"
    if limit is not None and length + tokens > limit:
        raise ValueError(f"{option}={tokens}; allowed: a whole number, 0 {most}")
