"""Progressive Prompts (Razdaibiedina et al., ICLR 2023): the model is frozen, and each domain learns a prompt
that stands in front of those of the domains before it, which are frozen too.

    min_{P_t}  -log p(y | [P_t; P_{t-1}; ...; P_1; e(x)]),    each P_k [n, D]

The chain stands where `method=prompt` puts its prompt (`cpt.adapters.soft_prompt`): behind the first token,
with encoder and decoder in front. Text of domain k is scored with the chain from P_k on, so that what is
known of it never changes. With `residual`, as the paper has it, what stands in P_t's place while it learns is
P_t + W_up relu(W_down P_t), W_up = 0 at first; what that comes to is kept, and the maps begin anew. The
released code names a form of the maps that is not there, and keeps a domain's prompt as it was before the
first epoch where that epoch's accuracy is 0."""

from collections.abc import Iterable, Sequence
from copy import deepcopy
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from cpt.adapters import export
from cpt.adapters.soft_prompt import PromptChain, attach_prompt, draw_prompt
from cpt.data.collate import Batch
from cpt.data.datamodule import Domain
from cpt.methods.base import ContinualModule, Shared
from cpt.methods.options import ProgPromptOptions
from cpt.methods.prompt import check_rows, check_tokens
from cpt.models.loading import positions_of
from cpt.models.weights import swap_weights

STARTS = ("vocabulary", "previous")
STD = 0.02  # of W_down


class ProgPrompt(ContinualModule):
    """Trains a prompt for each domain in front of those of the domains before it, and nothing else."""

    options: ProgPromptOptions

    def __init__(self, options: ProgPromptOptions, shared: Shared) -> None:
        check_tokens(options.tokens, length=shared.length, model=shared.model)
        check_rows(shared, method="progprompt")
        self.prompting = {"tokens": options.tokens, "causal": shared.objective.causal}
        scope = attach_prompt(shared.model, **self.prompting)
        super().__init__(options, shared, scope=scope)
        [self.name] = scope.names
        chain = PromptChain(self.model, scope.names, base={self.name: self.prompt[:0]})
        self.keep_parts(chain, options.routing)
        self.residual = self.maps()

    def maps(self) -> nn.Sequential | None:
        """W_down and W_up, of which the second is zero."""
        rows, width = self.options.residual, self.prompt.shape[1]
        if rows is None:
            return None
        like = {"device": self.prompt.device, "dtype": self.prompt.dtype}
        return nn.Sequential(nn.Linear(width, rows, **like), nn.ReLU(), nn.Linear(rows, width, **like))

    def stages(self, order: Sequence[str]) -> list[Domain]:
        limit, tokens = positions_of(self.model), self.options.tokens
        if limit is not None and self.length + tokens * len(order) > limit:
            most = (limit - self.length) // len(order)
            raise ValueError(
                f"method.tokens={tokens} for each of {len(order)} domains; allowed: 0 to {most}, for the "
                f"{limit - self.length} positions beyond model.length={self.length}"
            )
        return super().stages(order)

    @property
    def chain(self) -> PromptChain:
        return self.bank

    @property
    def prompt(self) -> nn.Parameter:
        """The prompt that learns, [n, D]; it is P_t itself without `residual`."""
        return self.model.get_parameter(self.name)

    def learned(self) -> Tensor:
        """P_t as it stands in the chain, [n, D]."""
        return self.prompt if self.residual is None else self.prompt + self.residual(self.prompt)

    @torch.no_grad()
    def before_domain(self, probe: Iterable[Batch]) -> None:
        drawing, before = self.drawing(), self.chain.before(self.domain.index)
        if self.options.start == "vocabulary":
            self.prompt.copy_(draw_prompt(self.model, len(self.prompt), drawing))
        elif before:
            self.prompt.copy_(self.chain.weights(before[-1])[self.name][: len(self.prompt)])
        if self.residual is not None:
            for parameter in self.residual.parameters():
                parameter.zero_()
            down = self.residual[0].weight
            down.copy_(STD * torch.randn(down.shape, generator=drawing))

    def losses(self, batch: Batch) -> dict[str, Tensor]:
        with swap_weights(self.model, {self.name: self.joined()}):
            return super().losses(batch)

    def joined(self) -> Tensor:
        """[P_t; ...; P_1], [t n, D], of which the first has a gradient."""
        before = self.chain.before(self.domain.index)
        if not before:
            return self.learned()
        return torch.cat([self.learned(), self.chain.weights(before[-1])[self.name]])

    @torch.no_grad()
    def after_domain(self, probe: Iterable[Batch]) -> None:
        with swap_weights(self.model, {self.name: nn.Parameter(self.learned())}):
            super().after_domain(probe)

    def backbone(self, domain: int) -> PreTrainedModel:
        copy = deepcopy(self.model).requires_grad_(True)
        owner, _, name = self.name.rpartition(".")
        setattr(copy.get_submodule(owner), name, nn.Parameter(self.chain.weights(domain)[self.name].clone()))
        return copy

    def export(self, folder: Path, order: Sequence[str]) -> str:
        parts = {name: self.chain.weights(number) for number, name in enumerate(order)}
        return export.export_parts(folder, self.model, parts, attach=attach_prompt, options=self.prompting)
