"""Methods that use hooks of `cpt.methods.base` which no method of cpt uses; the contract test trains them too."""

from copy import deepcopy

import torch
from torch import Tensor, nn

from cpt.core.schema import config
from cpt.data.collate import Batch
from cpt.methods.base import ContinualMethod
from cpt.models.forward import kl_divergence, token_nll
from cpt.optim.schedulers import Progress, Schedule

CARRIED = "optim.state_across_domains=moments"
# By method, the overrides that select it.
HOOK_METHODS: dict[str, list[str]] = {
    "companions": ["method=ncl", "method._target_=tests.support.hook_methods.Companions", "mask=migu"],
    "branched": ["method=ncl", CARRIED, "lr_scheduler=wsd", "lr_scheduler.decay=0.5"],
    "across": ["method=ncl", CARRIED, "lr_scheduler._target_=tests.support.hook_methods.Across"],
}


def overrides_for(method: str) -> list[str]:
    return (
        [*HOOK_METHODS[method], f"method.name={method}"] if method in HOOK_METHODS else [f"method={method}"]
    )


@config
class Across(Schedule):
    """One linear warm-up and one decay to 0 over the steps of all domains."""

    needs_end = True

    def __call__(self, progress: Progress) -> float:
        rise = self.warmup_ratio * progress.total_steps
        return min((progress.total_step + 1) / (rise + 1), 1 - progress.total_step / progress.total_steps)


class Companions(ContinualMethod):
    """A peer that learns along (deep mutual learning; Zhang et al., CVPR 2018, eq. 4), and a mean teacher of
    the model (Tarvainen and Valpola, NeurIPS 2017, eq. 1) that both are held to."""

    def aux_models(self) -> dict[str, nn.Module]:
        return {"peer": deepcopy(self.model), "teacher": deepcopy(self.model).requires_grad_(False)}

    def losses(self, batch: Batch) -> dict[str, Tensor]:
        logits = self.objective.outputs(self.model, batch)[0]
        peer_logits = self.objective.outputs(self.auxiliary_models["peer"], batch)[0]
        teacher_logits = self.objective.outputs(self.auxiliary_models["teacher"], batch)[0]

        divergence = (
            kl_divergence(peer_logits.detach(), logits)
            + kl_divergence(teacher_logits, logits)
            + kl_divergence(teacher_logits, peer_logits)
        )
        nll = token_nll(logits, batch) + token_nll(peer_logits, batch)
        return {"lm": nll.sum() * batch["weight"], "divergence": divergence.sum() * batch["weight"]}

    @torch.no_grad()
    def after_update(self) -> None:
        teacher = self.auxiliary_models["teacher"]
        for averaged, parameter in zip(teacher.parameters(), self.model.parameters(), strict=True):
            averaged.lerp_(parameter, 0.1)
