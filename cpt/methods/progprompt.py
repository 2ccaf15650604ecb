"""Progressive Prompts (Razdaibiedina et al., ICLR 2023): the model is frozen, and each domain trains a prompt
in front of the frozen prompts of the domains before it.

    min_{P_t}  -log p(y | [P_t; P_{t-1}; ...; P_1; e(x)]),    each P_k [n, D]

The chain takes the place of the prompt of `method=prompt` (`cpt.adapters.soft_prompt`): after the first
token, with encoder and decoder in front. Text of domain k is scored with the chain from P_k on, which later
domains do not change. With `residual`, as in the paper, P_t is trained as P_t + W_up relu(W_down P_t), W_up
initially 0; the result is stored and the layers are reset. The released code names a form of these layers
that does not exist, and keeps a domain's prompt from before the first epoch where that epoch's accuracy is
0."""

from collections.abc import Iterable, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from cpt.adapters.soft_prompt import PromptChain, draw_prompt
from cpt.data.collate import Batch
from cpt.data.datamodule import Domain
from cpt.methods.base import MethodContext
from cpt.methods.options import ProgPromptOptions
from cpt.methods.prompt import PromptMethod
from cpt.models.loading import positions_of
from cpt.models.weights import swap_weights

STARTS = ("vocabulary", "previous")
STD = 0.02  # of W_down


class ProgPrompt(PromptMethod):
    """Trains a prompt for each domain in front of those of the domains before it."""

    options: ProgPromptOptions
    bank: PromptChain

    def __init__(self, options: ProgPromptOptions, context: MethodContext) -> None:
        super().__init__(options, context, PromptChain, method="progprompt", routing=options.routing)
        rows, width = options.residual, self.prompt.shape[1]
        like: dict[str, Any] = {"device": self.prompt.device, "dtype": self.prompt.dtype}
        self.residual: nn.Sequential | None = None  # W_down, relu, W_up
        if rows is not None:
            down, up = nn.Linear(width, rows, **like), nn.Linear(rows, width, **like)
            self.residual = nn.Sequential(down, nn.ReLU(), up)

    def stages(self, order: Sequence[str]) -> list[Domain]:
        limit, tokens = positions_of(self.model), self.options.tokens
        if limit is not None and self.length + tokens * len(order) > limit:
            most = (limit - self.length) // len(order)
            raise ValueError(
                f"method.tokens={tokens} for each of {len(order)} domains; allowed: 0 to {most}, for the "
                f"{limit - self.length} positions beyond model.length={self.length}"
            )
        return super().stages(order)

    def learned(self) -> Tensor:
        """P_t as in the chain, [n, D]."""
        return self.prompt if self.residual is None else self.prompt + self.residual(self.prompt)

    def earlier(self) -> list[Tensor]:
        """[P_{t-1}; ...; P_1], [(t - 1) n, D], in a list; empty in the first domain."""
        before = self.bank.before(self.domain.index)
        return [self.bank.weights(before[-1])[self.name]] if before else []

    @torch.no_grad()
    def before_domain(self, probe: Iterable[Batch]) -> None:
        drawing, earlier = self.drawing(), self.earlier()
        if self.options.start == "vocabulary":
            self.prompt.copy_(draw_prompt(self.model, len(self.prompt), drawing))
        elif earlier:
            self.prompt.copy_(earlier[0][: len(self.prompt)])
        if self.residual is not None:
            for parameter in self.residual.parameters():
                parameter.zero_()
            down = cast(nn.Linear, self.residual[0]).weight
            down.copy_(STD * torch.randn(down.shape, generator=drawing))

    def losses(self, batch: Batch) -> dict[str, Tensor]:
        chain = torch.cat([self.learned(), *earlier]) if (earlier := self.earlier()) else self.learned()
        with swap_weights(self.model, {self.name: chain}):  # [t n, D], of which P_t has a gradient
            return super().losses(batch)

    @torch.no_grad()
    def after_domain(self, probe: Iterable[Batch]) -> None:
        with swap_weights(self.model, {self.name: nn.Parameter(self.learned())}):
            super().after_domain(probe)
