"""What is counted over the rows of all processes."""

import torch

from cpt.core import sharding


def test_a_product_counts_the_rows_of_all_processes(monkeypatch):
    monkeypatch.setattr(sharding, "is_sharded", lambda tensor: tensor.ndim == 2)
    monkeypatch.setattr(sharding.distributed, "all_reduce", lambda tensor: tensor.mul_(2))  # two alike
    shared, plain = torch.tensor([[1.0, 2.0]]), torch.tensor([5.0])
    assert sharding.dot([shared, plain], [torch.tensor([[3.0, 4.0]]), torch.tensor([2.0])]) == 2 * 11 + 10
