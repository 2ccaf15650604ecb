"""When the hooks of a method are called: Lightning's side of `cpt.methods.base`, in the order of a stage."""

from collections.abc import Callable, Collection
from typing import Any, cast

import torch
from lightning import LightningModule
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from cpt.core.randomness import key
from cpt.core.sharding import average_gradients, clip_gradients, total_norm
from cpt.data.collate import Batch
from cpt.data.datamodule import Domain
from cpt.evaluation.perplexity import DocumentNLL
from cpt.gradient_masks.base import Before, Constraint, Held, recording, scale_
from cpt.models.forward import in_mode
from cpt.optim.state import lay_out_moments, unfuse_mixed

MOST = 3  # names that a message lists


class Staged(LightningModule):
    """A stage: the model takes its shape and its parts, the optimizer is made, steps are masked, guarded and
    made, what was learned is kept, all texts are scored. No method overrides anything here."""

    def take_shape(self, stage: Domain) -> None:
        """Gives the model the shape of a stage, if it has not got it yet. Raises ValueError where what is new
        would not be trained."""
        if stage in self.shaped:
            return
        before = shapes(self.model)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(key(self.seed, "shape", stage.name) % 2**63)
            self.shape(stage)
        self.shaped.append(stage)
        if (after := shapes(self.model)) != before:
            frozen = {id(each) for each in self.frozen}
            new = [name for name in after.keys() - before if id(self.model.get_parameter(name)) in frozen]
            if left := sorted(name for name in new if self.model.get_parameter(name).requires_grad):
                raise ValueError(
                    f"shape of {stage.name} has added {first_names(left)}, which would not be trained; "
                    "allowed: names in the scope, outside of freeze, or requires_grad=False"
                )
            self.watch()

    def enter(self, stage: Domain) -> None:
        """Makes ready for a stage, by its shape and its parts. Raises ValueError where `activate` grows."""
        self.take_shape(stage)
        before = shapes(self)
        self.activate(stage.index)
        if changed := [name for name, _ in shapes(self).items() ^ before.items()]:
            raise ValueError(
                f"activate of {stage.name} has added, removed or resized {first_names(changed)}; "
                "allowed: in shape(stage), which a resumed run repeats"
            )

    pace = 1.0  # of the rate that the schedule says, the share that steps are made with

    def set_pace(self, pace: float) -> None:
        """Has steps be made with such a share of the schedule's rate, from the next on."""
        self.pace = pace
        for config in self.trainer.lr_scheduler_configs:
            own = cast(LambdaLR, config.scheduler)
            for group, rate, factor in zip(
                own.optimizer.param_groups, own.base_lrs, own.lr_lambdas, strict=True
            ):
                group["lr"] = rate * factor(own.last_epoch)

    def configure_optimizers(self) -> dict:
        optimizer = self.make_optimizer(list(self.parameter_groups()))
        unfuse_mixed(optimizer)
        for group in optimizer.param_groups:
            group["lr"] *= group.pop("times")
        if self.carried is not None:
            self.carried.give(optimizer, self.named_parameters())
        data = self.trainer.datamodule
        scheduler = LambdaLR(optimizer, lambda step: self.pace * self.schedule(data.progress(step)))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    def on_train_start(self) -> None:
        self.forget_step()  # which was rolled back from
        for mask in self.masks:
            mask.activate(self.domain.index)
        if self.trainer.global_step == 0:
            self.begin_from_trunk()
            self.seeded("before")
            self.before_domain(self.trainer.datamodule.probe())
            for mask in self.masks:
                mask.before_domain(self.model, self.objective, self.trainer.datamodule.probe())
            self.zero_grad()
        self.check_groups(self.trainer.optimizers[0])
        lay_out_moments(self.trainer.optimizers[0])

    def check_groups(self, optimizer: Optimizer) -> None:
        """Raises ValueError where something that requires a gradient would not be trained."""
        inside = {id(each) for group in optimizer.param_groups for each in group["params"]}
        outside = [name for name, p in self.named_parameters() if p.requires_grad and id(p) not in inside]
        if outside:
            raise ValueError(
                f"{first_names(outside)} requires a gradient in {self.domain.name} but is in no group of the "
                "optimizer; allowed: what is grown in shape(stage) and switched in activate(domain)"
            )

    def on_train_batch_start(self, batch: Batch, batch_idx: int) -> None:
        self.seeded(batch_idx)
        if batch_idx == self.branch_step * self.trainer.accumulate_grad_batches:
            self.keep_trunk()

    @property
    def branch_step(self) -> int:
        """The step of the domain before which the next one goes on: all have been made, or those before a
        decay that is a branch."""
        data = self.trainer.datamodule
        steps, ahead = data.steps(self.domain), data.recovery_steps(self.domain)
        return steps if self.trunk is None else ahead + self.schedule.branch_step(steps - ahead)

    def begin_from_trunk(self) -> None:
        """Puts back the weights before a branch; the optimizer has its state by now. A stage that is resumed
        has both from its checkpoint."""
        if self.trunk is not None:
            self.trunk.restore(self.model)
        if self.carried is not None:
            self.carried.clear()

    def keep_trunk(self) -> None:
        """Keeps what the next domain goes on from: the optimizer's state, and weights before a branch."""
        if self.trunk is not None:
            self.trunk.take(self.model)
        if self.carried is not None:
            self.carried.take(self.trainer.optimizers[0], self.named_parameters())

    def seeded(self, moment: int | str) -> None:
        """Makes what is drawn from now on a function of seed, domain, moment and process."""
        seed_devices(key(self.seed, self.domain.name, moment, self.global_rank) % 2**63, self.device)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        with recording(self.masks, alone=self.trainer.accumulate_grad_batches == 1):
            terms = self.losses(batch)
        self.guard.see(terms)
        if self.trainer.global_step == 0 or self.is_logged():  # the bar has a loss from the first step on
            self.record(terms)
        return sum(terms.values())

    def is_logged(self) -> bool:
        """Whether loggers write what is noted in this step: Lightning does so at the end of every n-th."""
        return (self.trainer.global_step + 1) % self.trainer.log_every_n_steps == 0

    def record(self, terms: dict[str, Tensor]) -> None:
        """Logs each term."""
        name = self.domain.name
        for term, value in terms.items():
            self.log(f"train/{term}/{name}", value.detach(), prog_bar=term == "lm", sync_dist=True)
        self.log(f"train/lr/{name}", self.trainer.optimizers[0].param_groups[0]["lr"])

    def on_before_optimizer_step(self, optimizer: Optimizer) -> None:
        average_gradients(self)
        self.see_gradients()
        self.mask(optimizer)
        self.gradients(optimizer)
        self.constrain(optimizer)

    def mask(self, optimizer: Optimizer) -> None:
        """Scales gradients, or notes what of the step that is to come is to be scaled."""
        for mask in self.masks:
            for parameter, factor in mask.factors():
                if parameter.grad is None:
                    continue
                if mask.acts_on == "gradient":
                    scale_(parameter.grad, factor)
                else:
                    self.pending.append(
                        Before.of(parameter, factor, optimizer if mask.acts_on == "frozen" else None)
                    )

    @torch.no_grad()
    def constrain(self, optimizer: Optimizer) -> None:
        """The same as wholes."""
        for each in self.masks:
            if isinstance(each, Constraint):
                covered = [parameter for parameter in each.covered() if parameter.grad is not None]
                if covered and each.acts_on == "gradient":
                    each.constrain([(p, cast(Tensor, p.grad)) for p in covered], optimizer)
                elif covered:
                    self.held.append(Held.of(each, covered))

    def configure_gradient_clipping(
        self,
        optimizer: Optimizer,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: Any = None,
    ) -> None:
        # Clipping by norm is torch's clip_grad_norm_ cut in two: its norm is what the guard looks at.
        parameters = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        norm = total_norm([parameter.grad for parameter in parameters])
        if self.is_logged():
            self.log(f"train/grad_norm/{self.domain.name}", norm)
        self.steps = self.guard.allows(self.trainer, norm)
        if not self.steps:
            for parameter in parameters:
                parameter.grad = None  # which every optimizer of torch leaves alone, moments and decay too
        elif gradient_clip_algorithm == "value":
            self.clip_gradients(optimizer, gradient_clip_val, gradient_clip_algorithm)
        elif gradient_clip_val:
            clip_gradients(parameters, gradient_clip_val, norm)

    def optimizer_step(
        self, epoch: int, batch_idx: int, optimizer: Optimizer, optimizer_closure: Callable
    ) -> None:
        super().optimizer_step(epoch, batch_idx, optimizer, optimizer_closure)
        if self.steps:
            self.correct_step(optimizer)
            self.after_update()
        self.forget_step()

    def correct_step(self, optimizer: Optimizer) -> None:
        """Leaves of the step that was made what masks and constraints do."""
        for before in self.pending:
            before.scale(optimizer)
        for held in self.held:
            held.constrain(optimizer)

    def forget_step(self) -> None:
        """What was noted of the parameters before a step is no longer needed."""
        self.pending.clear()
        self.held.clear()

    def on_fit_end(self) -> None:
        # Not in on_train_end: a run killed after its last step comes back to fit_end, but not to train_end.
        # By then Lightning has taken the module off its device.
        home = self.device
        self.to(self.trainer.strategy.root_device)
        with in_mode(self, training=False):
            self.zero_grad()
            self.seeded("after")
            self.after_domain(self.trainer.datamodule.probe())
            self.zero_grad()
        if self.branch_step == self.trainer.max_steps:
            self.keep_trunk()
        self.to(home)

    def on_validation_start(self) -> None:
        if self.router is not None:
            self.router.begin()
        data = self.trainer.datamodule
        self.columns = list(data.held_out)
        self.evaluation = {
            name: DocumentNLL(data.held_out[name].documents).to(self.device) for name in data.scored_texts
        }

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        name = self.columns[int(batch["column"])]
        places = self.trainer.datamodule.places
        nll, count = self.nll(batch, places.get(name, -1))
        self.evaluation[name].update(nll, count, batch["documents"])

    def row(self) -> dict[str, tuple[Tensor, Tensor]]:
        """The evaluation just made: of each text that was scored nats and scored tokens, each [documents]."""
        # torchmetrics makes a number of a tensor with one entry.
        computed = {name: metric.compute() for name, metric in self.evaluation.items()}
        return {name: (nll.view(-1), count.view(-1)) for name, (nll, count) in computed.items()}

    @property
    def _ddp_params_and_buffers_to_ignore(self) -> list[str]:
        # DistributedDataParallel would send the first process's buffers to all at every step: copies of the
        # model, which are equal anyway, and memories that are each process's own.
        return [name for name, _ in self.named_buffers()]


def seed_devices(seed: int, device: torch.device) -> None:
    """Seeds torch. A processor's generator alone where nothing else computes: torch.manual_seed also notes
    for GPUs to come where it was called from, which takes as long as a small layer."""
    if device.type == "cpu":
        torch.default_generator.manual_seed(seed)
    else:
        torch.manual_seed(seed)


def shapes(module: nn.Module) -> dict[str, torch.Size]:
    """The shapes of a module's parameters by name."""
    return {name: parameter.shape for name, parameter in module.named_parameters()}


def first_names(names: Collection[str]) -> str:
    """The first of some names."""
    return ", ".join([*sorted(names)[:MOST], *["…"][: len(names) > MOST]])
