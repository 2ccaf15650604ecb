"""`python -m cpt.vocabulary`: tokens of a corpus in a folder that model.tokenizer takes."""

import json
import re
import shlex
import subprocess
import sys
from types import SimpleNamespace

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from transformers import AutoTokenizer

from cpt import vocabulary
from cpt.data.sources.base import SPLIT
from cpt.data.text_encoder import TextEncoder
from cpt.models.extended_tokenizer import check_fit, find_sub_tokens
from tests.conftest import ROOT
from tests.support.data_fixtures import bos_tokenizer, make_prose
from tests.support.tokenizer_kinds import word_level

DOCUMENTS = [f"de benzol and xylol of {text}" for text in make_prose(200, seed=3)]


@pytest.fixture
def base(tmp_path):
    tokenizer = bos_tokenizer()
    tokenizer.chat_template = "{{ messages }}"
    tokenizer.save_pretrained(tmp_path / "base")
    return tmp_path / "base"


@pytest.fixture
def corpus(tmp_path):
    """A folder of a domain with a table, and next to it what is ignored."""
    folder = tmp_path / "corpora" / "oil"
    folder.mkdir(parents=True)
    lines = [json.dumps({"body": text}) for text in DOCUMENTS]
    (folder / "docs.jsonl").write_text("\n".join(lines))
    (folder / "notes.bin").write_bytes(b"\0")
    return folder


def run(*arguments):
    return vocabulary.main([*map(str, arguments), "--column=body", "--ignore=*.bin", "--min-count=3"])


def test_tokens_are_added_and_measured_on_text_that_is_held_out(base, corpus, tmp_path, capsys):
    output = tmp_path / "more"
    assert run(corpus, "--base", base, "--output", output, "--tokens=30", "--held-out=0.2") == 0
    printed = capsys.readouterr().out
    own_tokenizer = AutoTokenizer.from_pretrained(base)
    tokenizer = AutoTokenizer.from_pretrained(output)
    check_fit(tokenizer, own_tokenizer, name="y", checkpoint="x")
    assert len(tokenizer) == len(own_tokenizer) + 30
    assert len(find_sub_tokens(tokenizer, own_tokenizer)) == 30
    assert tokenizer.chat_template == own_tokenizer.chat_template
    assert not {"is_local", "local_files_only"} & {
        *json.loads((output / "tokenizer_config.json").read_text())
    }
    assert len(tokenizer.tokenize(" benzol xylol")) == 2

    trained, held_out = map(int, re.search(r"oil: (\d+) documents, (\d+) more held out", printed).groups())
    assert trained + held_out == 200 and 20 < held_out < 60
    before, after = map(float, re.search(r"held-out text: ([\d.]+) -> ([\d.]+) \(", printed).groups())
    texts = [text for text in DOCUMENTS if vocabulary.HeldOutText(0.2, has_named_splits=False).is_drawn(text)]
    num_bytes = sum(len(text.encode()) for text in texts)
    ratios = []
    for measured in (own_tokenizer, tokenizer):
        ids = TextEncoder(measured, SPLIT).encode_body("".join(texts))
        ratios.append(num_bytes / len(ids))
    assert [before, after] == pytest.approx(ratios, rel=0.02) and after > 1.2 * before
    assert "' benzol'" in printed.partition("Most frequent:")[2].splitlines()[0]

    words = shlex.split(printed.splitlines()[-1])
    expected = {f"domains.root={corpus.parent}", "domains.only=[oil]", f"model.tokenizer={output}"}
    assert expected < {*words}
    with pytest.raises(SystemExit) as exit_error:
        run(corpus, "--base", base, "--output", output)
    assert exit_error.value.code == 1 and "is invalid: it exists. Allowed: " in capsys.readouterr().err


def test_a_single_file_is_read_and_splits_by_name_are_held_out(base, corpus, tmp_path, capsys):
    (corpus / "notes.bin").unlink()
    (corpus / "test.jsonl").write_text('{"body": "a benzol"}\n{"body": "de xylol"}\n')
    assert run(corpus, "--base", base, "--output", tmp_path / "1", "--tokens=5") == 0
    assert "oil: 200 documents, 2 more held out" in capsys.readouterr().out
    assert run(corpus / "docs.jsonl", "--base", base, "--output", tmp_path / "2", "--tokens=5") == 0
    printed = capsys.readouterr().out
    assert re.search(r"docs.jsonl: 18\d documents, 1\d more", printed)
    assert "domains.root=FOLDER" in printed and "that holds docs.jsonl alone" in printed


WRONG = {
    "--tokens=0": "--tokens=0 is invalid. Allowed: 1 or more",
    "--min-count=0": "--min-count=0 is invalid. Allowed: 1 or more",
    "--held-out=1": "--held-out=1.0 is invalid. Allowed: above 0 and below 1",
    "--base=/no/such": "--base=/no/such is invalid: no such folder, and not loaded from the Hub: ",
    "--column=none": "'none'",
    "--min-count=100000": "has no word of several tokens that occurs 100000 times. Allowed: more text",
}


@pytest.mark.parametrize("option", WRONG)
def test_what_cannot_be_used_is_reported_in_one_line_and_leaves_nothing(
    option, base, corpus, tmp_path, capsys
):
    output = tmp_path / "more"
    arguments = [corpus, "--base", base, "--output", output, "--column=body", "--ignore=*.bin", option]
    with pytest.raises(SystemExit) as exit_error:
        vocabulary.main([*map(str, arguments)])
    error = capsys.readouterr().err
    lines = [line for line in error.splitlines() if line.startswith("cpt: ")]
    assert exit_error.value.code == 1 and len(lines) == 1 and WRONG[option] in lines[0], error
    assert not output.exists()


def test_a_corpus_that_is_missing_and_a_tokenizer_without_pieces_are_reported(base, corpus, tmp_path, capsys):
    word_level().save_pretrained(tmp_path / "words")
    for folder, name in ((tmp_path / "none", base), (corpus, tmp_path / "words")):
        with pytest.raises(SystemExit):
            run(folder, "--base", name, "--output", tmp_path / "more")
    errors = capsys.readouterr().err
    assert "CORPUS=" in errors and "no such file or folder" in errors
    assert "its tokenizer is WordLevel. Allowed: a checkpoint with a fast tokenizer of BPE" in errors


def break_definition(monkeypatch):
    """What is written is loaded with other entries or merges."""
    monkeypatch.setattr(vocabulary, "describe_loaded", lambda *_: "other entries or merges")


def break_measurement(monkeypatch):
    def measure(*_):
        raise ValueError("a held-out text without a new token has other ids than before")

    monkeypatch.setattr(vocabulary, "measure_held_out", measure)


@pytest.mark.parametrize("break_check", [break_definition, break_measurement])
@pytest.mark.parametrize("exists", [False, True])
def test_a_tokenizer_that_fails_a_check_is_not_left_behind(
    exists, break_check, base, corpus, tmp_path, monkeypatch, capsys
):
    output = tmp_path / "new" / "more"
    if exists:
        output.mkdir(parents=True)
    before = sorted(tmp_path.rglob("*"))
    with monkeypatch.context() as patch:
        break_check(patch)
        with pytest.raises(SystemExit):
            run(corpus, "--base", base, "--output", output)
    assert sorted(tmp_path.rglob("*")) == before
    assert ".more-" not in capsys.readouterr().err

    assert run(corpus, "--base", base, "--output", output) == 0
    assert (output / "tokenizer.json").is_file() and output.stat().st_mode & 0o077
    assert [*output.parent.iterdir()] == [output]


@pytest.mark.campaign
def test_installed_libraries_add_no_line_to_what_the_program_says():
    process = subprocess.run(
        [sys.executable, "-m", "cpt.vocabulary", "--help"], cwd=ROOT, capture_output=True, text=True
    )
    assert process.returncode == 0 and process.stderr == ""


def test_the_command_of_a_run_takes_the_learned_text_alone_whatever_its_folders_are_called(tmp_path):
    """Hydra takes each value as it is, and no folder next to a corpus of files becomes a domain."""
    corpus = tmp_path / "my texts (1), old"
    corpus.mkdir()
    options = SimpleNamespace(
        corpus=corpus, base="a/b", output=tmp_path / "x=y", column="text", document="auto", ignore=[]
    )
    assert read_usage(options)["domains.root"] == str(corpus)
    (corpus / "a.txt").write_text("text")
    usage = read_usage(options)
    assert (usage["domains.root"], usage["domains.only"]) == (str(tmp_path), [corpus.name])
    assert usage["model.tokenizer"] == str(options.output)
    assert not {"domains.column", "domains.document", "domains.ignore"} & set(usage)


def test_the_command_of_a_run_reads_the_text_as_the_tokenizer_was_learned_from_it(tmp_path):
    options = SimpleNamespace(
        corpus=tmp_path,
        base="a/b",
        output=tmp_path / "new",
        column="body",
        document="line",
        ignore=["old*", "a,b"],
    )
    usage = read_usage(options)
    assert (usage["domains.column"], usage["domains.document"]) == ("body", "line")
    assert usage["domains.ignore"] == ["old*", "a,b"]

    # Of one file the others of its folder are no text.
    options.corpus = tmp_path / "one.txt"
    options.corpus.write_text("text")
    usage = read_usage(options)
    assert usage["domains.root"] == "FOLDER" and "domains.only" not in usage
    assert "that holds one.txt alone" in vocabulary.format_usage(options)


def read_usage(options):
    words = shlex.split(vocabulary.format_usage(options))
    overrides = OverridesParser.create().parse_overrides([word for word in words if "=" in word])
    return {override.key_or_group: override.value() for override in overrides}
