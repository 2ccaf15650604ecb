"""MERGE_LORA: what the low-rank pairs of domains have added to the weights becomes one model.

A domain trains a new pair (Hu et al., ICLR 2022); at its end W_k = s_k + alpha / r B_k A_k, and the maps'
weights are merged as `cpt.methods.merge` merges all: tau_k is the product, never A_k or B_k alone, of whose
sums it is another. `truncated` to rank r, W <- W_0 + U_r S_r V_r^T of the singular values of W - W_0."""

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from cpt.adapters import lora
from cpt.core.sharding import local, rows_of, with_rows
from cpt.core.sharding import whole as all_rows
from cpt.core.tensors import PreciseTensors
from cpt.data.collate import Batch
from cpt.methods.base import ContinualModule, Shared
from cpt.methods.common.merging import Merging, put
from cpt.methods.options import MergeLoRAOptions
from cpt.models.fisher import fisher
from cpt.models.fsdp import named_weights


class MergeLoRA(ContinualModule):
    """Learns each domain through a pair of its own, and merges the products."""

    options: MergeLoRAOptions

    def __init__(self, options: MergeLoRAOptions, shared: Shared) -> None:
        super().__init__(options, shared, scope=lora.attach_lora(shared.model, **options.pair))
        self.merging = Merging(options, self.model, self.maps())
        if options.truncated is not None:
            self.base = PreciseTensors(self.maps(), persistent=False)

    def maps(self) -> dict[str, nn.Parameter]:
        """The frozen weights beside which pairs are learned, by name."""
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
        if self.options.truncated is not None:
            self.truncate(rows, self.options.truncated)
        put(rows, self.maps())

    def measure(self, probe: Iterable[Batch]) -> dict[str, Tensor]:
        """The diagonal Fisher of the maps' weights, which are not trained themselves."""
        trained = [each for each in self.model.parameters() if each.requires_grad]
        for each in (*trained, *self.maps().values()):
            each.requires_grad_(not each.requires_grad)
        with torch.autocast(self.device.type, enabled=False):
            found = fisher(self.model, probe, objective=self.objective, estimator=self.options.estimator)
        for each in (*trained, *self.maps().values()):
            each.requires_grad_(not each.requires_grad)
        return found

    def truncate(self, rows: Mapping[str, Tensor], rank: int) -> None:
        """Leaves of what is added to the base's maps its best approximation of a rank."""
        for name, parameter in self.maps().items():
            base = self.base.at_hand(local(self.base.named()[name]))
            (added,) = with_rows([rows[name].to(base) - base], [parameter])
            rows[name].copy_(base + rows_of(truncate(all_rows(added), rank), parameter))

    def backbone(self, domain: int) -> PreTrainedModel:
        return lora.without_tuners(self.model, merged=True)


def truncate(matrix: Tensor, rank: int) -> Tensor:
    """The matrix of a rank that is nearest in the Frobenius norm (Eckart and Young, 1936)."""
    u, s, v = torch.linalg.svd(matrix, full_matrices=False)
    return u[:, :rank] * s[:rank] @ v[:rank]
