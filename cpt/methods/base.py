"""What every method shares: plain further pre-training, with the places where a method differs.

Only this file touches Lightning's hooks. A method overrides the small hooks below `ContinualModule`'s
constructor."""

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
from lightning import LightningModule
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR
from torchmetrics import Metric
from transformers import PreTrainedModel

from cpt.data import Domain
from cpt.model import logits_at
from cpt.objectives import Batch
from cpt.randomness import key

log = logging.getLogger(__name__)


class GradientMask(nn.Module):
    """Scales what a step does to each weight. Masks multiply, so their order is free.

    `acts_on` is `gradient` (the gradient is scaled before clipping and the optimizer; Adam divides most of a
    constant factor out again) or `update` (the step itself is: p <- p_old + factor (p_new - p_old), weight
    decay included)."""

    def __init__(self, *, acts_on: str) -> None:
        super().__init__()
        if acts_on not in ("gradient", "update"):
            raise ValueError(f"acts_on={acts_on}; allowed: gradient, update")
        self.acts_on = acts_on

    def watch(self, model: nn.Module) -> None:
        """Hooks on the model, for masks that need activations; called once."""

    def factors(self) -> Iterator[tuple[nn.Parameter, Tensor]]:
        """Parameters with their factors, broadcastable to them; asked for once per optimizer step."""
        return iter(())


class DocumentNLL(Metric):
    """Negative log-likelihood by document, summed over processes: nats and scored tokens, each
    [documents]."""

    full_state_update = False

    def __init__(self, documents: int) -> None:
        super().__init__()
        self.add_state("nll", torch.zeros(documents, dtype=torch.float64), dist_reduce_fx="sum")
        self.add_state("count", torch.zeros(documents, dtype=torch.float64), dist_reduce_fx="sum")

    def update(self, nll: Tensor, count: Tensor, documents: Tensor) -> None:
        self.nll.index_add_(0, documents, nll.to(self.nll))
        self.count.index_add_(0, documents, count.to(self.count))

    def compute(self) -> tuple[Tensor, Tensor]:
        return self.nll, self.count


class ContinualModule(LightningModule):
    """Learns a sequence of domains by plain further pre-training. A method overrides what it changes.

    All that the method knows is in its `state_dict`: state is a buffer, neutral at construction.
    """

    def __init__(
        self,
        *,
        model: PreTrainedModel,
        masks: Sequence[GradientMask],
        optimizer: Callable[..., Optimizer],
        schedule: Callable[..., float],
        seed: int,
    ) -> None:
        super().__init__()
        self.model = model
        self.masks = nn.ModuleList(masks)
        self.make_optimizer, self.schedule, self.seed = optimizer, schedule, seed
        self.pending: list[tuple[nn.Parameter, Tensor, Tensor]] = []
        self.evaluation: list[DocumentNLL] = []
        for mask in self.masks:
            mask.watch(model)

    def stages(self, order: Sequence[str]) -> list[Domain]:
        """What is learned, one stage after another: each domain of the order."""
        return [Domain(name, index, (name,)) for index, name in enumerate(order)]

    def activate(self, domain: int) -> None:
        """Switches experts, adapters, requires_grad for a domain; sees no data; idempotent."""

    def before_domain(self, probe: Iterable[Batch]) -> None:
        """Work before a domain's first step; not repeated when the domain is resumed."""

    def losses(self, batch: Batch) -> dict[str, Tensor]:
        """Named terms, scalars; their sum is minimised. Their mean over processes and accumulated parts
        counts."""
        return {"lm": token_nll(self.model, batch).sum() * batch["weight"]}

    def after_step(self, batch: Batch) -> None:
        """Work after a batch has been learned from."""

    def after_domain(self, probe: Iterable[Batch]) -> None:
        """Work after a domain's last step, in eval mode and with gradients cleared before and after."""

    def nll(self, batch: Batch, domain: int) -> tuple[Tensor, Tensor]:
        """Sum of the negative log-likelihood (nats) and number of predictions at each scored position, both
        [K], for text of the domain with this place in the order (-1: general text)."""
        nll = token_nll(self.model, batch)
        return nll, torch.ones_like(nll)

    def backbone(self, domain: int) -> nn.Module:
        """The model that stands for a domain: what is exported and what an end task fine-tunes a copy of."""
        return self.model

    def configure_optimizers(self) -> dict:
        matrices = [p for p in self.parameters() if p.requires_grad and p.ndim >= 2]
        others = [p for p in self.parameters() if p.requires_grad and p.ndim < 2]
        optimizer = self.make_optimizer([{"params": matrices}, {"params": others, "weight_decay": 0.0}])
        steps = self.trainer.max_steps
        scheduler = LambdaLR(optimizer, lambda step: self.schedule(step, steps=steps))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    def on_train_start(self) -> None:
        if self.trainer.global_step == 0:
            self.before_domain(self.trainer.datamodule.probe())
            self.zero_grad()

    def on_train_batch_start(self, batch: Batch, batch_idx: int) -> None:
        name = self.trainer.datamodule.domain.name
        torch.manual_seed(key(self.seed, name, batch_idx, self.global_rank) % 2**63)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        terms = self.losses(batch)
        if self.trainer.global_step % self.trainer.log_every_n_steps == 0:
            self.record(terms)
        return sum(terms.values())

    def record(self, terms: dict[str, Tensor]) -> None:
        """Logs each term; a loss that is no number ends the run before it spoils the weights."""
        name = self.trainer.datamodule.domain.name
        for term, value in terms.items():
            if not torch.isfinite(value):
                raise ValueError(
                    f"the {term} loss is {value.item()} at step {self.trainer.global_step} of {name}; "
                    "a lower rate (optim.lr) or a clipped gradient (trainer.gradient_clip_val) may help"
                )
            self.log(f"train/{term}/{name}", value.detach(), prog_bar=term == "lm", sync_dist=True)
        self.log(f"train/lr/{name}", self.trainer.optimizers[0].param_groups[0]["lr"])

    def on_before_optimizer_step(self, optimizer: Optimizer) -> None:
        for mask in self.masks:
            for parameter, factor in mask.factors():
                if mask.acts_on == "update":
                    self.pending.append((parameter, factor, parameter.detach().clone()))
                elif parameter.grad is not None:
                    parameter.grad.mul_(factor)

    def optimizer_step(
        self, epoch: int, batch_idx: int, optimizer: Optimizer, optimizer_closure: Callable
    ) -> None:
        super().optimizer_step(epoch, batch_idx, optimizer, optimizer_closure)
        with torch.no_grad():
            for parameter, factor, old in self.pending:
                # lerp is exact at both ends: factor 1 leaves the step's bits and factor 0 the old ones.
                parameter.copy_(torch.lerp(old, parameter, factor.to(old)))
        self.pending.clear()

    def on_train_batch_end(self, outputs: Tensor, batch: Batch, batch_idx: int) -> None:
        self.after_step(batch)

    def on_fit_end(self) -> None:
        # Not in on_train_end: a run killed after its last step comes back to fit_end, but not to train_end.
        modes = [(module, module.training) for module in self.modules()]
        self.eval()
        self.zero_grad()
        self.after_domain(self.trainer.datamodule.probe())
        self.zero_grad()
        for module, training in modes:
            module.training = training

    def on_validation_start(self) -> None:
        texts = self.trainer.datamodule.held_out.values()
        self.evaluation = [DocumentNLL(text.documents).to(self.device) for text in texts]

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        column = int(batch["column"])
        name = list(self.trainer.datamodule.held_out)[column]
        places = self.trainer.datamodule.places
        nll, count = self.nll(batch, places.get(name, -1))
        self.evaluation[column].update(nll, count, batch["documents"])

    def row(self) -> list[tuple[Tensor, Tensor]]:
        """The evaluation just made: for each held-out text nats and scored tokens, each [documents]."""
        return [metric.compute() for metric in self.evaluation]


def token_nll(model: PreTrainedModel, batch: Batch) -> Tensor:
    """Negative log-likelihood (nats) of the labels at the scored positions, [K]."""
    labels = batch["labels"].flatten().index_select(0, batch["positions"])
    return functional.cross_entropy(logits_at(model, batch).float(), labels, reduction="none")


class Snapshot(nn.Module):
    """A copy of a model's parameters that goes where the model goes. Not saved: it is what construction
    gave."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        for number, parameter in enumerate(model.parameters()):
            self.register_buffer(str(number), parameter.detach().clone(), persistent=False)

    @torch.no_grad()
    def restore(self, model: nn.Module) -> None:
        """Puts the copy back, in place."""
        for parameter, copy in zip(model.parameters(), self.buffers(), strict=True):
            parameter.copy_(copy)
