"""The studies' common code tells runs apart by what was chosen for them, as the runs themselves say it."""

import json
import runpy
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import yaml
from hydra import compose, initialize_config_dir

from cpt.core.config import CONF
from tests.conftest import ROOT

STUDIES = ROOT / "benchmarks" / "studies"
CHATS = "replay.sources={chat: {path: ${domains.root}-chats.jsonl, format: messages, ratio: 0.1}}"
JOBS = (
    ["seed=1", "method=lora", "method.start=previous"],
    ["seed=0", "replay=sources", CHATS],
    ["seed=0", "freeze.layers=1", "loss=eaft", "trainable=norms"],
    ["seed=0", "method=ewc", "trainer.steps=4", "optim.lr=3e-05"],
)
PUBLISHED_STUDIES = (
    "das6_mini",
    "das6_mpnet_tuned",
    "das6_tuned",
    "linux_texts",
    "m2d2_decoder",
    "m2d2_mini",
    "real_decoder",
    "real_decoder_tuned",
    "self_distillation",
    "standard_cl_decoder",
    "standard_cl_families",
    "standard_cl_mini",
)


@pytest.fixture
def study(monkeypatch):
    monkeypatch.syspath_prepend(str(STUDIES))
    yield __import__("study")
    sys.modules.pop("study")


def test_a_list_or_a_mapping_is_one_choice_of_a_sweep(study):
    assert study.expand_sweep("method=ncl,lora") == ["method=ncl", "method=lora"]
    assert study.expand_sweep("order=[law,food]") == ["order=[law,food]"]
    assert study.expand_sweep(CHATS) == [CHATS]


@pytest.mark.parametrize("job", JOBS, ids=["method", "sources", "others", "trainer"])
def test_the_options_of_a_published_run_give_the_same_run_again(study, job):
    config = compose_config(job)
    method, mask, replay, seed, variant, order = study.describe_job(job, config)
    run = {"method": method, "mask": mask, "replay": replay, "seed": seed, "variant": variant, "order": order}
    assert compose_config(study.list_overrides(run)) == config


def test_what_an_experiment_chooses_is_part_of_a_job(study):
    config = compose_config(["method=ewc", "mask=migu", "replay=past"])
    assert study.describe_job(["seed=0"], config)[:3] == ("ewc", "migu", "past")


def compose_config(overrides):
    with initialize_config_dir(str(CONF), version_base="1.3"):
        return compose("config", ["domains=texts", "domains.root=FOLDER", "order=[law]", *overrides])


@pytest.fixture
def real_decoder(study):
    yield __import__("real_decoder")
    sys.modules.pop("real_decoder")


def test_a_question_on_a_term_has_its_entry_and_three_others_and_does_not_name_it(real_decoder, tmp_path):
    texts = [f"word{number} <jargon> Meaning number {number} of {{links}}." for number in range(6)]
    texts.append("named <jargon> Whatever is named so.")  # its definition has the term
    documents = [json.dumps({"text": text}) for text in [*texts, "A text without a field."]]
    (tmp_path / "test.jsonl").write_text("\n".join(documents))
    real_decoder.write_term_task(tmp_path / "test.jsonl", tmp_path / "tasks")

    questions = real_decoder.read_lines(tmp_path / "tasks" / "foldoc_terms.jsonl")
    assert len(questions) == 6
    for question in questions:
        number = question["choices"][question["answer"]].removeprefix("word")
        assert question["definition"] == f"Meaning number {number} of links."
        assert len(set(question["choices"])) == 4
    assert len({question["answer"] for question in questions}) > 1
    task = yaml.safe_load((tmp_path / "tasks" / "foldoc_terms.yaml").read_text())
    assert Path(task["dataset_kwargs"]["data_files"]["test"]).exists()


def test_a_run_is_compared_with_plain_training_that_learns_as_much(real_decoder, monkeypatch):
    def select(name):
        return lambda run: real_decoder.LossChange(run[name], None, None)

    names = ("learned", "chat", "forgot")
    monkeypatch.setattr(real_decoder, "CHANGES", {name: select(name) for name in names})
    changes_by_row = {
        "rate 3e-5": {"learned": 0.2, "chat": 0.1, "forgot": -0.1},
        "ncl": {"learned": 0.4, "chat": 0.5, "forgot": 0.1},
        "lora": {"learned": 0.1, "chat": 0.2, "forgot": 0.0},
        "kd": {"learned": 0.3, "chat": 0.1, "forgot": 0.0},
        "further than any rate": {"learned": 0.5, "chat": 0.0, "forgot": 0.0},
    }
    rows = real_decoder.tabulate_at_equal_learning(changes_by_row).splitlines()[-2:]
    assert rows == [
        "| kd | +0.300 | +0.100 | −0.200 | +0.000 | +0.000 |",
        "| lora | +0.100 | +0.200 | +0.150 | +0.000 | +0.050 |",
    ]


PAGES_WITHOUT_PLACE = {
    "no page": None,
    "no marks": "# A study\n",
    "no end": "<!-- generated: das6_mini -->\n",
    "end first": "<!-- end: das6_mini -->\n<!-- generated: das6_mini -->\n",
    "twice": 2 * "<!-- generated: das6_mini -->\n<!-- end: das6_mini -->\n",
}


@pytest.mark.parametrize("text", PAGES_WITHOUT_PLACE.values(), ids=PAGES_WITHOUT_PLACE)
def test_a_page_without_the_place_of_the_tables_is_said_before_the_runs(text, study, monkeypatch, tmp_path):
    if text is not None:
        (tmp_path / "das6.md").write_text(text)
    monkeypatch.setattr(study, "PAGES", tmp_path)
    monkeypatch.setattr(study, "run_sweeps", lambda *args: pytest.fail("started"))
    options = SimpleNamespace(add=False, published=False, report_only=False, runs=tmp_path)
    with pytest.raises(
        SystemExit, match=r"das6.md needs the lines <!-- generated: das6_mini --> and <!-- end"
    ):
        study.make_study(options, "das6_mini", [], page="das6")


def test_tables_are_written_between_the_marks_of_their_page(study, tmp_path):
    page = tmp_path / "das6.md"
    page.write_text("Before.\n<!-- generated: a -->\nold\n<!-- end: a -->\nAfter.\n<!-- generated: b -->\n")
    study.write_section(page, "a", ["new"])
    assert page.read_text().startswith(
        "Before.\n<!-- generated: a -->\n\nnew\n\n<!-- end: a -->\nAfter.\n<!--"
    )


def test_transfer_is_the_change_since_the_base_on_earlier_and_on_later_fields(study):
    m2d2_decoder = __import__("m2d2_decoder")
    losses = np.array(
        [[4.0, 5.0, 6.0, 1.0], [3.0, 4.5, np.nan, 1.0], [3.5, 4.0, 5.5, 1.0], [3.8, 4.4, 5.0, 1.0]]
    )
    scores = SimpleNamespace(
        domains=["law", "food", "space", "general"], learned=["law", "food", "space"], matrix=losses
    )
    second, last = m2d2_decoder.trace_transfer(SimpleNamespace(scores=scores))
    assert second == pytest.approx((2, -0.75, -0.5))  # the first stage was not measured on all fields
    assert last[:2] == pytest.approx((3, -0.6)) and np.isnan(last.change_on_later)


@pytest.mark.slow
@pytest.mark.campaign
@pytest.mark.parametrize("name", PUBLISHED_STUDIES)
def test_published_scores_give_the_published_pages(study, monkeypatch, tmp_path, name):
    pages = tmp_path / "studies"
    shutil.copytree(study.PAGES, pages)
    monkeypatch.setattr(study, "IMAGES", tmp_path)
    monkeypatch.setattr(study, "PAGES", pages)
    monkeypatch.setattr(sys, "argv", [name, "--published", "--runs", str(tmp_path / "runs")])
    runpy.run_path(str(STUDIES / f"{name}.py"), run_name="__main__")
    for page in (ROOT / "docs" / "studies").glob("*.md"):
        assert (pages / page.name).read_text() == page.read_text()
