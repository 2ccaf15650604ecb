"""What a base has for chats and generation is in every model that cpt writes: template, tokens, ends, length."""

import json

import pytest
from transformers import AutoTokenizer, GenerationConfig

from cpt import graft, withdraw
from tests.support.campaign import run_few
from tests.support.chat_decoder import write_checkpoint, write_tuned

# How a model comes to be written: options of the run, then the program that makes another model of it.
EXPORTS = {
    "full": ["method=ncl"],
    "merged": ["method=lora"],
    "peft": ["method=lora", "method.export_format=peft"],
    "dora": ["method=peft"],
    "graft": ["method=ncl"],
    "subtracted": ["method=inclora", "save_all_stages=true"],
    "left_out": ["method=lora", "method.per_domain=true"],
}
LENGTH = 123  # tokens, as the base's tokenizer has it


@pytest.fixture(scope="module")
def decoder(tmp_path_factory):
    """A chat decoder with two ends of generation, the first of which is not that of its tokenizer."""
    folder = tmp_path_factory.mktemp("base") / "decoder"
    write_checkpoint(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ends = [tokenizer.convert_tokens_to_ids("<|end|>"), tokenizer.eos_token_id]
    generation = {"eos_token_id": ends, "pad_token_id": ends[1], "do_sample": True, "temperature": 0.6}
    (folder / "generation_config.json").write_text(json.dumps(generation))
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"model_max_length": LENGTH}))
    return folder


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")  # of peft
@pytest.mark.parametrize("name", run_few([*EXPORTS], ["peft", "graft"]))
def test_template_special_tokens_ends_and_length_are_those_of_the_base(
    name, small_gpt2, decoder, start, tmp_path, capsys
):
    run = tmp_path / "run"
    options = [f"model.name_or_path={decoder}", "trainer.steps=2", "chats=none", *EXPORTS[name]]
    start(small_gpt2("order=[law,food]", *options), run)
    folder = run / "model"
    if name == "graft":
        tuned = write_tuned(decoder, tmp_path / "tuned")
        assert graft.main([str(run), "--instruct", str(tuned), "--base", str(decoder)]) == 0
        folder = run / "graft"
    if name in ("subtracted", "left_out"):
        folder = tmp_path / "without"
        assert withdraw.main([str(run), "law", "--form", name, "--output", str(folder)]) == 0
    if name == "left_out":
        folder = folder / "model"

    tokenizer = AutoTokenizer.from_pretrained(folder)
    base_tokenizer = AutoTokenizer.from_pretrained(decoder)
    assert tokenizer.chat_template == base_tokenizer.chat_template is not None
    assert tokenizer.special_tokens_map == base_tokenizer.special_tokens_map
    assert "<|end|>" in tokenizer.all_special_tokens and tokenizer.model_max_length == LENGTH
    assert tokenizer.get_vocab() == base_tokenizer.get_vocab()
    generation = GenerationConfig.from_pretrained(folder)
    expected = GenerationConfig.from_pretrained(decoder)
    assert generation.eos_token_id == expected.eos_token_id and len(generation.eos_token_id) == 2
    assert generation.temperature == 0.6 and generation.pad_token_id == expected.pad_token_id
