"""What is logged of a mixture of experts, and its loss in a step of training."""

import pytest
import torch

from cpt.adapters.lora import attach_lora
from cpt.data.collate import select_inputs
from cpt.models.units import find_projections, find_units
from cpt.trainer.log_experts import log_adapter_reach, log_experts, log_kernel_layers
from tests.support.decoders import build_decoder
from tests.support.method_fixtures import build_method_fixture
from tests.support.mixtures import MIXTURES, build_mixture

ORDER = "order=[law,food]"
SIZES = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "head_dim": 16,
}
MIXTURE = [
    "model.config.model_type=qwen3_moe",
    *(f"+model.config.{key}={value}" for key, value in SIZES.items()),
]


@pytest.fixture
def build(small_gpt2):
    return lambda method, *options: build_method_fixture(
        small_gpt2(ORDER, *MIXTURE, f"method={method}", *options)
    )


def record_terms(run, monkeypatch):
    """The terms of each micro-batch of the first domain, and the balance loss of transformers."""
    recorded = []
    losses = run.module.losses

    def observe(batch):
        terms = losses(batch)
        with torch.no_grad():
            expected = run.module.model(**select_inputs(batch), output_router_logits=True).aux_loss
        recorded.append((expected.item(), len(batch["input_ids"]) / float(batch["mean_rows"])))
        return terms

    logged = []
    monkeypatch.setattr(run.module, "losses", observe)
    add = run.module.guard.add_losses
    monkeypatch.setattr(
        run.module.guard, "add_losses", lambda terms: [logged.append(dict(terms)), add(terms)][1]
    )
    run.learn(0)
    return recorded, logged


@pytest.mark.parametrize(("method", "accumulate"), [("ncl", 1), ("ncl", 2), ("kd", 1), ("lora", 1)])
def test_the_loss_of_the_router_is_a_term_of_every_method(method, accumulate, build, monkeypatch):
    run = build(method, "model.router_aux_loss=0.5", f"trainer.accumulate_grad_batches={accumulate}")
    recorded, logged = record_terms(run, monkeypatch)
    assert len(logged) == 6 * accumulate
    for (expected, share), terms in zip(recorded, logged, strict=True):
        assert share == 1
        assert terms["router_balance"].item() == pytest.approx(0.5 * expected, rel=1e-4)


def test_a_weight_of_zero_is_a_run_without_it(build, monkeypatch, caplog):
    caplog.set_level("INFO")
    weights = {}
    for setting in ("0", "auto"):
        run = build("ncl", f"model.router_aux_loss={setting}")
        log_experts(run.plan, run.module)
        monkeypatch.setattr(run.module, "router_loss", run.module.router_loss if setting == "auto" else None)
        _, logged = record_terms(run, monkeypatch)
        assert ("router_balance" in logged[0]) == (setting == "auto")
        weights[setting] = run.weights()
    assert "Training without losses of the router (model.router_aux_loss=0)" in caplog.text
    assert "(model.router_aux_loss=auto): its load-balancing loss times 0.001" in caplog.text
    assert any(not torch.equal(weights["0"][name], weights["auto"][name]) for name in weights["0"])


def test_a_loss_that_transformers_does_not_have_is_logged(build, monkeypatch, caplog):
    run = build("ncl")
    monkeypatch.setattr(run.module, "router_loss", None)
    log_experts(run.plan, run.module)
    assert (
        "Training without the load-balancing loss of the router, which the config of this qwen3_moe"
        in caplog.text
    )


def test_experts_that_adapters_do_not_reach_are_logged(caplog):
    model = build_mixture("mixtral")
    attach_lora(model, r=4, alpha=8, dropout=0.0, targets="all-linear", embeddings=False)
    log_adapter_reach(model)
    (record,) = caplog.records
    assert record.message.startswith("The adapters reach 14.1 %")
    assert "not the experts (model.layers.0.mlp.experts.gate_up_proj, " in record.message


@pytest.mark.parametrize(
    ("method", "options", "end"),
    [
        ("ncl", ["mask=migu"], "which are trained without a mask"),
        ("das", ["method.general_importance=null", "method.contrast=0"], "which are trained without a mask"),
        ("hat", ["method.form=full"], "which are frozen after the first domain"),
    ],
)
def test_masks_cover_the_attention_and_name_the_rest(method, options, end, build, caplog):
    run = build(method, *options)
    log_experts(run.plan, run.module)
    (record,) = [record for record in caplog.records if "Masks" in record.message]
    assert record.message.startswith(
        "Masks reach 39.5 % of the trained weights of the blocks: not the mixtures"
    )
    assert record.message.endswith(end)
    run.learn(0)


def test_layers_of_mamba_without_adapters_are_logged(caplog):
    caplog.set_level("INFO")
    model = build_decoder("falcon_h1")
    log_kernel_layers(model)
    assert not caplog.records
    attach_lora(model, r=4, alpha=8, dropout=0.0, targets="all-linear", embeddings=False)
    log_kernel_layers(model)
    assert [record.message for record in caplog.records] == [
        "No adapters in layers whose weights are read by kernels of Mamba "
        "(model.layers.0.mamba.out_proj, model.layers.1.mamba.out_proj)"
    ]


HYBRID = [
    "model.config.model_type=lfm2",
    "+model.config.layer_types=[conv,full_attention]",
    *(
        f"+model.config.{key}={SIZES[key]}"
        for key in ("hidden_size", "num_hidden_layers", "num_attention_heads")
    ),
    "+model.config.num_key_value_heads=2",
    "+model.config.intermediate_size=48",
]


def test_convolutions_that_a_mask_does_not_cover_are_logged(small_gpt2, caplog):
    options = ["method=das", "method.general_importance=null", "method.contrast=0"]
    run = build_method_fixture(small_gpt2(ORDER, *HYBRID, *options))
    log_experts(run.plan, run.module)
    (record,) = [record for record in caplog.records if "Masks" in record.message]
    assert "not the mixers with a convolution (model.layers.0.conv.conv.weight, " in record.message
    assert record.message.endswith("which are trained without a mask")


@pytest.mark.parametrize("model_type", [name for name in MIXTURES if name != "olmoe"])
def test_units_of_a_mixture_are_its_heads(model_type):
    model = build_mixture(model_type)
    assert {group.kind for group in find_units(model, ("heads", "neurons"), skips_mixtures=True)} == {"heads"}
    names = [projection.name for projection in find_projections(model, skips_mixtures=True)]
    assert len(names) == 8 and all(".self_attn." in name for name in names)
    with pytest.raises(ValueError, match="^method.units=.* is a mixture of experts"):
        find_units(model, ("neurons",), skips_mixtures=True)
    with pytest.raises(ValueError, match="^model.layers.0 has a mixture of experts in place of"):
        find_projections(model)
