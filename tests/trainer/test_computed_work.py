"""What simulated operations compute and move, and the seconds that it takes at given rates."""

import dataclasses

import pytest
import torch

from cpt.trainer import computed_time
from cpt.trainer.computed_memory import make_layout
from cpt.trainer.computed_time import Rates, count_step_work, find_rates, find_seconds, find_work_seconds
from cpt.trainer.computed_work import Work, WorkRecorder
from cpt.trainer.device_kinds import GPUS, DeviceKind
from cpt.trainer.plan import make_plan
from cpt.trainer.simulated_plan import SimulatedPlan
from tests.support.simulated import simulate, write_config

SIZES = ["domains=installed_docs", "model=hf", "model.max_seq_length=32", "logger=none", "method=ncl"]
SIZES += ["trainer.precision=32-true", "trainer.batch_size=8", "trainer.eval_batch_size=8"]
SIZES += ["plan=true", "plan_device=cpu"]
RATES = Rates({"float32": 100.0, "bfloat16": 200.0}, num_bytes=10.0, num_dequantized=5.0)


@pytest.fixture
def llama(composed, tmp_path):
    folder = write_config(tmp_path / "model")
    return lambda *overrides: composed(*SIZES, f"model.name_or_path={folder}", *overrides)


def record(run, *, grows=lambda tensor: False):
    recorder = WorkRecorder(grows)
    with recorder:
        run(recorder)
    return recorder.work


OPERATIONS = {
    "cast": (lambda wide: wide.to(torch.bfloat16), 100 * (4 + 2)),
    "new": (lambda wide: wide + wide, 100 * (2 * 4 + 4)),
    "in place": (lambda wide: wide.add_(1), 100 * (4 + 4)),
    "many in place": (lambda wide: torch._foreach_add_([wide], [wide.clone()]), 100 * (8 + 3 * 4)),
    "a view": (lambda wide: wide.view(2, 50).T[0], 0),
    "reserved": (lambda wide: torch.empty_like(wide), 0),
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_an_operation_moves_what_it_reads_and_writes(name):
    operation, num_bytes = OPERATIONS[name]
    tensor = torch.ones(100)
    work = record(lambda recorder: operation(tensor))
    assert sum(part.num_bytes for part in work.values()) == num_bytes


def test_products_are_counted_by_type_and_move_nothing():
    def multiply(recorder):
        wide = torch.ones(4, 4)
        torch.nn.functional.linear(wide, wide)
        wide.bfloat16() @ wide.bfloat16()

    (work,) = [part for part in record(multiply).values() if part.flops]
    assert work.flops == {"float32": 128, "bfloat16": 128} and work.num_bytes == 0


def test_work_of_the_update_and_work_that_grows_are_apart():
    def run(recorder):
        torch.ones(10).neg()
        torch.ones(5).neg()
        recorder.is_update = True
        torch.ones(10).neg()

    work = record(run, grows=lambda tensor: tensor.numel() == 5)
    num_bytes = {key: part.num_bytes for key, part in work.items()}
    assert num_bytes == {(False, False): 120, (False, True): 60, (True, False): 120}


def test_seconds_are_those_of_products_by_type_of_bytes_and_of_dequantized_weights():
    work = Work({"float32": 100.0, "bfloat16": 400.0}, num_bytes=30.0, num_dequantized=20.0)
    assert find_work_seconds(work, RATES) == 1 + 2 + 3 + 4
    assert find_work_seconds(Work({"float16": 100.0}), RATES) == 1  # of a type that was not timed
    assert find_work_seconds(work, Rates({"bfloat16": 100.0})) == 5  # of a GPU, products alone


def test_autocast_casts_each_weight_in_each_pass_and_its_gradient(llama):
    passes = {}
    for precision in ("32-true", "bf16-mixed"):
        (passes[precision],) = simulate(llama(f"trainer.precision={precision}")).record_step(is_chunked=False)
    num_weights = simulate(llama()).count_parameters() - 331 * 32 - 5 * 32  # neither embedding nor norms
    fixed = {precision: step.work[(False, False)].num_bytes for precision, step in passes.items()}
    assert fixed["bf16-mixed"] - fixed["32-true"] == pytest.approx(2 * 6 * num_weights, rel=0.05)
    products = [call for call in passes["bf16-mixed"].work[(False, True)].calls if call.num_flops]
    assert {call.flops_type for call in products} == {"bfloat16"}

    step = passes["bf16-mixed"]
    update = step.work[(True, False)].num_bytes
    assert step.count_work(8, num_passes=3).num_bytes - update == pytest.approx(
        3 * (step.count_work(8).num_bytes - update)
    )
    assert step.count_work(8, num_shards=2).num_bytes == step.count_work(8).num_bytes - update / 2


def test_the_update_moves_weights_gradients_and_both_moments(llama):
    simulation = simulate(llama("trainer.gradient_clip_val=null"))
    (plain,) = simulation.record_step(is_chunked=False)
    (clipped,) = simulate(llama("trainer.gradient_clip_val=1")).record_step(is_chunked=False)
    num_parameters = simulation.count_parameters()
    plain_bytes, clipped_bytes = (step.work[(True, False)].num_bytes for step in (plain, clipped))
    # At least: four tensors are read and three written, and the norm of gradients is computed.
    assert 32 * num_parameters <= plain_bytes < 60 * num_parameters
    assert clipped_bytes - plain_bytes == pytest.approx(8 * num_parameters, rel=0.05)


def test_weights_in_4_bits_are_dequantized_forward_and_backward(llama):
    options = ["method=lora", "model.quantization=nf4", "plan_device=h100"]
    (step,) = simulate(llama(*options)).record_step(is_chunked=False)
    num_linear = 2 * (2 * 32 * 32 + 2 * 32 * 16 + 3 * 32 * 88)  # of 2 blocks
    # The inputs of the first block's attention need no gradient.
    assert step.count_work(8).num_dequantized == pytest.approx(2 * num_linear, rel=0.15)
    assert step.count_work(80).num_dequantized == step.count_work(8).num_dequantized


def test_updates_in_8_bits_are_counted_by_weights(llama):
    simulation = simulate(llama("optim=adamw_8bit"))
    (step,) = simulation.record_step(is_chunked=False)
    work = step.count_work(8, num_passes=3)
    assert work.num_8bit_updates == simulation.count_trained()
    assert step.count_work(8, num_shards=2).num_8bit_updates == simulation.count_trained() / 2
    rates = Rates({"float32": 1e9}, num_8bit_updates=float(simulation.count_trained()))
    assert find_work_seconds(Work(num_8bit_updates=work.num_8bit_updates), rates) == 1


def test_a_cpu_is_timed_once_and_a_gpu_has_a_share_of_its_peak(llama, monkeypatch):
    timed = []
    monkeypatch.setattr(computed_time, "measure_cpu_once", lambda **options: timed.append(options) or RATES)
    plan = make_plan(llama("trainer.precision=bf16-mixed", "trainer.steps=5"))
    simulated = SimulatedPlan(plan, DeviceKind("CPU", 10**9, peak_flops={}, source="", is_gpu=False))
    layout = make_layout(plan, 1)
    assert find_rates(simulated) == RATES
    assert timed == [
        {
            "has_16_bit_products": True,
            "is_quantized": False,
            "is_checkpointed": False,
            "has_8bit_moments": False,
        }
    ]

    work = count_step_work(simulated, layout)
    seconds = find_seconds(simulated, layout, RATES)
    assert seconds["step"] == find_work_seconds(work, RATES) > work.num_bytes / 10
    assert seconds["training"] == pytest.approx(3 * 5 * seconds["step"])
    twice = find_seconds(simulated, layout, dataclasses.replace(RATES, num_bytes=5.0))
    for name in ("step", "evaluation"):
        assert twice[name] > 1.3 * seconds[name]

    on_gpu = find_rates(SimulatedPlan(plan, GPUS["h100"]))
    assert on_gpu.flops == {"bfloat16": 989.4e12 * 0.2} and on_gpu.num_bytes == float("inf")


def test_the_products_of_muon_have_the_rate_of_16_bits_in_a_run_of_32(llama, monkeypatch):
    timed = []
    monkeypatch.setattr(computed_time, "measure_cpu_once", lambda **options: timed.append(options) or RATES)
    plan = make_plan(llama("optim=muon", "trainer.precision=32-true"))
    find_rates(SimulatedPlan(plan, DeviceKind("CPU", 10**9, peak_flops={}, source="", is_gpu=False)))
    assert timed[0]["has_16_bit_products"]
    on_gpu = find_rates(SimulatedPlan(plan, GPUS["h100"]))
    assert on_gpu.flops["bfloat16"] > 5 * on_gpu.flops["float32"]


def test_the_rates_of_this_cpu_are_numbers(monkeypatch):
    monkeypatch.setattr(computed_time, "TIMED_SECONDS", 1e-4)
    monkeypatch.setattr(computed_time, "MATRIX_SIZE", 16)
    monkeypatch.setattr(computed_time, "QUANTIZED_SIZE", 64)
    monkeypatch.setattr(computed_time, "keep_blocks_for_run", lambda is_checkpointed: None)
    rates = computed_time.measure_cpu(
        has_16_bit_products=True, is_quantized=True, is_checkpointed=False, has_8bit_moments=True
    )
    assert set(rates.flops) == {"float32", "bfloat16"} and min(rates.flops.values()) > 0
    assert 0 < rates.num_bytes < float("inf") and 0 < rates.num_dequantized < float("inf")
    assert 0 < rates.num_8bit_updates < float("inf")
    wide = computed_time.measure_cpu(
        has_16_bit_products=False, is_quantized=False, is_checkpointed=False, has_8bit_moments=False
    )
    assert set(wide.flops) == {"float32"}
    assert wide.num_dequantized == wide.num_bytes / 4 and wide.num_8bit_updates == wide.num_bytes / 12
