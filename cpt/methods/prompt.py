"""Prompt tuning (Lester, Al-Rfou and Constant, EMNLP 2021): the model is frozen, and n vectors among a text's
embeddings are trained.

    min_P  -log p(y | [e(x_1); P; e(x_2); ...; e(x_T)]),    P [n, D]

P follows the first token (`cpt.adapters.soft_prompt`). Each domain has its own prompt (Prompt-ONE), or all
share one; without a prompt the model is the base."""

from collections.abc import Iterable, Sequence
from functools import partial
from typing import cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from cpt.adapters.domain_store import BASE, DomainParams
from cpt.adapters.options import Routing
from cpt.adapters.soft_prompt import PromptChain, attach_prompt, draw_prompt
from cpt.core.exceptions import InvalidOptionError
from cpt.core.messages import count_noun
from cpt.data.collate import Batch
from cpt.data.options import Domain
from cpt.methods.base import ContinualMethod, MethodContext
from cpt.methods.options import ProgPromptOptions, PromptOptions
from cpt.models.loading import find_max_positions
from cpt.models.narrow_layers import copy_trainable
from cpt.models.weights import swap_weights

SHARED_PROMPT_DOMAIN = 0  # the domain under which a prompt for all domains is stored
NEEDS_ROWS_REASON = "whose vectors follow the first token of a row"  # of `check_rows`


def copy_with_prompt(model: PreTrainedModel, name: str, prompt: Tensor) -> PreTrainedModel:
    """A trainable copy of a model with another prompt [n, D] as the parameter of this name."""
    copy = copy_trainable(model)
    owner, _, attribute = name.rpartition(".")
    setattr(copy.get_submodule(owner), attribute, nn.Parameter(prompt.detach().clone()))
    return copy


class PromptMethod(ContinualMethod):
    """Trains prompts only, which are stored per domain in a `store`."""

    keeps_base = True
    domain_params: DomainParams

    def __init__(
        self,
        options: PromptOptions | ProgPromptOptions,
        context: MethodContext,
        store: type[DomainParams],
        *,
        method: str,
        routing: Routing | None,
    ) -> None:
        check_tokens(options.num_virtual_tokens, length=context.length, model=context.model)
        check_rows(context, f"method={method}, {NEEDS_ROWS_REASON}")
        tokens = options.num_virtual_tokens
        causal = context.objective.causal
        scope = attach_prompt(context.model, tokens=tokens, causal=causal)
        super().__init__(options, context, scope=scope)

        self.attached = attach_prompt, {"tokens": tokens, "causal": causal}
        [self.name] = scope.names
        # The base's prompt is one of no vectors, with which the model is the base.
        self.domain_params = store(self.model, scope.names, base={self.name: self.prompt[:0]})
        if routing is not None:
            self.use_domain_params(self.domain_params, routing)

    @property
    def prompt(self) -> nn.Parameter:
        """The prompt in training, [n, D]."""
        return self.model.get_parameter(self.name)

    def weights(self, domain: int) -> dict[str, Tensor]:
        """The stored prompt that text of a domain is read with, by name."""
        return self.domain_params.weights(domain)

    def model_for(self, domain: int) -> PreTrainedModel:
        return copy_with_prompt(self.model, self.name, self.weights(domain)[self.name])

    def domain_modules(self, order: Sequence[str]) -> dict[str, dict[str, Tensor]]:
        return {name: self.weights(index) for index, name in enumerate(order)}


class Prompt(PromptMethod):
    """Trains a prompt for each domain, or one for all of them."""

    options: PromptOptions

    def __init__(self, options: PromptOptions, context: MethodContext) -> None:
        routing = options.routing if options.per_domain else None
        super().__init__(options, context, DomainParams, method="prompt", routing=routing)

    @torch.no_grad()
    def before_domain(self, importance_batches: Iterable[Batch]) -> None:
        if self.options.per_domain and self.options.start == "vocabulary":
            self.prompt.copy_(draw_prompt(self.model, len(self.prompt), self.make_generator()))

    def after_domain(self, importance_batches: Iterable[Batch]) -> None:
        domain = self.domain.index if self.options.per_domain else SHARED_PROMPT_DOMAIN
        self.domain_params.capture(self.model, domain)

    def weights(self, domain: int) -> dict[str, Tensor]:
        source = domain if self.options.per_domain else SHARED_PROMPT_DOMAIN
        if source not in self.domain_params.domains:
            source = BASE
        return self.domain_params.weights(source)

    def nll(self, batch: Batch, domain: int) -> tuple[Tensor, Tensor]:
        if self.options.per_domain:
            return super().nll(batch, domain)
        # Without a router, which reads text of an unknown domain with the base: all text has the one prompt.
        with swap_weights(self.model, self.weights(domain)):
            nll = self.objective.nll(self.model, batch)
        return nll, torch.ones_like(nll)

    def scoring_parameters(self, domain: int) -> dict[str, Tensor]:
        return super().scoring_parameters(domain) if self.options.per_domain else self.weights(domain)

    def domain_modules(self, order: Sequence[str]) -> dict[str, dict[str, Tensor]]:
        # One prompt for all domains is exported once, under the last one's name.
        return super().domain_modules(order if self.options.per_domain else order[-1:])


def check_rows(context: MethodContext, method: str) -> None:
    """Raises ValueError where samples share rows; `method` says why it needs a row for each."""
    if context.objective.sharing is not None or context.objective.isolated:
        raise InvalidOptionError(
            "domains.packing",
            "document_mask",
            reason=f"incompatible with {method}",
            allowed="domains.packing=none of examples, concat of text",
        )


def check_tokens(
    tokens: int,
    *,
    length: int,
    model: PreTrainedModel,
    option: str = "method.num_virtual_tokens",
    domains: int = 1,
) -> None:
    """Raises ValueError where prompts of `tokens` vectors for a number of domains, together with a sample of
    `length` tokens, need more positions than the model has."""
    max_positions = find_max_positions(model)  # None: any number
    if max_positions is not None and length + tokens * domains > max_positions:
        max_tokens = (max_positions - length) // domains
        raise InvalidOptionError(
            option,
            tokens,
            context=f"for {count_noun(domains, 'domain')}",
            allowed=f"0 to {max_tokens}, the positions beyond model.max_seq_length={length}",
        )


INIT_STD_OF_DOWN = 0.02  # of W_down before a domain


class ProgPrompt(PromptMethod):
    """Progressive Prompts (Razdaibiedina et al., ICLR 2023): the model is frozen, and each domain trains a
    prompt in front of the frozen prompts of the domains before it.

        min_{P_t}  -log p(y | [P_t; P_{t-1}; ...; P_1; e(x)]),    each P_k [n, D]

    Text of domain k is scored with the chain from P_k on, which later domains do not change. With `residual`,
    P_t is trained as P_t + W_up relu(W_down P_t), W_up initially 0; the result is stored."""

    options: ProgPromptOptions
    domain_params: PromptChain

    def __init__(self, options: ProgPromptOptions, context: MethodContext) -> None:
        super().__init__(options, context, PromptChain, method="progprompt", routing=options.routing)
        self.residual: nn.Sequential | None = None  # W_down, relu, W_up
        if options.residual is not None:
            width = self.prompt.shape[1]
            linear = partial(nn.Linear, device=self.prompt.device, dtype=self.prompt.dtype)
            down = linear(width, options.residual)
            up = linear(options.residual, width)
            self.residual = nn.Sequential(down, nn.ReLU(), up)

    def stages(self, order: Sequence[str]) -> list[Domain]:
        # The last domain's chain has a prompt of each.
        tokens = self.options.num_virtual_tokens
        check_tokens(tokens, length=self.length, model=self.model, domains=len(order))
        return super().stages(order)

    def residual_prompt(self) -> Tensor:
        """P_t as in the chain, [n, D]."""
        return self.prompt if self.residual is None else self.prompt + self.residual(self.prompt)

    def earlier_chain(self) -> Tensor | None:
        """[P_{t-1}; ...; P_1], [(t - 1) n, D]; None in the first domain."""
        earlier_domains = self.domain_params.before(self.domain.index)
        if not earlier_domains:
            return None
        return self.domain_params.weights(earlier_domains[-1])[self.name]

    @torch.no_grad()
    def before_domain(self, importance_batches: Iterable[Batch]) -> None:
        generator = self.make_generator()
        chain = self.earlier_chain()
        if self.options.start == "vocabulary":
            self.prompt.copy_(draw_prompt(self.model, len(self.prompt), generator))
        elif chain is not None:  # the last domain's prompt comes first in it
            self.prompt.copy_(chain[: len(self.prompt)])

        # New layers for each domain: those of the last one are part of its stored prompt.
        if self.residual is not None:
            for parameter in self.residual.parameters():
                parameter.zero_()
            down = cast(nn.Linear, self.residual[0]).weight
            down.copy_(INIT_STD_OF_DOWN * torch.randn(down.shape, generator=generator))

    def losses(self, batch: Batch) -> dict[str, Tensor]:
        chain = self.residual_prompt()
        earlier_chain = self.earlier_chain()
        if earlier_chain is not None:
            chain = torch.cat([chain, earlier_chain])
        with swap_weights(self.model, {self.name: chain}):  # [t n, D]; P_t has a gradient
            return super().losses(batch)

    @torch.no_grad()
    def after_domain(self, importance_batches: Iterable[Batch]) -> None:
        # The parameter is P_t without its residual layers; stored is what text is read with.
        with swap_weights(self.model, {self.name: nn.Parameter(self.residual_prompt())}):
            super().after_domain(importance_batches)
