"""Bytes of tensors while they are alive, of real ones and of those without storage."""

import numpy as np
import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

from cpt.core.allocations import AllocationRecorder, AllocationTable, KnownValues, UnitScalars


def find_use(operation, first_argument, result):
    return str(operation)


def find_peak(recorder, **options):
    table = AllocationTable(recorder)
    return table.find_peak(table.num_bytes, **options)


def test_what_nothing_refers_to_is_not_counted():
    recorder = AllocationRecorder(find_use)
    with recorder:
        first = torch.zeros(100)
        second = first + 1
        del first
        third = second * 2
        third.add_(second)  # in place
        view = third[:50]
    assert find_peak(recorder) == {"aten.zeros.default": 400, "aten.add.Tensor": 400}
    assert [allocation.num_bytes for allocation in recorder.allocations] == [400, 400, 400]
    assert len(view) == 50 and find_peak(recorder, excluded_uses=["aten.zeros.default"]) == {
        "aten.add.Tensor": 400,
        "aten.mul.Tensor": 400,
    }


def test_state_is_left_out_and_uses_are_renamed():
    weight = torch.ones(10, 10, requires_grad=True)
    recorder = AllocationRecorder(find_use)
    recorder.ignore([weight])
    with recorder:
        weight.square().sum().backward()
        weight.detach().add_(1)  # in place
        state = torch.zeros(1000)
        large = torch.empty(500)
    recorder.rename([weight.grad], "gradients")
    recorder.drop([state])
    assert find_peak(recorder) == {"gradients": 400, "aten.empty.memory_format": 2000}
    assert len(large) == 500


def test_a_model_without_storage_counts_the_same_bytes():
    def run():
        torch.manual_seed(0)
        layers = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16))
        recorder = AllocationRecorder(find_use)
        recorder.ignore(layers.parameters())
        with recorder:
            layers(torch.ones(32, 16)).square().mean().backward()
        return recorder

    real = run()
    with FakeTensorMode():
        fake = run()
    for column in ("num_bytes", "first", "last"):
        np.testing.assert_array_equal(
            getattr(AllocationTable(fake), column), getattr(AllocationTable(real), column)
        )


def test_values_of_real_tensors_are_known():
    ids = torch.tensor([3, 1, 2])
    with FakeTensorMode(allow_non_fake_inputs=True), KnownValues():
        embedded = torch.zeros(5, 2)[ids]
        assert int((ids > 1).sum()) == 2 and (ids == 2).nonzero().flatten().tolist() == [2]
        assert embedded.shape == (3, 2) and torch.arange(3).tolist() == [0, 1, 2]
        with pytest.raises(DataDependentOutputException):
            bool(embedded.any())


def test_unknown_numbers_are_1_where_shapes_do_not_depend_on_them():
    with FakeTensorMode(allow_non_fake_inputs=True), UnitScalars():
        assert torch.zeros(3).norm().item() == 1.0 and torch.zeros((), dtype=torch.long).item() == 1
        assert torch.zeros(2).add_(torch.ones(2), alpha=torch.zeros(2).norm().item()).shape == (2,)
