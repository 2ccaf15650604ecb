"""Learning rates and decay by parameters, and modules that are trained in addition to adapters, in training."""

import pytest
import torch

from tests.support.kill_callback import KilledError, Killer
from tests.support.lora_weights import clone_base_weights
from tests.support.method_fixtures import ORDER, StepRecorder, equal_tensors, load_model_weights

ONE_STEP = ["trainer.steps=1", "optim.weight_decay=0", "lr_scheduler=constant", "optim.lr=0.01"]
SAVED = "method.modules_to_save=[embeddings,head]"


def movement(run) -> dict[str, torch.Tensor]:
    """How far each weight moves in the first domain."""
    start = run.weights()
    run.learn(0)
    return {name: weight - start[name] for name, weight in run.weights().items()}


def test_steps_are_multiplied_by_kind_and_by_name(build):
    plain = movement(build("ncl", *ONE_STEP, on="causal"))
    multipliers = "optim.lr_multipliers={embeddings: 0.1, h\\.0\\.: 0.5}"
    multiplied = movement(build("ncl", *ONE_STEP, multipliers, on="causal"))
    factors = {"wte": 0.1, "wpe": 0.1, ".h.0.": 0.5, ".h.1.": 1, "ln_f": 1}
    for part, factor in factors.items():
        names = [name for name in plain if part in name]
        assert names
        for name in names:
            torch.testing.assert_close(multiplied[name], factor * plain[name], rtol=1e-3, atol=1e-6)


def group_settings(run) -> dict[str, tuple[float, float]]:
    """The learning rate and the decay of each weight in the first step, by name."""
    settings = {}

    def note(module):
        names = {parameter: name for name, parameter in module.model.named_parameters()}
        for group in module.trainer.optimizers[0].param_groups:
            for parameter in group["params"]:
                settings[names[parameter]] = group["lr"], group["weight_decay"]

    run.learn(0, StepRecorder(note))
    return settings


def test_the_rates_of_a_method_are_multiplied(build):
    options = ["trainer.steps=1", "lr_scheduler=constant", "optim.lr=0.01", "optim.weight_decay=0.5"]
    settings = group_settings(
        build("hat", *options, "method.gate_rate=5", "optim.lr_multipliers={_gate: 0.5}")
    )
    gates = {rate for name, (rate, _) in settings.items() if name.endswith("_gate.e")}
    other_rates = {rate for name, (rate, _) in settings.items() if not name.endswith("_gate.e")}
    assert list(gates) == pytest.approx([0.025]) and other_rates == {0.01}


def test_parameters_without_decay_have_none_and_the_others_as_before(build):
    options = ["trainer.steps=1", "optim.weight_decay=0.5"]
    plain = group_settings(build("ncl", *options, on="causal"))
    settings = group_settings(build("ncl", *options, "optim.no_decay=[embeddings]", on="causal"))
    changed = {name for name in plain if plain[name] != settings[name]}
    assert changed == {"transformer.wte.weight", "transformer.wpe.weight"}
    assert {settings[name][1] for name in changed} == {0} and {decay for _, decay in plain.values()} == {
        0,
        0.5,
    }


@pytest.mark.parametrize("options", ["", "method.start=previous"])
def test_each_domain_has_modules_of_its_own(options, build):
    run = build("lora", SAVED, "method.per_domain=true", *options.split(), "optim.lr=0.05", on="causal")
    base = clone_base_weights(run.module)
    starts = []
    before_domain = run.module.before_domain

    def record_start(importance_batches):
        before_domain(importance_batches)
        starts.append(clone_base_weights(run.module))

    run.module.before_domain = record_start
    run.learn(0)
    end = clone_base_weights(run.module)
    run.learn(1)
    trained = {name for name in base if not torch.equal(base[name], end[name])}
    assert trained == {"transformer.wte.weight", "transformer.wpe.weight"}
    assert equal_tensors(starts[1], end if options else base)
    stored = run.module.domain_params.weights(0)
    assert torch.equal(stored["transformer.wte.weight"], end["transformer.wte.weight"])


def test_merged_domains_have_the_mean_of_the_modules(build):
    run = build("merge_lora", SAVED, "method.start=base", "optim.lr=0.05", on="causal")
    name = "transformer.wte.weight"
    ends = []
    after_domain = run.module.after_domain

    def record_end(importance_batches):
        ends.append(run.weights()[name])
        after_domain(importance_batches)

    run.module.after_domain = record_end
    run.learn(0)
    run.learn(1)
    torch.testing.assert_close(run.weights()[name], (ends[0] + ends[1]) / 2)
    assert not torch.equal(*ends)


def test_the_norm_of_olora_is_that_of_the_adapters_only(build):
    run = build("olora", SAVED, "method.norm=0.1", on="causal")
    plain = build("olora", "method.norm=0.1", on="causal")
    [batch] = run.batches()
    terms = [fixture.module.eval().losses(batch) for fixture in (run, plain)]
    assert torch.equal(terms[0]["norm"], terms[1]["norm"])


@pytest.mark.parametrize("method", [
    ["method=lora", "method.per_domain=true", "method.init_lora_weights=pissa", "mask=migu"],
    ["method=merge_lora", "method.use_dora=true"],
])  # fmt: skip
def test_killed_and_started_again_it_ends_with_the_same_bits(method, small_gpt2, start, killing, tmp_path):
    options = [
        *method,
        SAVED,
        ORDER,
        "trainer.steps=4",
        "optim.state_across_domains=moments",
        "optim.lr_multipliers={embeddings: 0.1}",
        "optim.no_decay=[embeddings]",
    ]
    start(small_gpt2(*options), tmp_path / "whole")
    killing(Killer(step=3, domain="food"))
    with pytest.raises(KilledError):
        start(small_gpt2(*options), tmp_path / "killed")
    killing(None)
    start(small_gpt2(*options), tmp_path / "killed")
    resumed = load_model_weights(tmp_path / "killed")
    assert equal_tensors(load_model_weights(tmp_path / "whole"), resumed)
