"""Tuners of peft in models of each kind: what is trained, that it learns, that it can be taken out again."""

import pytest
import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    ModernBertConfig,
    ModernBertForMaskedLM,
    T5Config,
    T5ForConditionalGeneration,
)

from cpt.adapters.lora import attach_tuner, without_tuners
from cpt.methods.peft import TUNERS

ARGUMENTS = {"miss": {"r": 8}, "fourierft": {"n_frequency": 20}}
IDS = torch.arange(1, 19).view(2, 9)


def bert():
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4}
    return ModernBertForMaskedLM(ModernBertConfig(vocab_size=60, pad_token_id=0, **sizes))


def gpt2():
    return GPT2LMHeadModel(GPT2Config(vocab_size=60, n_embd=32, n_layer=1, n_head=4, n_positions=32))


def t5():
    return T5ForConditionalGeneration(
        T5Config(vocab_size=60, d_model=32, d_kv=8, d_ff=64, num_layers=1, num_heads=4)
    )


def logits(model):
    more = {"decoder_input_ids": IDS} if model.config.is_encoder_decoder else {}
    return model(input_ids=IDS, **more).logits


def learn(model):
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    for _ in range(3):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(logits(model).flatten(0, 1), IDS.flatten()).backward()
        optimizer.step()


CONV1D = ("dora", "gralora", "hira", "ia3", "ln_tuning", "fourierft", "randlora", "vera")
CASES = [(bert, name) for name in TUNERS] + [(gpt2, name) for name in CONV1D] + [(t5, "ia3"), (t5, "vera")]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("make", "tuner"), CASES, ids=[f"{make.__name__}-{name}" for make, name in CASES])
def test_a_tuner_learns_and_is_merged(make, tuner):
    torch.manual_seed(0)
    model = make().eval()
    before = {name: each.clone() for name, each in model.state_dict().items()}
    first, names = logits(model), set(before)
    scope = attach_tuner(model, tuner, targets="auto", arguments=ARGUMENTS.get(tuner, {}))
    assert {name for name, each in model.named_parameters() if each.requires_grad} == set(scope.names)
    assert sum(model.get_parameter(name).numel() for name in scope.names) > 0
    torch.testing.assert_close(logits(model), first, rtol=1e-4, atol=1e-5)  # begins as the base
    learn(model)
    last = logits(model)
    assert (last - first).abs().max() > 1e-3
    plain = without_tuners(model)
    assert set(plain.state_dict()) == names and type(plain) is type(model)
    assert not any(isinstance(each, BaseTunerLayer) for each in plain.modules())
    torch.testing.assert_close(logits(plain.eval()), last, rtol=1e-3, atol=1e-4)
