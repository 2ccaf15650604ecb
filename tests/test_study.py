"""The studies' common code tells runs apart by what was chosen for them, as the runs themselves say it."""

import runpy
import shutil
import sys

import pytest
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
    "m2d2_mini",
    "real_decoder",
    "self_distillation",
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


def compose_config(overrides):
    with initialize_config_dir(str(CONF), version_base="1.3"):
        return compose("config", ["domains=texts", "domains.root=FOLDER", "order=[law]", *overrides])


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
