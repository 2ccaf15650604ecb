"""MERGE_LORA: merges what the LoRA adapters of domains add to the weights.

A domain trains a new adapter (Hu et al., ICLR 2022); at its end W_k = s_k + alpha / r B_k A_k, and weights of
layers are merged as in `cpt.methods.merge`: tau_k is the product B_k A_k, not its factors. `truncated` to
rank r, W <- W_0 + U_r S_r V_r^T of the singular values of W - W_0."""

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from cpt.adapters import lora
from cpt.core.distributed import full_tensor, local_rows, to_local, with_rows
from cpt.core.tensors import PreciseTensors
from cpt.data.collate import Batch
from cpt.methods.base import ContinualMethod, MethodContext
from cpt.methods.merge import Merging
from cpt.methods.options import MergeLoRAOptions
from cpt.models.fisher import fisher
from cpt.models.fsdp import named_weights


class MergeLoRA(ContinualMethod):
    """Trains an adapter per domain, and merges the products."""

    options: MergeLoRAOptions

    def __init__(self, options: MergeLoRAOptions, context: MethodContext) -> None:
        super().__init__(options, context, scope=lora.attach_lora(context.model, **options.pair))
        self.merging = Merging(options, self.model, self.maps())
        if options.truncated is not None:
            self.base = PreciseTensors(self.maps(), persistent=False)

    def maps(self) -> dict[str, nn.Parameter]:
        """The frozen weights that have adapters, by name."""
        present = named_weights(self.model)
        names = [f"{name}.base_layer.weight" for name in lora.lora_layers(self.model)]
        return {name: present[name] for name in names}

    def before_domain(self, probe: Iterable[Batch]) -> None:
        self.merging.begin(self.model)
        if self.domain.index > 0:
            lora.reset_newest(self.model, self.drawing().initial_seed())

    def after_domain(self, probe: Iterable[Batch]) -> None:
        seed = self.drawing().initial_seed()
        lora.merge_newest(self.model)
        lora.reset_newest(self.model, seed)  # with product 0
        found = self.measure(probe) if self.options.rule == "fisher" else {}
        rows = self.merging.end(self.model, self.maps(), fisher=found, seed=seed)
        if (rank := self.options.truncated) is not None:
            for name, parameter in self.maps().items():
                base = self.base.at_hand(to_local(self.base.named()[name]))
                (added,) = with_rows([rows[name].to(base) - base], [parameter])
                # The nearest matrix of that rank in the Frobenius norm (Eckart and Young, 1936).
                u, s, v = torch.linalg.svd(full_tensor(added), full_matrices=False)
                rows[name].copy_(base + local_rows(u[:, :rank] * s[:rank] @ v[:rank], parameter))
        self.merging.put(rows, self.maps())

    def measure(self, probe: Iterable[Batch]) -> dict[str, Tensor]:
        """The diagonal Fisher of the frozen weights."""
        flipped = [*(each for each in self.model.parameters() if each.requires_grad), *self.maps().values()]
        for each in flipped:
            each.requires_grad_(not each.requires_grad)
        with torch.autocast(self.device.type, enabled=False):
            found = fisher(self.model, probe, objective=self.objective, estimator=self.options.estimator)
        for each in flipped:
            each.requires_grad_(not each.requires_grad)
        return found

    def model_for(self, domain: int) -> PreTrainedModel:
        return lora.without_tuners(self.model, merged=True)
