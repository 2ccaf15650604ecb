"""The tokenizer of an exported model: the files of the base, or the same ids where something was added."""

import json

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import AutoTokenizer, ByT5Tokenizer, PreTrainedTokenizerFast

from cpt.models.loading import load_tokenizer, train_tokenizer
from cpt.trainer import base_files
from cpt.trainer.base_files import (
    copy_generation_config,
    describe_difference,
    load_of_model_type,
    save_tokenizer,
)
from tests.support.data_fixtures import tokenizer_with_template

TEMPLATE = "{% for m in messages %}{{ m['content'] }}{% endfor %}"


def make_base(folder, *, model_type: str) -> None:
    """A checkpoint without weights, whose tokenizer.json has a normalizer that its class would not build."""
    letters = [chr(code) for code in (*range(33, 127), *range(192, 256))]
    tokens = ["[UNK]", "[PAD]", "[MASK]", "[CLS]", "[SEP]", *letters]
    ids = {token: number for number, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.WordPiece(ids, unk_token="[UNK]", continuing_subword_prefix=""))
    tokenizer.normalizer = normalizers.Sequence([normalizers.NFC(), normalizers.Replace("q", "k")])
    tokenizer.pre_tokenizer = pre_tokenizers.Digits(individual_digits=True)
    tokenizer.decoder = decoders.WordPiece()
    fast_tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        unk_token="[UNK]",
        pad_token="[PAD]",
        mask_token="[MASK]",
        cls_token="[CLS]",
        sep_token="[SEP]",
    )
    fast_tokenizer.save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps({"model_type": model_type}))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tools.jinja").write_text(TEMPLATE + "!")
    (folder / "special_tokens_map.json").write_text('{"unk_token":   "[UNK]"}')
    (folder / "generation_config.json").write_text('{"max_new_tokens":   7, "mine": 1}')


def contents(folder) -> dict[str, bytes]:
    paths = [path for path in folder.rglob("*") if path.is_file() and path.name != "config.json"]
    return {str(path.relative_to(folder)): path.read_bytes() for path in paths}


@pytest.fixture
def target(tmp_path):
    (tmp_path / "model").mkdir()
    return tmp_path / "model"


@pytest.mark.parametrize("model_type", ["bert", "llama"])
def test_nothing_added_every_file_is_the_bases_byte_for_byte(model_type, tmp_path, target):
    base = tmp_path / "base"
    base.mkdir()
    make_base(base, model_type=model_type)
    (target / "added_tokens.json").write_text("{}")  # of an earlier export
    (target / "config.json").write_bytes((base / "config.json").read_bytes())
    save_tokenizer(load_tokenizer(base), base=str(base), folder=target)
    copy_generation_config(base=str(base), folder=target)
    assert contents(target) == contents(base)


def test_the_files_of_a_name_on_the_hub_are_those_of_its_cache(tmp_path, target, monkeypatch):
    snapshot = tmp_path / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    make_base(snapshot, model_type="bert")
    (target / "config.json").write_bytes((snapshot / "config.json").read_bytes())
    monkeypatch.setattr(
        base_files, "list_checkpoint_files", lambda name: {"config.json": snapshot / "config.json"}
    )
    save_tokenizer(load_tokenizer(snapshot), base="someone/model", folder=target)
    copy_generation_config(base="someone/model", folder=target)
    assert contents(target) == contents(snapshot)


def test_what_was_added_gives_the_same_ids_for_odd_text(tmp_path, target):
    base = tmp_path / "base"
    base.mkdir()
    make_base(base, model_type="bert")
    (target / "config.json").write_bytes((base / "config.json").read_bytes())
    tokenizer = load_tokenizer(base)
    tokenizer.add_tokens([AddedToken("quark", normalized=False), "antiquark"])
    save_tokenizer(tokenizer, base=str(base), folder=target)
    loaded = AutoTokenizer.from_pretrained(target)
    texts = [*base_files.ODD_TEXTS, "a quark, antiquarks e\u0301", "QUARK  quark"]
    assert all(loaded(text)["input_ids"] == tokenizer(text)["input_ids"] for text in texts)
    config = json.loads((target / "tokenizer_config.json").read_text())
    assert not {"is_local", "local_files_only"} & {*config}
    assert loaded.chat_template == tokenizer.chat_template


def test_another_length_is_all_that_changes_in_the_bases_files(tmp_path, target):
    base = tmp_path / "base"
    base.mkdir()
    make_base(base, model_type="llama")
    path = base / "tokenizer_config.json"
    settings = json.loads(path.read_text()) | {"model_max_length": 64, "mine": "ö"}
    path.write_text(json.dumps(settings))
    (target / "config.json").write_bytes((base / "config.json").read_bytes())
    tokenizer = load_tokenizer(base)
    tokenizer.model_max_length = 256
    save_tokenizer(tokenizer, base=str(base), folder=target)
    copy_generation_config(base=str(base), folder=target)

    base_contents = contents(base)
    target_contents = contents(target)
    exported_settings = json.loads(target_contents.pop("tokenizer_config.json"))
    assert exported_settings == settings | {"model_max_length": 256}
    del base_contents["tokenizer_config.json"]
    assert target_contents == base_contents

    tokenizer.add_tokens(["quark"])
    save_tokenizer(tokenizer, base=str(base), folder=target)
    assert load_tokenizer(target).model_max_length == 256
    tokenizer.model_max_length = 128
    assert describe_difference(tokenizer, target) == "256 tokens at most, not 128"


@pytest.mark.parametrize("has_new_tokens", [False, True])
def test_an_export_does_not_name_the_code_of_its_authors(has_new_tokens, tmp_path, target):
    base = tmp_path / "base"
    base.mkdir()
    make_base(base, model_type="llama")
    path = base / "tokenizer_config.json"
    path.write_text(
        json.dumps(json.loads(path.read_text()) | {"auto_map": {"AutoTokenizer": ["own.Own", None]}})
    )
    (target / "config.json").write_bytes((base / "config.json").read_bytes())
    tokenizer = load_tokenizer(base)
    if has_new_tokens:
        tokenizer.add_tokens(["quark"])
    save_tokenizer(tokenizer, base=str(base), folder=target)
    assert "auto_map" not in json.loads((target / "tokenizer_config.json").read_text())
    assert AutoTokenizer.from_pretrained(target, trust_remote_code=True).get_vocab() == tokenizer.get_vocab()


def test_a_tokenizer_without_a_fast_version_and_one_without_a_base_are_saved(tmp_path, target):
    ByT5Tokenizer(extra_ids=3).save_pretrained(tmp_path / "byt5")
    slow = load_tokenizer(tmp_path / "byt5")
    save_tokenizer(slow, base=str(tmp_path / "byt5"), folder=target)
    assert contents(target) == contents(tmp_path / "byt5")
    save_tokenizer(tokenizer_with_template("$A </s>", eos_token="</s>"), base="", folder=target)
    assert "is_local" not in (target / "tokenizer_config.json").read_text()
    assert load_tokenizer(target)("a")["input_ids"][-1] == load_tokenizer(target).eos_token_id


def test_a_new_model_is_trained_with_the_tokenizer_that_it_is_loaded_with(tmp_path, target):
    words = ["a brown fox, 1234 times: don't!", "Ångström cafe\u0301 ½ Ⅷ"]
    train_tokenizer(iter(words), vocabulary=300, objective="causal").save_pretrained(tmp_path)
    (target / "config.json").write_text('{"model_type": "qwen2"}')
    with pytest.raises(ValueError, match="is not that of training: other ids for"):
        save_tokenizer(load_tokenizer(tmp_path), base="", folder=target)

    tokenizer = load_of_model_type(tmp_path, "qwen2")
    save_tokenizer(tokenizer, base="", folder=target)
    assert load_tokenizer(target)("1 fox½").input_ids == tokenizer("1 fox½").input_ids
    assert tokenizer("fox").input_ids[0] == tokenizer.bos_token_id

    of_gpt2 = load_of_model_type(tmp_path, "gpt2")
    assert of_gpt2("1 fox½").input_ids == load_tokenizer(tmp_path)("1 fox½").input_ids


def test_a_tokenizer_that_cannot_be_loaded_as_it_was_is_an_error(target, monkeypatch):
    tokenizer = tokenizer_with_template("$A", eos_token="</s>")
    save_tokenizer(tokenizer, base="", folder=target)
    other_tokenizer = tokenizer_with_template("</s> $A", eos_token="</s>")
    assert describe_difference(other_tokenizer, target).startswith("other ids for ")
    monkeypatch.setattr(base_files, "load_tokenizer", lambda folder: other_tokenizer)
    with pytest.raises(ValueError, match="^the tokenizer in .* is not that of training: other ids for "):
        save_tokenizer(tokenizer, base="", folder=target)
