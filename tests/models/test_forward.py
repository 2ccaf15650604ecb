"""Which tokens a map of an encoder or a decoder works on, against what goes through it."""

import pytest
import torch

from cpt.adapters.bottleneck import attach_bottlenecks, attach_plugins
from cpt.adapters.lora import attach_lora
from cpt.models.forward import SOURCE_TOKENS, TARGET_TOKENS, tokens_of
from cpt.models.units import projections
from tests.models.test_units import build

S, L = 9, 4
PAIRS = {"r": 2, "alpha": 4, "dropout": 0.1, "targets": "all-linear", "embeddings": False}


def lengths_of(model) -> dict[str, int]:
    """How many tokens go through each map of a model, by name."""
    found, handles = {}, []
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear):
            note = lambda module, args, output, name=name: found.update({name: output.shape[1]})  # noqa: E731
            handles.append(module.register_forward_hook(note))
    model(input_ids=torch.randint(3, 60, (2, S)), decoder_input_ids=torch.randint(3, 60, (2, L)))
    for handle in handles:
        handle.remove()
    return found


@pytest.mark.parametrize("attached", ["nothing", "pairs", "bottlenecks", "pfeiffer", "plugins"])
@pytest.mark.parametrize("name", ["t5", "t5-gated", "bart"])
def test_a_map_works_on_the_tokens_that_go_through_it(name, attached):
    model = build(name).float()
    {
        "nothing": lambda: None,
        "pairs": lambda: attach_lora(model, **PAIRS),
        "bottlenecks": lambda: attach_bottlenecks(model, placement="houlsby", reduction=4, activation="relu"),
        "pfeiffer": lambda: attach_bottlenecks(model, placement="pfeiffer", reduction=4, activation="relu"),
        "plugins": lambda: attach_plugins(model, attention=0.5, ffn=0.5, output_relu=False),
    }[attached]()
    found = lengths_of(model)
    told = {each: tokens_of(model, each) for each in found}
    head = next(each for each, module in model.named_modules() if module is model.get_output_embeddings())
    assert told.pop(head) is None and found.pop(head) == L
    assert told == {each: SOURCE_TOKENS if length == S else TARGET_TOKENS for each, length in found.items()}
    assert len({*told.values()}) == 2 and len(told) >= 20


@pytest.mark.parametrize("name", ["roberta", "gpt2", "opt", "gpt_neox"])
def test_without_a_decoder_all_but_the_head_work_on_the_source(name):
    model = build(name)
    assert {tokens_of(model, each.name) for each in projections(model)} == {SOURCE_TOKENS}
    head = next(each for each, module in model.named_modules() if module is model.get_output_embeddings())
    assert tokens_of(model, head) is None
