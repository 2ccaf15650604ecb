"""What a method keeps beside the model is counted once, whatever it is called."""

import torch
from torch import nn
from transformers import RobertaConfig, RobertaForMaskedLM

from cpt.costs import own_names, stored_bytes, trained_parameters

SIZES = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}


def made():
    return RobertaForMaskedLM(RobertaConfig(vocab_size=50, max_position_embeddings=20, **SIZES))


class Method(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model


def test_the_models_own_weights_are_not_counted():
    method = Method(made())
    assert stored_bytes(method.state_dict(), own_names(method.model)) == 0
    assert stored_bytes(method.half().state_dict(), own_names(method.model)) == 0


def test_what_is_attached_and_what_is_kept_counts_once():
    method = Method(made())
    own = own_names(method.model)
    method.model.roberta.add_module("adapter", nn.Linear(16, 4))
    method.register_buffer("copy", torch.zeros(10))
    method.register_buffer("again", method.copy)
    method.register_buffer("passing", torch.zeros(99), persistent=False)
    assert own_names(method.model) == own
    assert stored_bytes(method.state_dict(), own) == 4 * (16 * 4 + 4 + 10)


def test_a_weight_that_peft_has_moved_is_the_models():
    import peft

    method = Method(made())
    own = own_names(method.model)
    adapted = peft.LoraConfig(r=2, target_modules=["query"])
    peft.inject_adapter_in_model(adapted, method.model)
    assert stored_bytes(method.state_dict(), own) == 4 * (2 * 16 + 16 * 2)
    assert trained_parameters(method) == 2 * 16 + 16 * 2


def test_a_skeleton_takes_no_memory_and_no_randomness():
    model = made()
    state = torch.get_rng_state()
    assert "roberta.embeddings.word_embeddings.weight" in own_names(model)
    assert torch.equal(state, torch.get_rng_state())
