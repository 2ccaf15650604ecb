"""The examples of docs/examples, each run at a tiny size as its page says."""

import json
import re
import subprocess
import sys

import pytest
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from cpt.core.config import CONF
from tests.conftest import ROOT, SMALL

EXAMPLES = ROOT / "docs" / "examples"
NAMES = {path.stem for path in (EXAMPLES / "experiment").glob("*.yaml")}
TINY = [each for each in SMALL if not each.startswith(("model.base", "logger"))]
OF_A_BASE = ["model.base.steps=6", "model.base.batch_size=8"]


@pytest.fixture
def example(corpora, cache, no_pictures):
    """The config of an example over the small texts."""

    def build(name, *given, checkpoint=False):
        size = [each for each in TINY if not (checkpoint and each.startswith(("model.config", "model.voc")))]
        places = [f"domains.root={corpora}", f"cache_dir={cache}", "logger=none"]
        found = f"hydra.searchpath=[file://{EXAMPLES}]"
        overrides = [f"experiment={name}", *places, *size, *([] if checkpoint else OF_A_BASE), *given, found]
        with initialize_config_dir(str(CONF), version_base="1.3"):
            return compose("config", overrides=overrides)

    return build


def rows(folder):
    return json.loads((folder / "scores.json").read_text())["rows"]


def test_every_example_stands_on_its_page_and_is_run_here():
    page = (ROOT / "docs" / "examples.md").read_text(encoding="utf-8")
    assert sorted(NAMES) == ["monthly", "three_methods", "with_replay"]
    assert {name for name in NAMES if f"experiment={name}" not in page} == set()
    text = (EXAMPLES / "experiment" / "three_methods.yaml").read_text()
    assert "method: ncl,kd,replay" in text and "seed: 0,1,2" in text


def test_corpora_are_made_of_what_every_python_has(tmp_path):
    program = [sys.executable, EXAMPLES / "make_corpora.py", tmp_path]
    said = subprocess.run(program, capture_output=True, text=True, check=True).stdout
    for name in ("network", "files", "numbers", "general"):
        lines = (tmp_path / name / "all.jsonl").read_text(encoding="utf-8").splitlines()
        texts = [json.loads(line)["text"] for line in lines]
        assert f"{name}: {len(texts)} documents" in said
        assert len(texts) > 200 and len(set(texts)) == len(texts)


@pytest.mark.slow
@pytest.mark.adopts
def test_one_more_domain_next_month_is_learned_alone(example, start, tmp_path):
    start(example("monthly", "order=[law,food]"), tmp_path / "first")
    before = json.loads((tmp_path / "first" / "scores.json").read_text())
    start(example("monthly", "order=[law,food,space]"), tmp_path / "second")
    after = json.loads((tmp_path / "second" / "scores.json").read_text())
    assert after["rows"] == ["base", "law", "food", "space"]
    assert after["grown"] and after["nll"][2][0] == before["nll"][2][0]
    assert after["run"]["replay"] == "past"


@pytest.mark.slow
def test_a_checkpoint_learns_with_replay_and_three_methods_from_one_base(example, start, tmp_path):
    """The checkpoint of the first is what one of the second has left."""
    cfg = example("three_methods", "order=[law,food]", "method=kd")
    start(cfg, tmp_path / "kd")
    assert rows(tmp_path / "kd") == ["base", "law", "food"]
    given = f"model.checkpoint={tmp_path / 'kd' / 'model'}"
    start(example("with_replay", given, "order=[space,law]", checkpoint=True), tmp_path / "replay")
    assert rows(tmp_path / "replay") == ["base", "space", "law"]


@pytest.mark.slow
def test_the_method_of_contributing_runs_as_it_is_shown(small, start, tmp_path, monkeypatch):
    page = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    (module,) = re.findall(r"^```python\n# cpt/methods/l1.py\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    (config,) = re.findall(r"^```yaml\n# conf/method/l1.yaml\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "shown_l1.py").write_text(module)
    cfg = small("order=[law,food]", "trainer.log_every_n_steps=1", "logger=csv")
    cfg.method = OmegaConf.create(config.replace("cpt.methods.l1", "shown_l1"))
    start(cfg, tmp_path / "run")
    assert rows(tmp_path / "run") == ["base", "law", "food"]
    assert "train/l1/food" in (tmp_path / "run" / "metrics.csv").read_text()
