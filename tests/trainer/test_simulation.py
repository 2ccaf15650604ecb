"""Simulated steps allocate and compute what real ones do, for any number of rows."""

import itertools

import numpy as np
import pytest
import torch
from torch.nn import functional

from cpt.models import chunked_head
from cpt.trainer.simulation import (
    ACTIVATIONS,
    GRADIENTS,
    METHOD_STATE,
    OPTIMIZER_STATE,
    WEIGHT_COPIES,
    WEIGHTS,
    Simulation,
)
from tests.support.campaign import run_few
from tests.support.simulated import simulate, with_storage, write_config

SIZES = ["domains=installed_docs", "model=hf", "model.max_seq_length=32", "logger=none"]
SIZES += ["trainer.precision=32-true", "trainer.batch_size=8", "trainer.eval_batch_size=8"]


@pytest.fixture
def llama(composed, tmp_path):
    folder = write_config(tmp_path / "model")
    return lambda *overrides: composed(*SIZES, f"model.name_or_path={folder}", *overrides)


SETUPS = [
    "method=ncl",
    "method=ncl trainer.gradient_checkpointing=true",
    "method=ncl trainer.precision=bf16-mixed",
    "method=ncl trainer.precision=bf16-true",
    "method=ncl trainer.accumulate_grad_batches=2",
    "method=lora trainer.gradient_checkpointing=true",
    "method=kd",
    "method=ewc",
    "method=ncl mask=migu",
    "method=adapter",
    "method=osf",
]
STEPS = [*itertools.product(SETUPS, (False, True))]
FEW_STEPS = [(SETUPS[2], False), (SETUPS[0], True), (SETUPS[5], True), (SETUPS[7], True)]


@pytest.mark.parametrize("case", run_few(STEPS, FEW_STEPS), ids=str)
def test_without_storage_a_step_takes_the_bytes_and_operations_of_a_real_one(llama, case, monkeypatch):
    setup, is_chunked = case
    cfg = llama(*setup.split())
    passes = []
    states = []
    for is_real in (False, True):
        if is_real:
            with_storage(monkeypatch)
        simulation = simulate(cfg)
        (step,) = simulation.record_step(is_chunked=is_chunked)
        passes.append([step, simulation.record_evaluation(is_chunked=is_chunked)])
        states.append(simulation.count_state())
    assert states[0] == states[1]
    for fake, real in zip(*passes, strict=True):
        assert fake.flops == real.flops > 0
        for num_rows in (1, 5, 40):
            if "checkpointing" in setup:  # which stores states of random numbers of a few kB
                total = sum(real.find_peak(num_rows).values())
                assert sum(fake.find_peak(num_rows).values()) == pytest.approx(total, abs=15_000)
            else:
                assert fake.find_peak(num_rows) == real.find_peak(num_rows)


PASSES = [*itertools.product(SETUPS, (331 * 100, 2**30))]
FEW_PASSES = [(SETUPS[0], 331 * 100), (SETUPS[5], 2**30)]


@pytest.mark.parametrize("case", run_few(PASSES, FEW_PASSES), ids=str)
def test_a_pass_is_that_of_any_number_of_rows(llama, case, monkeypatch):
    setup, max_logits = case
    monkeypatch.setattr(chunked_head, "MAX_LOGITS", max_logits)
    cfg = llama(*setup.split())
    simulation = simulate(cfg)
    for num_rows in (2, 24):
        is_chunked = simulation.is_chunked(num_rows)
        assert is_chunked == (num_rows * 31 * 331 > max_logits)
        (scaled,) = simulation.record_step(is_chunked=is_chunked)
        with monkeypatch.context() as patch:
            patch.setattr(Simulation, "choose_num_rows", lambda self, num_rows=num_rows: num_rows)
            (exact,) = simulate(cfg).record_step(is_chunked=is_chunked)
        expected = sum(exact.find_peak(num_rows).values())
        assert sum(scaled.find_peak(num_rows).values()) == pytest.approx(expected, rel=0.02)
        work = scaled.count_work(num_rows)
        exact_work = exact.count_work(num_rows)
        assert work.total_flops == pytest.approx(exact_work.total_flops, rel=0.01)
        assert count_moved(work) == pytest.approx(count_moved(exact_work), rel=0.02)


def count_moved(work):
    """The bytes that work moves, those of its calls among them."""
    return work.num_bytes + sum(num_calls * call.num_bytes for call, num_calls in work.calls.items())


def test_the_state_of_adamw_in_32_bits_is_16_bytes_a_parameter(llama):
    simulation = simulate(llama("method=ncl"))
    num_parameters = simulation.count_parameters()
    state = simulation.count_state()
    assert state[WEIGHTS].sharded == state[GRADIENTS].sharded == 4 * num_parameters
    assert state[OPTIMIZER_STATE].sharded == 8 * num_parameters
    assert state[METHOD_STATE].sharded == 0
    assert state[WEIGHTS].on_device(4) == num_parameters + state[WEIGHTS].replicated


def test_adapters_stay_whole_and_copies_of_weights_are_sharded(llama):
    lora = simulate(llama("method=lora", "method.r=4"))
    state = lora.count_state()
    assert state[GRADIENTS].replicated == 4 * lora.count_trained() and state[GRADIENTS].sharded == 0
    assert state[WEIGHTS].sharded == 4 * (lora.count_parameters() - lora.count_trained())
    teacher = simulate(llama("method=kd")).count_state()
    assert teacher[METHOD_STATE].sharded == teacher[WEIGHTS].sharded
    offloaded = simulate(llama("method=kd", "trainer.offload_method_state=true")).count_state()
    assert offloaded[METHOD_STATE].offloaded == teacher[METHOD_STATE].sharded
    assert offloaded[METHOD_STATE].sharded == 0


def test_checkpointing_is_switched_without_another_model(llama):
    simulation = simulate(llama("method=ncl"))
    (plain,) = simulation.record_step(is_chunked=False)
    simulation.set_checkpointing(True)
    (checkpointed,) = simulation.record_step(is_chunked=False)
    simulation.set_checkpointing(False)
    simulation.record_evaluation(is_chunked=False)  # without gradients
    (plain_again,) = simulation.record_step(is_chunked=False)
    assert plain_again.find_peak(8) == plain.find_peak(8)
    assert sum(checkpointed.find_peak(8).values()) < sum(plain.find_peak(8).values())
    assert checkpointed.flops > plain.flops


def test_gathered_weights_are_those_outside_of_blocks_and_of_three_blocks(llama):
    simulation = simulate(llama("method=ncl"))
    model = simulation.method.model
    block = 4 * sum(parameter.numel() for parameter in model.model.layers[0].parameters())
    outside = 4 * simulation.count_parameters() - 2 * block
    gathered = simulation.count_gathered()
    assert gathered.weights == outside + 3 * block
    assert gathered.in_training == gathered.weights + outside + 2 * block


LONG_ROWS = ["model.max_seq_length=256", "method=ncl"]


@pytest.mark.parametrize(
    ("options", "has_scores"),
    [
        ("trainer.precision=bf16-mixed", False),
        ("trainer.precision=32-true", True),  # with keys that heads share
        ("trainer.precision=bf16-mixed domains.packing=document_mask", False),
    ],
)
def test_attention_on_a_gpu_has_scores_in_32_bits_with_shared_keys_alone(llama, options, has_scores):
    step = simulate(llama(*LONG_ROWS, *options.split()), is_gpu=True).record_step(is_chunked=True)[0]
    table = step.allocations
    num_scores = step.num_rows * 4 * 256 * 256  # of 4 heads
    largest = table.num_bytes[table.has_use[ACTIVATIONS]].max()
    assert (largest >= 2 * num_scores) == has_scores


EXPERTS = {
    "model_type": "qwen3_moe",
    "architectures": ["Qwen3MoeForCausalLM"],
    "head_dim": 8,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
}


def test_experts_compute_in_the_type_of_their_weights(composed, tmp_path, monkeypatch):
    folder = write_config(tmp_path / "mixture", **EXPERTS)
    options = ["trainer.precision=bf16-mixed", "model.router_aux_loss=0", "method=ncl"]
    cfg = composed(*SIZES, f"model.name_or_path={folder}", *options)
    (fake,) = simulate(cfg).record_step(is_chunked=False)
    with_storage(monkeypatch)
    (real,) = simulate(cfg).record_step(is_chunked=False)
    assert fake.flops == real.flops > 0
    for num_rows in (5, 40):
        expected = sum(real.find_peak(num_rows).values())
        assert sum(fake.find_peak(num_rows).values()) == pytest.approx(expected, rel=0.02)


def test_evaluation_keeps_no_copies_of_weights(llama):
    simulation = simulate(llama("method=ncl", "trainer.precision=bf16-mixed"))
    (step,) = simulation.record_step(is_chunked=False)
    assert step.find_peak(1)[WEIGHT_COPIES] > 0
    assert WEIGHT_COPIES not in simulation.record_evaluation(is_chunked=False).find_peak(1)


def test_the_environment_is_as_before(llama):
    before = (functional.scaled_dot_product_attention, torch.nn.Module._apply, chunked_head.MAX_LOGITS)
    torch.manual_seed(3)
    expected = torch.rand(1)
    torch.manual_seed(3)
    simulation = simulate(llama("method=ncl"), is_gpu=True)
    simulation.record_step(is_chunked=True)
    assert torch.equal(torch.rand(1), expected)
    after = (functional.scaled_dot_product_attention, torch.nn.Module._apply, chunked_head.MAX_LOGITS)
    assert after == before


def test_rows_are_a_number_that_divides_no_size(llama, tmp_path, composed):
    folder = write_config(tmp_path / "fives", hidden_size=40, intermediate_size=7 * 16, vocab_size=330)
    cfg = composed(*SIZES, f"model.name_or_path={folder}", "method=ncl")
    assert simulate(cfg).num_rows == 13  # 5, 7 and 11 divide 40, 112 and 330
    assert np.gcd.reduce([simulate(llama("method=ncl")).num_rows, 32, 88, 331]) == 1


def test_quantized_layers_have_few_bits_and_the_memory_of_their_product_is_in_full(llama):
    full = simulate(llama("method=lora"))
    num_linear = 2 * (2 * 32 * 32 + 2 * 32 * 16 + 3 * 32 * 88)  # of 2 blocks
    of_tables = 2 * 7 * 256 * 4  # a table of values for the scales of each layer in 4 bits
    for quantization, bits, num_bytes in (("nf4", 4, of_tables), ("int8", 8, 0)):
        options = ["method=lora", f"model.quantization={quantization}", "plan=true", "plan_device=h100"]
        quantized = simulate(llama(*options))
        assert quantized.count_parameters() == full.count_parameters()
        assert quantized.count_trained() == full.count_trained()
        saved = full.count_state()[WEIGHTS].on_device(1) - quantized.count_state()[WEIGHTS].on_device(1)
        expected = num_linear * (4 - bits / 8) - num_bytes
        assert saved == pytest.approx(expected, rel=0.05)  # scales are in addition
        (step,) = quantized.record_step(is_chunked=False)
        assert step.flops == pytest.approx(full.record_step(is_chunked=False)[0].flops, rel=0.01)


def test_a_frozen_base_stays_in_the_16_bits_that_its_configuration_names(composed, tmp_path):
    folder = write_config(tmp_path / "narrow", dtype="bfloat16")

    def simulate_with(*overrides):
        return simulate(composed(*SIZES, f"model.name_or_path={folder}", *overrides))

    def count_weights(simulation):
        """Bytes without the frequencies of positions."""
        return simulation.count_state()[WEIGHTS].on_device(1) - 2 * 4 * 4

    lora = simulate_with("method=lora")
    num_frozen = lora.count_parameters() - lora.count_trained()
    in_norms = 5 * 32  # which are in 32 bits
    expected = 2 * num_frozen + 2 * in_norms + 4 * lora.count_trained()
    assert count_weights(lora) == expected
    wide = simulate_with("method=lora", "model.dtype=float32")
    assert count_weights(wide) == 4 * lora.count_parameters()
    trained = simulate_with("method=ncl")
    assert count_weights(trained) == 4 * trained.count_parameters()


def test_the_moments_of_adamw_8bit_are_two_bytes_of_a_large_matrix(llama):
    options = ["method=ncl", "optim=adamw_8bit", "plan=true", "plan_device=h100"]
    simulation = simulate(llama(*options))
    num_bytes = 0.0
    for parameter in simulation.method.parameters():
        is_small = parameter.numel() < 4096
        num_bytes += 8 * parameter.numel() if is_small else (2 + 8 / 256) * parameter.numel()
    state_bytes = simulation.count_state()[OPTIMIZER_STATE].on_device(1)
    assert state_bytes == pytest.approx(num_bytes, abs=2 * 256 * 4 + 100)


@pytest.mark.parametrize("optim", ["muon", "adafactor", "sgd"])
def test_other_optimizers_are_simulated_as_they_are(llama, optim, monkeypatch):
    cfg = llama("method=ncl", f"optim={optim}")
    fake = simulate(cfg).count_state()
    with_storage(monkeypatch)
    assert simulate(cfg).count_state() == fake
