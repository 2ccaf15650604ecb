"""Block expansion: new blocks between frozen ones, which leave the base the function that it is."""

import json
import runpy

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    BertConfig,
    BertForMaskedLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
)

from cpt.methods.block_expansion import check_base_stays
from cpt.methods.options import BlockExpansionOptions
from cpt.models import growth
from cpt.models.loading import make_skeleton
from cpt.models.objectives import Causal
from cpt.models.units import find_blocks
from tests.conftest import ROOT
from tests.support.chat_decoder import write_checkpoint
from tests.support.decoders import build_decoder, logits_of


@pytest.mark.parametrize("on", ["masked", "causal", "both"])
def test_the_base_is_kept_bit_for_bit_and_new_blocks_alone_are_trained(on, build):
    plain = build("ncl", on=on)
    run = build("block_expansion", "trainer.steps=2", on=on)
    [batch] = run.batches()
    with torch.no_grad():
        expected = plain.module.objective.nll(plain.module.model.eval(), batch)
        assert torch.equal(run.module.objective.nll(run.module.model.eval(), batch), expected)

    weights = run.weights()
    num_new = len(find_blocks(run.module.model)) - len(find_blocks(plain.module.model))
    assert num_new == (2 if on == "both" else 1)
    run.learn(0)
    trained = set(run.module.scope.names)
    for name, weight in run.weights().items():
        assert torch.equal(weight, weights[name]) or name in trained, name
    changed_names = [name for name in trained if not torch.equal(run.weights()[name], weights[name])]
    assert len(changed_names) > len(trained) / 2


def test_copies_are_spread_and_follow_their_originals():
    config = LlamaConfig(
        vocab_size=60, hidden_size=32, num_hidden_layers=4, num_attention_heads=2, intermediate_size=48
    )
    model = LlamaForCausalLM(config).eval()
    ids = torch.arange(3, 15)[None]
    with torch.no_grad():
        expected = model(input_ids=ids).logits
        names = growth.insert_layers(model, 0.5)
        assert names == ["model.layers.2", "model.layers.5"]
        assert torch.equal(model(input_ids=ids).logits, expected)
    layers = model.model.layers
    assert [layer.self_attn.layer_idx for layer in layers] == list(range(6))
    assert torch.equal(layers[2].mlp.up_proj.weight, layers[1].mlp.up_proj.weight)
    assert not layers[2].mlp.down_proj.weight.any() and not layers[5].self_attn.o_proj.weight.any()
    assert layers[3].mlp.down_proj.weight.any()


def test_blocks_of_other_kinds_are_refused():
    """Of SmolLM 3 every n-th block has no positions, which a list in its configuration says."""
    model = build_decoder("smollm3")
    expected = logits_of(model)
    growth.insert_layers(model, 0.5)
    torch.testing.assert_close(logits_of(model), expected, rtol=0, atol=0)
    skeleton = make_skeleton(model)
    model.model.layers[1].self_attn.head_dim = 7
    with pytest.raises(ValueError, match="layers of a smollm3 can not be inserted: .* head_dim=8 in"):
        growth.check_block_kinds(model, skeleton)


def test_a_list_of_kinds_gets_an_entry_for_each_copy():
    config = Gemma2Config(
        vocab_size=60,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        intermediate_size=48,
        layer_types=["full_attention", "sliding_attention"],
    )
    model = Gemma2ForCausalLM(config).eval()
    expected = logits_of(model)
    growth.insert_layers(model, 1.0)
    assert model.config.layer_types == ["full_attention"] * 2 + ["sliding_attention"] * 2
    assert torch.equal(logits_of(model), expected)


def test_the_exported_model_is_a_plain_one_of_more_blocks(small_gpt2, start, tmp_path):
    start(small_gpt2("method=block_expansion", "trainer.steps=1", "order=[law]"), tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert model.config.n_layer == len(model.transformer.h) == 3
    scores = json.loads((tmp_path / "scores.json").read_text())
    assert not scores.get("moved")  # the names of blocks are others


def test_a_model_with_norms_after_the_sum_is_refused():
    config = BertConfig(
        vocab_size=60, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=48
    )
    skeleton = make_skeleton(BertForMaskedLM(config))
    with pytest.raises(ValueError, match="method=block_expansion is invalid for a bert: a block that adds"):
        check_base_stays(skeleton, Causal(), BlockExpansionOptions(share=0.5))


def test_chosen_blocks_are_copied_and_the_base_stays(build):
    """ADEPT: not evenly spread copies, but those of given blocks."""
    plain = build("ncl", on="causal")
    run = build("block_expansion", "method.blocks=[0]", on="causal")
    blocks = dict(find_blocks(run.module.model))
    assert len(blocks) == 3 and {name.split(".h.")[1][0] for name in run.module.scope.names} == {"1"}
    first, copy, _ = blocks.values()
    assert torch.equal(copy.mlp.c_fc.weight, first.mlp.c_fc.weight) and not copy.mlp.c_proj.weight.any()
    [batch] = run.batches()
    with torch.no_grad():
        expected = plain.module.objective.nll(plain.module.model.eval(), batch)
        assert torch.equal(run.module.objective.nll(run.module.model.eval(), batch), expected)


def test_a_block_that_is_not_there_is_refused(build):
    with pytest.raises(
        ValueError, match=r"method.blocks=\[1,2\] is invalid: there is no block 2. Allowed: 0 to 1"
    ):
        build("block_expansion", "method.blocks=[1,2]", on="causal")


def test_the_example_finds_the_block_without_which_the_loss_rises_least(tmp_path, monkeypatch, capsys):
    write_checkpoint(tmp_path / "model")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    model.model.layers[1].self_attn.o_proj.weight.data.zero_()
    model.model.layers[1].mlp.down_proj.weight.data.zero_()
    model.save_pretrained(tmp_path / "model")
    text = tmp_path / "general.txt"
    text.write_text("the house stands near a river\nand people walk along its quiet old streets\n")
    script = ROOT / "docs" / "examples" / "block_importance.py"
    monkeypatch.setattr("sys.argv", [str(script), str(tmp_path / "model"), "64", str(text), "1"])
    runpy.run_path(str(script), run_name="__main__")
    assert capsys.readouterr().out.splitlines()[-2:] == ["block 1: +0.0000", "method.blocks=[1]"]
