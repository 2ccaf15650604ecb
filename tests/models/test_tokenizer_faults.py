"""Files of a tokenizer that its class does not take are told by the file and what is allowed in it."""

import json

import pytest

from cpt.models.loading import load_tokenizer
from cpt.models.tokenizer_faults import tokenizer_error
from tests.support.data_fixtures import bare_tokenizer

FAULTS = {  # by a file and its content, what is said
    ("tokenizer_config.json", '{"tokenizer_class": "T5Tokenizer"}'): (
        "has tokenizer_class=T5Tokenizer, which does not take the BPE of its tokenizer.json (",
        "tokenizer_class=PreTrainedTokenizerFast, which takes any",
    ),
    ("tokenizer_config.json", '{"tokenizer_class": 5}'): (
        "has tokenizer_class=5",
        "the name of a class, null",
    ),
    ("tokenizer_config.json", "[]"): ("has a list, not keys with values", "the whole file"),
    ("special_tokens_map.json", "[]"): ("has a list, not keys with values", "the whole file"),
    ("tokenizer.json", ""): ("is no JSON", "the whole file"),
    ("tokenizer.json", "[]"): ("has a list, not keys with values", "the whole file"),
    ("tokenizer.json", "{}"): ("has no model", "the whole file"),
}


@pytest.mark.parametrize(("file", "content"), FAULTS)
def test_a_file_that_the_class_of_a_tokenizer_does_not_take_is_named(file, content, tmp_path):
    bare_tokenizer().save_pretrained(tmp_path)
    (tmp_path / file).write_text(content)
    with pytest.raises(ValueError) as raised:
        load_tokenizer(tmp_path)
    message = str(tokenizer_error("--base", str(tmp_path), raised.value, allowed="another"))
    reason, allowed = FAULTS[file, content]
    assert message.startswith(f"--base={tmp_path} is invalid: its {file} {reason}")
    assert message.partition(" Allowed: ")[2].startswith(allowed) and message.count("Allowed") == 1


def test_what_the_files_do_not_tell_is_reported_in_the_words_of_the_class(tmp_path):
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "T5Tokenizer"}))
    with pytest.raises(Exception, match="."):
        load_tokenizer(tmp_path / "none")
    error = OSError("no network.")
    message = str(tokenizer_error("--base", "a/b", error, allowed="a folder"))
    expected = "no such folder, and not loaded from the Hub: no network. Allowed: a folder"
    assert message == f"--base=a/b is invalid: {expected}"
