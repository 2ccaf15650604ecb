"""What is read, and what stands for the model that is meant."""

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from transformers import AutoConfig

from cpt.contrib.advise.candidates import (
    check_overrides,
    choose_domains,
    find_model,
    find_texts,
    make_sibling,
    quote,
)


def test_folders_of_text_are_domains_or_those_of_their_corpora(tmp_path):
    assert find_texts(tmp_path, []) == ["domains=texts", f"domains.root={tmp_path}"]
    assert find_texts(tmp_path, ["domains=m2d2"]) == [f"domains.root={tmp_path}"]
    (tmp_path / "corpora").mkdir()
    assert find_texts(tmp_path, [])[2:] == ["domains.folder=corpora"]
    with pytest.raises(ValueError, match="no folder .*nowhere; allowed: a folder of folders of text"):
        find_texts(tmp_path / "nowhere", [])


@pytest.mark.parametrize("value", ["plain/a-b_c.d", "with space", "a,b", "it's", "key=value", "[x]", "{y}"])
def test_any_name_reaches_hydra_as_it_is(value):
    (parsed,) = OverridesParser.create().parse_overrides([f"domains.root={quote(value)}"])
    assert parsed.value() == value or str(parsed.value()) == value


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("trainer.steps=9", "trainer.steps=9: advise sets trainer.steps itself"),
        ("hydra.launcher.jobs=2", "advise sets hydra.launcher.jobs itself"),
        ("+method=kd", "advise sets method itself"),
        ("more", "more is no override; allowed: key=value"),
    ],
)
def test_what_advise_sets_is_not_set_twice(given, said):
    with pytest.raises(ValueError, match=said):
        check_overrides(["trainer.batch_size=4", given])


def test_of_many_domains_some_are_tried():
    names = [f"d{number}" for number in range(14)]
    assert choose_domains(names) == ["d0", "d2", "d4", "d7", "d9", "d11"]
    assert choose_domains(names[:6]) == names[:6] and choose_domains(["d1"]) == ["d1"]


def test_tiny_models_are_tried_themselves():
    assert find_model("tiny").tried == ("model=tiny_modernbert",)
    assert find_model("tiny_gpt2").is_itself
    with pytest.raises(ValueError, match=r"--model nowhere/none: [^\n]*; allowed: tiny, tiny_gpt2, "):
        find_model("nowhere/none")


def saved(folder, kind, **sizes):
    config = AutoConfig.for_model(kind, **sizes)
    config.architectures = [{"gpt2": "GPT2LMHeadModel", "llama": "LlamaForCausalLM"}[kind]]
    config.save_pretrained(folder)
    return str(folder)


def test_a_small_checkpoint_is_tried_itself_and_a_large_one_by_a_sibling(tmp_path):
    small = find_model(saved(tmp_path / "small", "gpt2", n_embd=64, n_layer=2, n_head=2))
    assert small.is_itself and small.real == ("model=checkpoint", f"model.checkpoint={tmp_path}/small")
    large = find_model(saved(tmp_path / "large", "gpt2", n_embd=768, n_layer=7))
    assert large.tried == ("model=tiny_gpt2",) and large.real[1].endswith("/large")
    assert large.blocks == 7 and "89 M parameters" in large.gap


def test_a_sibling_is_of_the_same_family():
    llama = AutoConfig.for_model("llama", num_key_value_heads=8)
    model, without, config = make_sibling(llama, "causal")
    assert (model, without) == ("model=tiny_gpt2", "~model.config")
    (parsed,) = OverridesParser.create().parse_overrides([config])
    made = parsed.value()
    assert (made["model_type"], made["hidden_size"], made["num_key_value_heads"]) == ("llama", 128, 2)
    assert make_sibling(AutoConfig.for_model("t5"), "span") == ["model=tiny_t5"]
    opt = make_sibling(AutoConfig.for_model("bert"), "masked")
    assert opt[0] == "model=tiny_roberta" and "num_key_value_heads" not in opt[2]
