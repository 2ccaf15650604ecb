"""The optimizers of conf/optim in training: which weights they train, kills, masks on steps, what is refused."""

import pytest
import torch

from cpt.models.units import find_block_matrices
from cpt.optim import options
from cpt.trainer import log_settings
from cpt.trainer.check_optimizer import check_optimizer
from cpt.trainer.plan import make_plan
from tests.support.campaign import run_few
from tests.support.kill_callback import KilledError, Killer
from tests.support.method_fixtures import (
    ORDER,
    StepRecorder,
    assert_unchosen_rows_are_unchanged,
    equal_tensors,
    load_model_weights,
)
from tests.support.quantized_models import needs_bitsandbytes

EIGHT_BITS = "adamw_8bit optim.min_8bit_size=256"


def find_layer_name(weight: str) -> str:
    """The last part of a layer's name; of an adapter's the last two."""
    parts = weight.removesuffix(".weight").split(".")
    return ".".join(parts[-2:]) if "lora" in weight else parts[-1]


@pytest.mark.parametrize(
    ("method", "names"),
    [
        ("ncl", {"c_attn", "c_proj", "c_fc"}),
        ("lora", {"lora_A.default", "lora_B.default"}),
        ("prompt", set()),
    ],
)
def test_muon_trains_the_matrices_of_the_blocks_alone(method, names, build, caplog, monkeypatch):
    monkeypatch.setattr(log_settings, "is_bf16_emulated", lambda: method == "lora")
    run = build(method, "optim=muon", "optim.weight_decay=0.5", "trainer.steps=1", on="causal")
    settings = {}

    def record(module):
        names_by_parameter = {parameter: name for name, parameter in module.model.named_parameters()}
        for group in module.trainer.optimizers[0].param_groups:
            for parameter in group["params"]:
                settings[names_by_parameter[parameter]] = group["optimizer"], group["weight_decay"]

    run.learn(0, StepRecorder(record))
    by_muon = {name for name, (optimizer, _) in settings.items() if optimizer == "muon"}
    assert {find_layer_name(name) for name in by_muon} == names
    with caplog.at_level("INFO", logger="cpt"):
        log_settings.log_muon(run.plan, run.module)
    assert ("No effect of optim=muon: method=prompt" in caplog.text) == (method == "prompt")
    assert ("optim=muon is slow on this CPU" in caplog.text) == (method == "lora")
    if method == "ncl":
        assert len(by_muon) == len(find_block_matrices(run.module.model))
        assert settings["transformer.wte.weight"] == ("adamw", 0.5)
        assert settings["transformer.h.0.ln_1.weight"] == ("adamw", 0.0)


OPTIMIZERS = [*run_few(["muon", "adafactor"], ["muon"]), pytest.param(EIGHT_BITS, marks=needs_bitsandbytes)]
IN_BF16 = [f"{name} trainer.precision=bf16-true" for name in ("muon", "adafactor")]


@pytest.mark.parametrize("case", [*OPTIMIZERS, *run_few(IN_BF16, [])])
def test_killed_and_started_again_it_ends_with_the_same_bits(case, small_gpt2, start, killing, tmp_path):
    mask = ["mask=migu", "mask.migu.apply_to=update"]
    parameters = ["optim.lr_multipliers={embeddings: 0.1}", "optim.no_decay=[embeddings]"]
    carried = ["optim.state_across_domains=moments", "optim.weight_decay=0.1"]
    config = [ORDER, *f"optim={case}".split(), *mask, *parameters, *carried, "trainer.steps=4"]
    start(small_gpt2(*config), tmp_path / "whole")
    killing(Killer(step=3, domain="food"))
    with pytest.raises(KilledError):
        start(small_gpt2(*config), tmp_path / "killed")
    killing(None)
    start(small_gpt2(*config), tmp_path / "killed")
    assert equal_tensors(load_model_weights(tmp_path / "whole"), load_model_weights(tmp_path / "killed"))


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_rows_that_a_mask_holds_do_not_move(optimizer, build):
    """Neither by momentum nor by decay, also where a step of one row depends on the others, as Muon's."""
    mask = ["mask=migu", "mask.migu.apply_to=update", "mask.migu.threshold=0.9"]
    run = build("ncl", *f"optim={optimizer}".split(), "optim.weight_decay=0.1", *mask, on="causal")
    start = run.weights()
    run.learn(0)
    assert_unchosen_rows_are_unchanged(run, start)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_multipliers_and_decay_reach_each_weight(optimizer, build):
    """Without gradients from the loss, what decays is what may, by the rate of its group."""
    choice = [
        *f"optim={optimizer}".split(),
        "optim.weight_decay=0.5",
        "optim.lr=0.01",
        "optim.no_decay=[attention]",
    ]
    run = build(
        "ncl",
        *choice,
        "optim.lr_multipliers={embeddings: 0.1}",
        "lr_scheduler=constant",
        "lr_scheduler.warmup_ratio=0",
        "trainer.steps=1",
        on="causal",
    )
    start = run.weights()
    run.module.transform_gradients = lambda optimizer: zero_gradients(run.module)
    run.learn(0)
    factors = {
        "wte.weight": 1 - 0.01 * 0.1 * 0.5,
        "c_fc.weight": 1 - 0.01 * 0.5,
        "c_attn.weight": 1.0,
        "ln_1.weight": 1.0,
    }
    weights = run.weights()
    for ending, factor in factors.items():
        names = [name for name in weights if name.endswith(ending)]
        assert names
        for name in names:
            torch.testing.assert_close(weights[name], factor * start[name], rtol=1e-6, atol=1e-9, msg=name)


def zero_gradients(module) -> None:
    for parameter in module.parameters():
        if parameter.grad is not None:
            parameter.grad.zero_()


def test_a_missing_library_is_named_at_once(small, monkeypatch):
    monkeypatch.setattr(options, "find_spec", lambda name: None)
    with pytest.raises(
        ValueError, match=r"optim=adamw_8bit is invalid: bitsandbytes is not installed. Allowed: "
    ) as error:
        make_plan(small("optim=adamw_8bit"))
    assert "\n" not in str(error.value) and "pip install -e '.[bitsandbytes]'" in str(error.value)


REFUSED = {
    "optim=adamw_8bit strategy=fsdp": "optim=adamw_8bit is invalid with strategy=fsdp: its state is of whole parameters",
    "optim=adamw_8bit mask=mofo": "optim=adamw_8bit is invalid with mask=mofo: it keeps no moment for each weight",
    "optim=adamw_8bit method=migu method.mask.apply_to=frozen": "optim=adamw_8bit is invalid with apply_to=frozen",
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_8_bits_lack_is_refused(case, small, monkeypatch):
    monkeypatch.setattr(options, "find_spec", lambda name: name)
    with pytest.raises(ValueError) as error:
        make_plan(small(*case.split()))
    assert str(error.value).startswith(REFUSED[case])


def test_an_optimizer_with_modes_is_refused(monkeypatch):
    """As those of the package schedulefree, whose weights in training are not those to evaluate."""
    monkeypatch.setattr(torch.optim.SGD, "train", lambda optimizer: None, raising=False)
    with pytest.raises(ValueError, match="optim._target_=torch.optim.SGD is invalid: it has to be switched"):
        check_optimizer("optim", {"_target_": "torch.optim.SGD", "lr": 1.0})
