"""Calls of kernels that are described, scaled to another number of rows, and timed."""

import psutil
import pytest
import torch

from cpt.trainer import kernel_calls
from cpt.trainer.computed_time import Rates, find_work_seconds
from cpt.trainer.computed_work import Work, WorkRecorder
from cpt.trainer.kernel_calls import KernelTimer, TensorShape, describe_argument, describe_call, time_kernel
from cpt.trainer.simulation import Simulation
from tests.support.simulated import simulate, write_config

ATEN = torch.ops.aten


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(kernel_calls, "CALL_SECONDS", 1e-5)


def make_call(kernel=ATEN.mm.default, arguments=None, *, num_flops=560.0, num_bytes=0.0):
    if arguments is None:
        arguments = [torch.ones(14, 4), torch.ones(4, 5)]
    return describe_call(
        kernel, arguments, {}, num_flops=num_flops, flops_type="float32", num_bytes=num_bytes
    )


TENSORS = {
    "rows": torch.ones(3, 4),
    "transposed": torch.ones(3, 4).T,
    "axes in another order": torch.ones(2, 3, 4).permute(1, 2, 0),
    "repeated": torch.ones(3, 1).expand(3, 4),
    "a number": torch.tensor(1.0),
    "indices": torch.ones(5, dtype=torch.int64),
    "16 bits": torch.ones(5, dtype=torch.bfloat16),
}


@pytest.mark.parametrize("name", TENSORS)
def test_a_described_tensor_is_made_again_with_its_layout(name):
    tensor = TENSORS[name]
    copy = describe_argument(tensor).make()
    assert (copy.shape, copy.stride(), copy.dtype) == (tensor.shape, tensor.stride(), tensor.dtype)
    assert describe_argument(tensor).num_bytes == copy.untyped_storage().nbytes()


def test_indices_of_a_made_tensor_are_valid():
    assert TensorShape((3,), (1,), torch.int64).make().tolist() == [0, 0, 0]
    assert TensorShape((2,), (1,), torch.float32).make().tolist() == [0.5, 0.5]


def test_sizes_of_tensors_and_sizes_among_the_arguments_are_scaled():
    call = make_call(ATEN.new_zeros.default, [torch.ones(14, 4), [14, 3]], num_bytes=28.0)
    scaled = call.scale(lambda size: size // 7 * 2 if size == 14 else size, share=2 / 7)
    assert scaled.arguments == (TensorShape((4, 4), (4, 1), torch.float32), (4, 3))
    assert (scaled.num_flops, scaled.num_bytes) == (160, 8)


def test_scaled_calls_are_as_many_more():
    work = Work(calls={make_call(): 3.0}).scale_calls(
        lambda size: size // 2 if size == 14 else size, share=0.5
    )
    (call,) = work.calls
    assert work.calls[call] == 6 and call.num_flops == 280 and work.total_flops == 3 * 560


def test_a_call_is_timed_once(quick, monkeypatch):
    timer = KernelTimer()
    seconds = timer.find_seconds(make_call())
    assert 0 < seconds < 1
    monkeypatch.setattr(kernel_calls, "time_kernel", None)
    assert timer.find_seconds(make_call()) == seconds


def test_a_call_that_cannot_be_made_has_no_time(quick, monkeypatch):
    assert time_kernel(make_call(arguments=[torch.ones(2, 3), torch.ones(2, 3)])) is None
    assert time_kernel(make_call()) is not None
    # Of 4 * (14 * 4 + 4 * 5) bytes of arguments, and as many of results, a quarter must be free.
    memory = psutil.virtual_memory()._replace(available=4 * 2 * 304 - 1)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: memory)
    assert time_kernel(make_call()) is None


def test_calls_take_the_timed_seconds_or_else_those_of_what_they_compute_and_move():
    timer = KernelTimer()
    timed = make_call()
    not_timed = make_call(ATEN.relu.default, [torch.ones(9)], num_flops=0.0, num_bytes=72.0)
    timer.seconds = {timed: 3.0, not_timed: None}
    work = Work({"float32": 100.0}, calls={timed: 2.0, not_timed: 5.0})
    rates = Rates({"float32": 100.0}, num_bytes=36.0, timer=timer)
    assert find_work_seconds(work, rates) == 1 + 2 * 3 + 5 * 2
    without_timer = Rates({"float32": 100.0}, num_bytes=36.0)
    assert find_work_seconds(work, without_timer) == pytest.approx(1 + 2 * 5.6 + 5 * 2)


def test_operations_over_rows_are_calls_and_all_others_are_counted():
    rows = torch.ones(7, 4)
    weight = torch.ones(4, 4)
    recorder = WorkRecorder(lambda tensor: tensor.shape[0] == 7, keeps_calls=True)
    with recorder:
        rows @ weight
        rows @ weight
        rows.T.view(4, 7)
        torch.empty_like(rows)
        weight.neg()
        recorder.is_update = True
        rows.neg()
    (call,) = recorder.calls
    assert call.kernel is ATEN.mm.default and recorder.calls[call] == 2
    assert call.num_flops == 2 * 7 * 4 * 4
    assert recorder.work[(False, False)] == Work(num_bytes=2 * 4 * 16)
    assert recorder.work[(False, True)] == Work(calls={call: 2})
    assert recorder.work[(True, True)] == Work(num_bytes=2 * 4 * 28)


def test_products_of_groups_are_counted():
    recorder = WorkRecorder(lambda tensor: True, keeps_calls=True)
    rows = torch.ones(8, 16).bfloat16()
    weights = torch.ones(2, 16, 16).bfloat16()
    with recorder:
        torch._grouped_mm(rows, weights, offs=torch.tensor([4, 8], dtype=torch.int32))
    assert all(call.num_flops == 0 for call in recorder.calls)
    assert recorder.work[(False, True)].flops == {"bfloat16": 2 * 8 * 16 * 16}


@pytest.mark.parametrize("max_logits", [331 * 100, 2**30])
def test_calls_of_any_number_of_rows_are_those_of_a_pass_over_them(
    composed, tmp_path, monkeypatch, max_logits
):
    cfg = composed(
        "domains=installed_docs",
        "model=hf",
        f"model.name_or_path={write_config(tmp_path / 'model')}",
        f"model.max_logits={max_logits}",
        "model.max_seq_length=32",
        "logger=none",
    )
    simulation = simulate(cfg)
    is_chunked = simulation.is_chunked(13)
    (scaled,) = simulation.record_step(is_chunked=is_chunked)
    monkeypatch.setattr(Simulation, "choose_num_rows", lambda self: 13)
    (exact,) = simulate(cfg).record_step(is_chunked=is_chunked)
    calls = scaled.count_work(13).calls
    assert sum(call.num_flops > 0 for call in calls) > 10
    assert calls == pytest.approx(exact.count_work(13).calls)


def test_a_long_call_is_timed_over_fewer_rows(composed, tmp_path):
    folder = write_config(tmp_path / "model")
    cfg = composed(
        "domains=installed_docs", "model=hf", f"model.name_or_path={folder}", "model.max_seq_length=32"
    )
    (step,) = simulate(cfg).record_step(is_chunked=False)
    step.max_timed_rows = 2
    calls_of_2_rows = step.count_work(2).calls
    calls_of_6_rows = step.count_work(6).calls
    assert set(calls_of_2_rows) == set(calls_of_6_rows)
    for call, num_calls in calls_of_2_rows.items():
        assert calls_of_6_rows[call] == pytest.approx(3 * num_calls)
