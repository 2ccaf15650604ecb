"""What a GPU must give: every method learns there what it learns on a CPU, a killed run ends with the same
bits, what rests on the host changes none.

    CUDA_VISIBLE_DEVICES=0 python -m pytest -m "" tests/test_gpu.py    # the other tests see no GPU
"""

import json

import pytest
import torch

from tests.methods.test_contract import LEARNING, bits
from tests.methods.test_offload import KEPT, OFFLOAD, options_of
from tests.runs.reading import scores_of
from tests.support.hook_methods import overrides_for
from tests.support.kill_callback import KilledError, Killer
from tests.support.method_fixtures import DROPOUT, ORDER, equal_tensors, load_model_weights
from tests.support.quantized_models import SMALL_HF, needs_bitsandbytes, save_checkpoint

HAS_GPU = torch.cuda.is_available()
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not HAS_GPU, reason="no GPU is seen; CUDA_VISIBLE_DEVICES=0 shows the first"),
]
GPU = f"trainer.accelerator={'gpu' if HAS_GPU else 'cpu'}"
CPU = "trainer.accelerator=cpu"
DETERMINISTIC = "trainer.deterministic=true"
TOLERANCE = 0.02  # nats, between the losses after 6 steps from the same weights, which are some 6


@pytest.fixture
def scores(small, start, tmp_path):
    def run(name, *overrides):
        start(small(ORDER, *overrides), tmp_path / name)
        return json.loads((tmp_path / name / "scores.json").read_text())

    return run


@pytest.mark.parametrize("method", LEARNING)
def test_it_is_learned_as_on_a_processor_and_in_16_bits(method, scores):
    on_gpu = torch.tensor(scores("gpu", *overrides_for(method), GPU)["nll"])
    on_cpu = torch.tensor(scores("cpu", *overrides_for(method), CPU)["nll"])
    torch.testing.assert_close(on_gpu, on_cpu, atol=TOLERANCE, rtol=0)

    in_bf16 = scores("bf16", *overrides_for(method), GPU, "trainer.precision=bf16-mixed", *DROPOUT)
    losses = torch.tensor(in_bf16["nll"])
    assert ((losses > 0) & (losses < 20)).all()


@pytest.mark.parametrize("method", LEARNING)
def test_killed_and_started_again_it_ends_with_the_same_bits(method, killing, small, start, scores, tmp_path):
    overrides = [*overrides_for(method), GPU, DETERMINISTIC, *DROPOUT]
    scores("whole", *overrides)
    for step in (1, 3):
        killing(Killer(step=step, domain="joint" if method == "joint" else "food"))
        with pytest.raises(KilledError):
            start(small(ORDER, *overrides), tmp_path / "killed")
    killing(None)
    scores("killed", *overrides)
    assert bits(tmp_path / "killed") == bits(tmp_path / "whole")


@pytest.mark.parametrize("kind", KEPT)
def test_what_rests_on_the_host_changes_no_bit(kind, scores, tmp_path):
    for name, options in {"there": [], "host": [OFFLOAD]}.items():
        scores(name, *options_of(kind), GPU, DETERMINISTIC, *options)
    assert bits(tmp_path / "there") == bits(tmp_path / "host")


@needs_bitsandbytes
@pytest.mark.parametrize("kind", ["nf4", "int8"])
def test_a_quantized_base_is_the_same_on_both(kind, composed, corpora, cache, start, killing, tmp_path):
    checkpoint = save_checkpoint(tmp_path / "checkpoint")
    texts = ["domains=texts", f"domains.root={corpora}", f"cache_dir={cache}", ORDER]
    options = [*texts, *SMALL_HF, f"model.name_or_path={checkpoint}", "method=lora"]
    options.append(f"model.quantization={kind}")
    for name, device in {"gpu": GPU, "cpu": CPU}.items():
        start(composed(*options, device, DETERMINISTIC), tmp_path / name)
    matrices = [torch.tensor(scores_of(tmp_path / name).nll) for name in ("gpu", "cpu")]
    torch.testing.assert_close(*matrices, atol=TOLERANCE, rtol=0)

    killing(Killer(step=3, domain="food"))
    with pytest.raises(KilledError):
        start(composed(*options, GPU, DETERMINISTIC), tmp_path / "killed")
    killing(None)
    start(composed(*options, GPU, DETERMINISTIC), tmp_path / "killed")
    assert bits(tmp_path / "killed") == bits(tmp_path / "gpu")


OPTIMIZERS = [
    "optim=muon",
    "optim=adafactor",
    "trainer.precision=bf16-true",
    "optim=muon trainer.precision=bf16-true",
    pytest.param("optim=adamw_8bit optim.min_8bit_size=256", marks=needs_bitsandbytes),
    pytest.param("optim=adamw_8bit trainer.precision=bf16-true", marks=needs_bitsandbytes),
]


@pytest.mark.parametrize("options", OPTIMIZERS)
def test_an_optimizer_learns_on_both_and_resumes(options, killing, small, start, scores, tmp_path):
    overrides = [*options.split(), DETERMINISTIC, "optim.state_across_domains=moments"]
    on_gpu = torch.tensor(scores("gpu", *overrides, GPU)["nll"])
    on_cpu = torch.tensor(scores("cpu", *overrides, CPU)["nll"])
    torch.testing.assert_close(on_gpu, on_cpu, atol=TOLERANCE, rtol=0)
    killing(Killer(step=3, domain="food"))
    with pytest.raises(KilledError):
        start(small(ORDER, *overrides, GPU), tmp_path / "killed")
    killing(None)
    scores("killed", *overrides, GPU)
    assert equal_tensors(load_model_weights(tmp_path / "killed"), load_model_weights(tmp_path / "gpu"))
