"""What is counted over the rows of all processes."""

import pytest
import torch
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from cpt.core import distributed as sharding
from cpt.core.distributed import to_local
from cpt.core.tensors import NamedTensors, offload


def test_a_product_counts_the_rows_of_all_processes(monkeypatch):
    monkeypatch.setattr(sharding, "is_sharded", lambda tensor: tensor.ndim == 2)
    monkeypatch.setattr(sharding.distributed, "all_reduce", lambda tensor: tensor.mul_(2))  # two alike
    shared, plain = torch.tensor([[1.0, 2.0]]), torch.tensor([5.0])
    assert sharding.dot([shared, plain], [torch.tensor([[3.0, 4.0]]), torch.tensor([2.0])]) == 2 * 11 + 10


@pytest.fixture
def mesh(tmp_path):
    """One process that shares out with itself."""
    store = distributed.FileStore(str(tmp_path / "store"), 1)
    distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    distributed.destroy_process_group()


def test_rows_that_rest_on_the_cpu_stay_there(mesh):
    """Kept of shared out weights: also what is taken over, loaded, or of another type."""
    weight = distribute_tensor(torch.arange(12.0).view(4, 3), mesh, [Shard(0)])
    module = nn.Module()
    module.kept = NamedTensors({"weight": torch.arange(12.0).view(4, 3), "bias": torch.ones(3)})
    stored = {name: each + 1 for name, each in module.state_dict().items()}
    assert offload(module) == ["kept"]
    module.kept.shard({"weight": weight})
    module.bfloat16().float()
    module.to("meta")
    module.kept.layout = {"weight": sharding.shard_as(torch.empty(4, 3, device="meta"), weight)}
    module.load_state_dict(stored)
    module.kept.update({"weight": module.kept.named()["weight"] + 1, "new": torch.zeros(2)})
    kept = module.kept.named()
    assert {name: to_local(each).device.type for name, each in kept.items()} == dict.fromkeys(kept, "cpu")
    assert sharding.is_sharded(kept["weight"]) and torch.equal(
        to_local(kept["weight"]), torch.arange(12.0).view(4, 3) + 2
    )
    assert to_local(module.kept.at_hand(kept["weight"])).is_meta and module.kept.at_hand(kept["new"]).is_meta
