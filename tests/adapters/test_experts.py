"""Feed-forward networks that are mixtures against sums over experts written out, tiny, in float64."""

from copy import deepcopy

import pytest
import torch

from cpt.adapters.experts import attach_mixtures, find_mixtures
from cpt.models.units import find_blocks
from tests.models.test_units import build, inputs_of

FFN = {  # how a block computes its FFN of x
    "roberta": lambda block, x: block.output.dense(block.intermediate(x)),
    **dict.fromkeys(("modernbert", "gpt2", "llama", "phi3"), lambda block, x: block.mlp(x)),
    "opt": lambda block, x: block.fc2(block.activation_fn(block.fc1(x))),
    **dict.fromkeys(("t5", "t5-gated"), lambda block, x: block.layer[-1].DenseReluDense(x)),
}


@torch.no_grad()
def build_mixture_model(name: str, *, top_k: int = 2, groups=(2, 1)):
    """A model whose FFNs are mixtures of drawn experts beside its own, and plain copies of its blocks."""
    model = build(name)
    plain = deepcopy(dict(find_blocks(model)))
    attach_mixtures(model, blocks=list(plain), top_k=top_k)
    torch.manual_seed(3)
    for mixture in find_mixtures(model).values():
        for count in groups:
            mixture.grow(count)
        for parameter in mixture.groups.parameters():
            parameter.normal_(std=0.2)
    return model.eval(), plain


@pytest.mark.parametrize(("name", "top_k"), [*((name, 2) for name in FFN), ("gpt2", 1), ("t5", 9)])
@torch.no_grad()
def test_each_token_is_the_sum_of_its_experts_by_their_gates(name, top_k):
    model, plain = build_mixture_model(name, top_k=top_k)
    recorded = {}
    for path, mixture in find_mixtures(model).items():
        record = recorded.setdefault(path, {})
        first = mixture.ffn_layers[0].module
        last = mixture.ffn_layers[-1].module
        first.register_forward_pre_hook(lambda m, args, record=record: record.update(x=args[0]), prepend=True)
        last.register_forward_hook(lambda m, args, output, record=record: record.update(y=output))
    model(**inputs_of(model))

    for path, mixture in find_mixtures(model).items():
        x = recorded[path]["x"].flatten(0, -2)
        y = recorded[path]["y"].flatten(0, -2)
        routers = torch.cat([torch.zeros_like(x[:1]), *(group.router for group in mixture.groups)])
        scores = x @ routers.T

        # The block's own FFN is the first expert; the others are copies of it with their maps.
        block = path.removesuffix(".mixture")
        copies = [deepcopy(plain[block]) for _ in routers]
        for copy, expert in zip(copies[1:], mixture.experts, strict=True):
            for layer, expert_map in zip(mixture.ffn_layers, expert.maps, strict=True):
                layer_of_copy = copy.get_submodule(layer.name.removeprefix(f"{block}."))
                layer_of_copy.load_state_dict(expert_map.state_dict())
        expert_outputs = torch.stack([FFN[name](copy, x) for copy in copies], dim=1)

        chosen = scores.sort(dim=1, descending=True).indices[:, :top_k]
        for token, experts in enumerate(chosen):
            gates = scores[token, experts].softmax(0)
            expected = sum(
                gate * expert_outputs[token, expert] for gate, expert in zip(gates, experts, strict=True)
            )
            torch.testing.assert_close(y[token], expected, rtol=1e-6, atol=1e-6)
        choices = {tuple(sorted(experts.tolist())) for experts in chosen}
        assert len(choices) > (1 if top_k < 4 else 0)


@pytest.mark.parametrize("name", FFN)
@torch.no_grad()
def test_one_expert_is_the_model_bit_for_bit(name):
    model = build(name)
    mixture_model, _ = build_mixture_model(name, groups=())
    inputs = inputs_of(model)
    assert torch.equal(mixture_model(**inputs).logits, model(**inputs).logits)


def test_new_experts_are_copies_of_those_of_a_group():
    model, _ = build_mixture_model("gpt2")
    (mixture, *_) = find_mixtures(model).values()
    mixture.grow(2)
    for source, experts in ((0, [1, 2]), (1, [3, 3]), (-1, [0, 0])):
        mixture.copy_group(source)
        for new, old in zip(mixture.groups[-1].experts, experts, strict=True):
            maps = mixture.experts[old - 1].maps if old else [layer.module for layer in mixture.ffn_layers]
            for new_map, old_map in zip(new.maps, maps, strict=True):
                assert torch.equal(new_map.weight, old_map.weight) and torch.equal(new_map.bias, old_map.bias)
    assert not torch.equal(mixture.groups[-1].router[0], mixture.groups[-1].router[1])
    assert [list(mixture.members(group)) for group in (-1, 0, 1, 2)] == [[0], [1, 2], [3], [4, 5]]


@torch.no_grad()
def test_what_is_noted_of_a_pass_is_of_text_alone():
    model, _ = build_mixture_model("t5")
    inputs = inputs_of(model)
    mask = torch.ones_like(inputs["input_ids"])
    mask[1, 4:] = 0
    inputs["decoder_input_ids"][2, 3:] = model.config.pad_token_id
    model(**inputs, attention_mask=mask)
    text = {"encoder": int(mask.sum()), "decoder": int((inputs["decoder_input_ids"] != 0).sum())}
    assert text["encoder"] != text["decoder"]
    for name, mixture in find_mixtures(model).items():
        passed = mixture.record
        tokens = text[name.partition(".")[0]]
        assert passed.probabilities.shape == (tokens, 4)
        assert int(passed.first_choices.sum()) == tokens and float(passed.gate_sums.sum()) == pytest.approx(
            tokens
        )
        assert torch.equal(passed.probabilities.argmax(1), passed.chosen[:, 0])
