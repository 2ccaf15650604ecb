"""Whole runs on raw text with chats and further text mixed in: after a kill, with other text, and refusals."""

import doctest
import json
import logging

import pytest

from cpt.methods.ncl import NCL
from cpt.trainer import stage
from tests.conftest import ROOT, SMALL_GPT2
from tests.runs.reading import assert_same_bits, read_scores, start_and_kill
from tests.support.campaign import run_few
from tests.support.chat_decoder import write_checkpoint
from tests.support.task_fixtures import write_tasks

TURNS = [
    ("What is found?", "The court finds it."),
    ("Who brought bread?", "The waiter."),
    ("A star?", "Yes."),
]
QUICK = [
    "trainer.steps=6",
    "trainer.batch_size=8",
    "trainer.log_every_n_steps=2",
    "chats=none",
    "model.max_seq_length=64",
]


@pytest.fixture(scope="module")
def decoder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("base") / "decoder"
    write_checkpoint(folder)
    return folder


@pytest.fixture
def sources(tmp_path):
    """A file of chats and one of text, and the option that mixes them in."""
    chats = []
    for question, answer in TURNS:
        messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        chats.append(json.dumps({"messages": messages}))
    (tmp_path / "chats.jsonl").write_text("\n".join(chats))
    (tmp_path / "web.jsonl").write_text("\n".join(json.dumps({"text": f"Word {n}."}) for n in range(300)))
    return (
        f"replay.sources={{chat: {{path: {tmp_path / 'chats.jsonl'}, format: messages, ratio: 0.25}}, "
        f"web: {{path: {tmp_path / 'web.jsonl'}, ratio: 0.125, end_ratio: 0.25, weight: 2, max_epochs: 1}}}}"
    )


@pytest.fixture
def config(small_gpt2, decoder, sources):
    def make(*overrides):
        options = [f"model.name_or_path={decoder}", "replay=past", "replay.past_ratio=0.125", sources]
        return small_gpt2("order=[law,food]", *QUICK, *options, *overrides)

    return make


def test_a_killed_run_has_the_same_bits_and_counts_and_other_text_is_refused(
    config, start, killing, tmp_path, caplog
):
    caplog.set_level(logging.INFO, logger="cpt")
    options = [
        "+logger.csv=true",
        "domains.packing=document_mask",
        "trainer.accumulate_grad_batches=2",
        "trainer.checkpoint_every_n_steps=2",
    ]
    start(config(*options), tmp_path / "whole")
    start_and_kill(start, killing, config(*options), tmp_path / "killed", step=3, domain="food")
    start(config(*options), tmp_path / "killed")
    assert_same_bits(tmp_path / "whole", tmp_path / "killed")
    mixture = read_scores(tmp_path / "whole")["mixture"]
    assert mixture == read_scores(tmp_path / "killed")["mixture"]

    rows = {stage: {name: part["rows"] for name, part in parts.items()} for stage, parts in mixture.items()}
    assert rows == {
        "law": {"new": 27, "past": 0, "general": 0, "chat": 12, "web": 9},
        "food": {"new": 21, "past": 6, "general": 0, "chat": 12, "web": 9},
    }
    assert mixture["food"]["chat"]["asked_share"] == 0.25 and mixture["food"]["web"]["asked_share"] == 0.1875
    assert "Shares of the tokens read in food: new" in caplog.text and " (25.0% of rows), web " in caplog.text
    assert "Reading the rows of chat " in caplog.text
    report = (tmp_path / "whole" / "report.md").read_text()
    assert "| food | chat | 25.00 | 25.00 |" in report and "| law | web | 18.75 | 18.75 |" in report
    assert doctest.testmod(stage).failed == 0  # a share of rows that is not the one asked for
    curves = (tmp_path / "whole" / "metrics.csv").read_text()
    assert "train/lm_chat/food" in curves and "train/lm_past/law" not in curves

    chats = (tmp_path / "chats.jsonl").read_text()
    (tmp_path / "chats.jsonl").write_text(chats + "\n" + chats.replace("found", "lost"))
    with pytest.raises(ValueError, match="the text of replay.sources/chat changed: 3 documents"):
        start(config(*options), tmp_path / "whole")


def test_a_share_of_which_no_row_is_read_is_a_line(config, start, tmp_path, caplog):
    few_rows = ["replay.sources.web.ratio=0.01", "replay.sources.web.end_ratio=null"]
    start(config("order=[law]", "trainer.steps=1", *few_rows), tmp_path / "run")
    (line,) = [record.message for record in caplog.records if "Nothing of" in record.message]
    assert line.startswith("Nothing of web was read in law: its share of 8 rows is 0.01.")

    caplog.clear()
    start(
        config("order=[law]", "trainer.steps=1", "replay.sources.web.max_epochs=0.001"), tmp_path / "limited"
    )
    (line,) = [record.message for record in caplog.records if "Nothing of" in record.message]
    assert line.startswith("Nothing of web was read in law: replay.sources.web.max_epochs allows no further")


def test_a_folder_without_text_is_refused_by_the_option_that_names_it(config, start, tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(
        ValueError, match="replay.sources.web.path=.*empty is invalid: no file of the folder has"
    ):
        start(config(f"replay.sources.web.path={tmp_path / 'empty'}"), tmp_path / "run")


SOURCES_ALONE = ["trainer.steps=4", "trainer.checkpoint_every_n_steps=2", "replay=sources"]
METHODS = ["ewc", "lora", "derpp", "das", "kd", "migu", "si", "mas", "agem", "hat", "olora", "sdft"]


@pytest.mark.parametrize("method", run_few(METHODS, []))
def test_methods_read_sources_and_resume_with_the_same_bits(
    method, config, small_gpt2, decoder, sources, start, killing, tmp_path
):
    options = [f"method={method}", *SOURCES_ALONE]
    if method == "sdft":  # which needs questions with answers
        tasks = tmp_path / "tasks"
        tasks.mkdir()
        write_tasks(tasks, ("law", "food"), train=80, test=20, size=(1, 8))
        options += ["domains=tasks", "domains/template=bare", f"domains.root={tasks}", "answers=none"]
        options += ["method.strength=0.5", "method.max_new_tokens=8"]
    cfg = small_gpt2("order=[law,food]", *QUICK, f"model.name_or_path={decoder}", sources, *options)
    start(cfg, tmp_path / "whole")
    start_and_kill(start, killing, cfg, tmp_path / "killed", step=3, domain="food")
    start(cfg, tmp_path / "killed")
    assert_same_bits(tmp_path / "killed", tmp_path / "whole")
    mixture = read_scores(tmp_path / "whole")["mixture"]
    assert mixture == read_scores(tmp_path / "killed")["mixture"]
    assert {name: part["rows"] for name, part in mixture["food"].items()} == {
        "new": 18,
        "past": 0,
        "general": 0,
        "chat": 8,
        "web": 6,
    }


OTHER_METHODS = sorted({path.stem for path in ROOT.glob("conf/method/*.yaml")} - {*METHODS, "ncl", "none"})


@pytest.mark.parametrize("method", run_few(OTHER_METHODS, ["dga", "replay"]))
def test_every_other_method_reads_its_share_of_sources(method, small_gpt2, decoder, sources, start, tmp_path):
    """Those of which no run is killed above: both sources are read in each stage, and the run ends."""
    options = [f"method={method}", "trainer.steps=1", "trainer.importance_samples=4", "eval.max_tokens=64"]
    if method == "replay":  # whose mixture is an option of its own
        options += [sources.replace("replay.sources", "method.mixture.sources")]
    else:
        options += ["replay=sources", sources]
    cfg = small_gpt2("order=[law,food]", *QUICK, f"model.name_or_path={decoder}", *options)
    start(cfg, tmp_path)
    mixture = read_scores(tmp_path)["mixture"]
    steps_by_stage = {"joint": 2} if method == "joint" else {"law": 1, "food": 1}
    assert mixture.keys() == steps_by_stage.keys()
    for stage_name, steps in steps_by_stage.items():
        rows = {name: part["rows"] for name, part in mixture[stage_name].items()}
        assert rows["chat"] == 2 * steps and rows["web"] >= steps


@pytest.mark.campaign
def test_a_run_with_sources_gets_one_more_domain_as_if_it_had_been_there(config, start, tmp_path):
    options = [*SOURCES_ALONE, "save_all_stages=true"]
    start(config(*options), tmp_path / "two")
    options.append("order=[law,food,space]")
    start(config(*options, f"extend={tmp_path / 'two'}"), tmp_path / "extended")
    start(config(*options), tmp_path / "whole")
    assert_same_bits(tmp_path / "extended", tmp_path / "whole")
    mixture = read_scores(tmp_path / "whole")["mixture"]
    assert read_scores(tmp_path / "extended")["mixture"] == mixture and list(mixture)[-1] == "space"


@pytest.mark.campaign
def test_domains_that_are_streamed_take_sources(composed, cache, corpora, decoder, sources, start, tmp_path):
    catalogue = ", ".join(
        f"{name}: {{path: text, data_files: {corpora / name / 'all.txt'}}}" for name in ("law", "food")
    )
    options = ["domains=hub", "domains.streaming=true", f"domains.catalogue={{{catalogue}}}", sources]
    options += [f"cache_dir={cache}", f"model.name_or_path={decoder}", *SOURCES_ALONE]
    start(composed(*SMALL_GPT2, "order=[law,food]", *QUICK, *options), tmp_path / "run")
    assert read_scores(tmp_path / "run")["mixture"]["food"]["chat"]["rows"] == 8


def test_a_masked_model_reads_sources_of_text_and_missing_losses_of_parts_are_logged_once(
    small, start, tmp_path, monkeypatch, caplog
):
    caplog.set_level(logging.INFO, logger="cpt")
    (tmp_path / "web.jsonl").write_text("\n".join(json.dumps({"text": f"Word {n}."}) for n in range(300)))
    sources = f"replay.sources={{web: {{path: {tmp_path / 'web.jsonl'}, ratio: 0.25}}}}"
    options = ["order=[law,food]", *SOURCES_ALONE, "trainer.log_every_n_steps=2", sources]
    start(small(*options), tmp_path / "run")
    part = read_scores(tmp_path / "run")["mixture"]["food"]["web"]
    assert part["rows"] == 8 and 0 < part["scored"] < part["tokens"]

    def losses(module, batch):
        return {"lm": module.objective.sum_nll(module.model, batch) * batch["weight"]}

    assert "Not logging the loss of each part" not in caplog.text
    monkeypatch.setattr(NCL, "losses", losses)
    start(small(*options), tmp_path / "plain")
    assert caplog.text.count("Not logging the loss of each part of the mixture: NCL does not call") == 1


@pytest.mark.parametrize(
    ("options", "line"),
    [
        (["replay=sources", "replay.sources={}"], "replay=sources: it has neither a share nor a source"),
        (["replay=past", "replay.past_ratio=0"], "replay=past: it has neither a share nor a source"),
        (["replay=past", "order=[law]"], "replay.past_ratio=0.25: a single domain has no past ones"),
        (["replay=past", "method=joint"], "replay.past_ratio=0.25: method=joint learns all domains at once"),
        (["replay=past"], ""),
        ([], ""),
    ],
)
def test_replay_that_mixes_nothing_in_is_a_line(options, line, small, start, tmp_path, caplog):
    caplog.set_level(logging.INFO, "cpt")
    start(small("trainer.steps=1", "eval.when=last", *options), tmp_path / "run")
    lines = [message for message in caplog.messages if message.startswith("No effect of replay")]
    assert lines == ([f"No effect of {line}"] if line else [])


def test_what_takes_no_chats_and_chats_that_are_held_out_are_refused_in_one_line(
    config, small, small_gpt2, sources, start, tmp_path
):
    chats = tmp_path / "chats.jsonl"
    with pytest.raises(ValueError, match="replay.sources.chat.path=.* is invalid: .* is held out"):
        start(config("chats=default", f"chats.path={chats}"), tmp_path / "run")
    message = "replay.sources.chat.format=messages is invalid with model=tiny_.*: model=tiny_.* "
    with pytest.raises(ValueError, match=f"{message}has no chat template"):
        start(small_gpt2("replay=sources", sources), tmp_path / "run")
    with pytest.raises(ValueError, match=f"{message}is no causal model"):
        start(small("replay=sources", sources), tmp_path / "run")
    assert not (tmp_path / "run" / "scores.json").exists()
