"""Lightning's side of `cpt.methods.base`: when the hooks of a method are called, in the order of a stage."""

from collections.abc import Callable, Collection
from typing import Any, cast

import torch
from lightning import LightningModule
from lightning.pytorch.core.optimizer import LightningOptimizer
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from cpt.core.distributed import average_gradients, clip_gradients, total_norm
from cpt.core.randomness import key
from cpt.data.collate import Batch
from cpt.data.datamodule import Domain, DomainSequence
from cpt.evaluation.perplexity import DocumentNLL
from cpt.gradient_masks.base import Constraint, StepSnapshot, recording, scale_
from cpt.models.forward import in_mode
from cpt.optim.state import lay_out_moments, unfuse_mixed


class LightningWiring(LightningModule):
    """One stage: shape, optimizer, masked and guarded steps, after-domain work, scores. Methods override
    nothing here."""

    lr_scale = 1.0  # on the schedule's learning rate

    @property
    def data(self) -> DomainSequence:
        """The trainer's data, which Lightning sets."""
        found: DomainSequence = self.trainer.datamodule  # type: ignore[attr-defined]
        return found

    @property
    def domain(self) -> Domain:
        """The current stage, or the last one."""
        return self.data.domain

    def expand_to(self, stage: Domain) -> None:
        """Grows the model for a stage, once. Raises ValueError where new parameters would not be trained."""
        if stage in self.shaped:
            return
        before = parameter_shapes(self.model)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(key(self.seed, "shape", stage.name) % 2**63)
            self.expand(stage)
        self.shaped.append(stage)
        if (after := parameter_shapes(self.model)) != before:
            frozen = {id(each) for each in self.frozen}
            new = {name: self.model.get_parameter(name) for name in after.keys() - before}
            if left := [name for name, p in new.items() if id(p) in frozen and p.requires_grad]:
                raise ValueError(
                    f"shape of {stage.name} has added {first_names(left)}, which would not be trained; "
                    "allowed: names in the scope, outside of freeze, or requires_grad=False"
                )
            self.watch()

    def setup_stage(self, stage: Domain) -> None:
        """Sets up a stage: its shape, then its active modules. Raises ValueError where `activate` grows."""
        self.expand_to(stage)
        before = parameter_shapes(self)
        self.activate(stage.index)
        if changed := [name for name, _ in parameter_shapes(self).items() ^ before.items()]:
            told = f"activate of {stage.name} has added, removed or resized {first_names(changed)}"
            raise ValueError(f"{told}; allowed: in expand(stage), which a resumed run repeats")

    def set_lr_scale(self, scale: float) -> None:
        """Scales the schedule's learning rate from the next step on."""
        self.lr_scale = scale
        for config in self.trainer.lr_scheduler_configs:
            own = cast(LambdaLR, config.scheduler)
            for group, rate, factor in zip(
                own.optimizer.param_groups, own.base_lrs, own.lr_lambdas, strict=True
            ):
                group["lr"] = rate * factor(own.last_epoch)

    def configure_optimizers(self) -> dict[str, Any]:  # type: ignore[override]  # as Lightning takes it
        optimizer = self.make_optimizer(list(self.parameter_groups()))
        unfuse_mixed(optimizer)
        for group in optimizer.param_groups:
            group["lr"] *= group.pop("times")
        if self.carried is not None:
            self.carried.give(optimizer, self.named_parameters())
        scheduler = LambdaLR(optimizer, lambda step: self.lr_scale * self.schedule(self.data.progress(step)))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    def on_train_start(self) -> None:
        self.snapshots.clear()  # of a step that was rolled back
        for mask in self.masks:
            mask.activate(self.domain.index)
        if self.trainer.global_step == 0:
            self.begin_from_trunk()
            self.seeded("before")
            self.before_domain(self.data.probe())
            for mask in self.masks:
                mask.before_domain(self.model, self.objective, self.data.probe())
            self.zero_grad()
        optimizer = self.trainer.optimizers[0]
        inside = {id(each) for group in optimizer.param_groups for each in group["params"]}
        outside = [name for name, p in self.named_parameters() if p.requires_grad and id(p) not in inside]
        if outside:
            raise ValueError(
                f"{first_names(outside)} requires a gradient in {self.domain.name} but is in no group of the "
                "optimizer; allowed: what is grown in expand(stage) and switched in activate(domain)"
            )
        lay_out_moments(optimizer)

    def on_train_batch_start(self, batch: Batch, batch_idx: int) -> None:
        self.seeded(batch_idx)
        if batch_idx == self.branch_step * self.trainer.accumulate_grad_batches:
            self.keep_trunk()

    @property
    def branch_step(self) -> int:
        """The step of the domain whose weights the next domain starts from: the last, or the one before a
        decay branch."""
        steps, ahead = self.data.steps(self.domain), self.data.recovery_steps(self.domain)
        if self.trunk is None:
            return steps
        branch_step: Callable[[int], int] = getattr(self.schedule, "branch_step")  # noqa: B009
        return ahead + branch_step(steps - ahead)

    def begin_from_trunk(self) -> None:
        """Restores the weights before a decay branch; a resumed stage has them from its checkpoint."""
        if self.trunk is not None:
            self.trunk.restore(self.model)
        if self.carried is not None:
            self.carried.clear()  # the optimizer has the state by now

    def keep_trunk(self) -> None:
        """Stores the optimizer state, and the weights before a decay branch, for the next domain."""
        if self.trunk is not None:
            self.trunk.take(self.model)
        if self.carried is not None:
            self.carried.take(self.trainer.optimizers[0], self.named_parameters())

    def seeded(self, moment: int | str) -> None:
        """Seeds torch by seed, domain, moment and process."""
        seed = key(self.seed, self.domain.name, moment, self.global_rank) % 2**63
        if self.device.type == "cpu":  # torch.manual_seed takes as long as a small layer
            torch.default_generator.manual_seed(seed)
        else:
            torch.manual_seed(seed)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        with recording(self.masks, alone=self.trainer.accumulate_grad_batches == 1):
            terms = self.losses(batch)
        self.guard.see(terms)
        if self.trainer.global_step == 0 or self.is_logged():  # the bar has a loss from the first step on
            name = self.domain.name
            for term, value in terms.items():
                self.log(f"train/{term}/{name}", value.detach(), prog_bar=term == "lm", sync_dist=True)
            self.log(f"train/lr/{name}", self.trainer.optimizers[0].param_groups[0]["lr"])
        return cast(Tensor, sum(terms.values()))

    def is_logged(self) -> bool:
        """Whether loggers write this step: Lightning's do at the end of every n-th."""
        every: int = self.trainer.log_every_n_steps  # type: ignore[attr-defined]
        return (self.trainer.global_step + 1) % every == 0

    def on_before_optimizer_step(self, optimizer: Optimizer) -> None:
        average_gradients(self)
        self.on_gradients_ready()
        self.mask(optimizer)
        self.transform_gradients(optimizer)
        self.constrain(optimizer)

    def mask(self, optimizer: Optimizer) -> None:
        """Scales gradients, or takes snapshots of the parameters whose steps will be scaled."""
        for mask in self.masks:
            for parameter, factor in mask.factors():
                if parameter.grad is None:
                    continue
                if mask.acts_on == "gradient":
                    scale_(parameter.grad, factor)
                else:
                    self.snapshots.append(StepSnapshot(mask, [parameter], factor=factor, optimizer=optimizer))

    @torch.no_grad()
    def constrain(self, optimizer: Optimizer) -> None:
        """Constrains gradients, or takes snapshots of the parameters whose steps will be constrained."""
        for each in self.masks:
            if isinstance(each, Constraint):
                covered = [parameter for parameter in each.covered() if parameter.grad is not None]
                if covered and each.acts_on == "gradient":
                    each.constrain([(p, cast(Tensor, p.grad)) for p in covered], optimizer)
                elif covered:
                    self.snapshots.append(StepSnapshot(each, covered))

    def configure_gradient_clipping(
        self,
        optimizer: Optimizer,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: Any = None,
    ) -> None:
        # torch's clip_grad_norm_ in two halves: the guard checks the norm in between.
        parameters = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        norm = total_norm([parameter.grad for parameter in parameters])
        if self.is_logged():
            self.log(f"train/grad_norm/{self.domain.name}", norm)
        self.steps = self.guard.allows(self.trainer, norm)
        if not self.steps:
            for parameter in parameters:
                parameter.grad = None  # every optimizer of torch then skips it, moments and decay too
        elif gradient_clip_algorithm == "value":
            self.clip_gradients(optimizer, gradient_clip_val, gradient_clip_algorithm)
        elif gradient_clip_val:
            clip_gradients(parameters, gradient_clip_val, norm)

    def optimizer_step(
        self,
        epoch: int,
        batch_idx: int,
        optimizer: Optimizer | LightningOptimizer,
        optimizer_closure: Callable[[], Any] | None = None,
    ) -> None:
        super().optimizer_step(epoch, batch_idx, optimizer, optimizer_closure)
        if self.steps:
            self.correct_step(cast(Optimizer, optimizer))
            self.after_update()
        self.snapshots.clear()

    def correct_step(self, optimizer: Optimizer) -> None:
        """Applies masks and constraints to the step just made."""
        for snapshot in self.snapshots:
            snapshot.apply(optimizer)

    def on_fit_end(self) -> None:
        # Not in on_train_end: a run killed after its last step comes back to fit_end, but not to train_end.
        # By then Lightning has taken the module off its device.
        home = self.device
        self.to(self.trainer.strategy.root_device)
        with in_mode(self, training=False):
            self.zero_grad()
            self.seeded("after")
            self.after_domain(self.data.probe())
            self.zero_grad()
        if self.branch_step == self.trainer.max_steps:
            self.keep_trunk()
        self.to(home)

    def on_validation_start(self) -> None:
        if self.router is not None:
            self.router.begin()
        data = self.data
        self.columns = list(data.held_out)
        self.evaluation = {
            name: DocumentNLL(data.held_out[name].documents).to(self.device) for name in data.scored_texts
        }

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        name = self.columns[int(batch["column"])]
        nll, count = self.nll(batch, self.data.places.get(name, -1))
        self.evaluation[name].update(nll, count, batch["documents"])

    def row(self) -> dict[str, tuple[Tensor, Tensor]]:
        """The last evaluation: nats and scored tokens by text, each [documents]."""
        computed = {name: metric.compute() for name, metric in self.evaluation.items()}
        # torchmetrics makes a number of a tensor with one entry.
        return {name: (nll.view(-1), count.view(-1)) for name, (nll, count) in computed.items()}

    @property
    def _ddp_params_and_buffers_to_ignore(self) -> list[str]:
        # DistributedDataParallel would send the first process's buffers to all at every step: copies of the
        # model, which are equal anyway, and memories that are each process's own.
        return [name for name, _ in self.named_buffers()]


def parameter_shapes(module: nn.Module) -> dict[str, torch.Size]:
    """Shapes of a module's parameters by name."""
    return {name: parameter.shape for name, parameter in module.named_parameters()}


def first_names(names: Collection[str]) -> str:
    """Up to three names, sorted, and an ellipsis."""
    return ", ".join([*sorted(names)[:3], *["…"][: len(names) > 3]])
