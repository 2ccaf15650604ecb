"""What is logged of a model before it is trained."""

import pytest
from transformers import AutoConfig, AutoModelForCausalLM

from cpt.adapters.lora import attach_lora
from cpt.trainer.build import log_experts

SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 48}
MIXTRAL = SIZES | {"vocab_size": 300, "num_key_value_heads": 2, "num_local_experts": 4}


def build(**options):
    return AutoModelForCausalLM.from_config(AutoConfig.for_model("mixtral", **MIXTRAL, **options))


@pytest.mark.parametrize(
    ("asks", "coefficient", "is_logged"), [(True, 0.02, True), (True, 0.0, False), (False, 0.02, False)]
)
def test_a_load_balancing_loss_that_is_left_out_is_logged(asks, coefficient, is_logged, caplog):
    log_experts(build(output_router_logits=asks, router_aux_loss_coef=coefficient))
    message = "Training without the load-balancing loss of the router (router_aux_loss_coef=0.02)"
    assert (message in caplog.text) == is_logged == bool(caplog.records)


def test_experts_that_adapters_do_not_reach_are_logged(caplog):
    model = build()
    attach_lora(model, r=4, alpha=8, dropout=0.0, targets="all-linear", embeddings=False)
    log_experts(model)
    (record,) = caplog.records
    assert record.message.startswith("The adapters reach 18.0 %")
    assert "not the experts (model.layers.0.mlp.experts.gate_up_proj, " in record.message
