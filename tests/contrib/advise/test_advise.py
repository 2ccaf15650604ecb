"""`python -m cpt.contrib.advise`: a whole advice on small texts, interrupted and resumed; what it refuses."""

import json
import shlex
import sys

import pytest
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf
from PIL import Image

from cpt.contrib.advise import __main__ as advise
from cpt.contrib.advise.candidates import NAMES
from cpt.core.config import CONF
from cpt.core.preemption import GO_ON
from cpt.trainer.plan import make_plan
from tests.conftest import ROOT, SMALL

OWN = [each for each in SMALL if not each.startswith(("trainer.steps", "logger"))]


@pytest.fixture
def here(corpora, cache, start, tmp_path, monkeypatch):
    """Asks for advice on the small texts; gives the runs that were made by the names of their folders. After
    `most` of them a signal comes."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("cpt.contrib.advise.runs.PILOT", 2)
    monkeypatch.setattr("cpt.contrib.advise.__main__.MOST_STEPS", 4)
    monkeypatch.setattr("cpt.contrib.advise.runs.SHORTER", 2)
    monkeypatch.setattr("cpt.contrib.advise.runs.DESIGNS", ((1, True, 2),))
    begun = []

    def ask(*arguments, most=99, fails=""):
        def run_all(jobs, *, command, places, grace):
            assert command == (sys.executable, "-m", "cpt") and len(places) <= len(jobs)
            for job in jobs:
                if len(begun) == most:
                    raise SystemExit(GO_ON)
                begun.append(job.folder.name)
                cfg = OmegaConf.create({key: job.config[key] for key in job.config if key != "hydra"})
                job.folder.mkdir(parents=True, exist_ok=True)
                job.console.write_text("cpt: broken\n" if job.label == fails else "")
                if job.label != fails:
                    start(cfg, job.folder)
                job.code = int(job.label == fails)

        begun.clear()
        monkeypatch.setattr("cpt.contrib.advise.runs.run_all", run_all)
        given = [str(corpora), "--arms", "replay-25,freeze", "--hours", "0.5", *arguments]
        advise.main([*given, *OWN, f"cache_dir={cache}"])
        return list(begun)

    return ask


@pytest.mark.slow
def test_an_advice_is_planned_run_stopped_gone_on_with_and_told(here, tmp_path, capsys, corpora):
    out = tmp_path / "outputs/advice"
    with pytest.raises(SystemExit) as ended:
        here("--weight", "0", most=3)
    assert ended.value.code == GO_ON and not (out / "advice.json").exists()
    plan = json.loads((out / "plan.json").read_text())["plan"]
    found = [plan[name] for name in ("arms", "steps", "seeds", "short")]
    assert found == [["ncl", "replay-25", "freeze"], 4, 1, True]
    rest = here("--weight", "0", "--hours", "1e-6")  # both lengths of the first seed, whatever they take
    # The pilot is ncl's run of two steps, and what was finished before the signal is not run again.
    assert rest == ["freeze_steps-4_seed-0", "replay-25_steps-2_seed-0", "freeze_steps-2_seed-0"]
    told, advice = capsys.readouterr().out, json.loads((out / "advice.json").read_text())
    assert told.splitlines()[-1] == advice["recommended"]["command"]
    check_command(advice["recommended"]["command"], corpora)
    arms = {arm["arm"]: arm for arm in advice["arms"]}
    assert set(arms) == {"ncl", "replay-25", "freeze"}
    assert advice["recommended"]["arm"] == max(arms, key=lambda name: arms[name]["learned"])
    assert advice["measured"]["seeds"] == [0] and advice["measured"]["lengths"] == [2, 4]
    for arm in arms.values():
        low, high = arm["intervals"]["learned"]
        assert low <= arm["learned"] <= high and "learned_at" in arm["intervals"]
    assert any("one seed was run" in line for line in advice["unknown"])
    with Image.open(out / "advice-plane.png") as picture:
        assert f"{advice['recommended']['arm']} recommended" in picture.text["Description"]
    assert here("--weight", "0") == []  # nothing is learned again
    assert json.loads((out / "advice.json").read_text()) == advice
    with pytest.raises(SystemExit):
        here("trainer.batch_size=4")
    assert "is the advice on another question; allowed: another --out" in capsys.readouterr().err


def check_command(command, corpora):
    """It is composed and planned as it stands, for an epoch of the same texts."""
    words = shlex.split(command)
    assert words[:2] == ["python", "run.py"] and f"domains.root={corpora}" in words
    with initialize_config_dir(str(CONF), version_base="1.3"):
        plan = make_plan(compose("config", overrides=words[2:]))
    assert plan.order == ["food", "law", "space"] and plan.budget.epochs == 1


@pytest.mark.slow
def test_an_arm_that_fails_is_left_out_and_named_the_first_ends_it(here, tmp_path, monkeypatch, capsys):
    with pytest.raises(SystemExit) as ended:
        here(fails="ncl")
    told = capsys.readouterr().err.splitlines()
    assert ended.value.code == 1 and told[-1].startswith("cpt: the first run: failed (exit 1): cpt: broken (")
    assert not (tmp_path / "outputs/advice/plan.json").exists()
    monkeypatch.setattr("cpt.contrib.advise.runs.DESIGNS", ((2, False, 1), (1, False, 1)))
    monkeypatch.setattr("cpt.contrib.advise.runs.PILOT", 4)  # one and the same run
    here("--out", "failed", "--seeds", "1", fails="freeze")
    advice = json.loads((tmp_path / "failed/advice.json").read_text())
    assert {arm["arm"] for arm in advice["arms"]} == {"ncl", "replay-25"}
    assert advice["measured"]["seeds"] == [0]
    assert "freeze: failed (exit 1): cpt: broken" in advice["unknown"]
    assert capsys.readouterr().out.splitlines()[-1] == advice["recommended"]["command"]


WRONG = {
    "nowhere": "no folder nowhere; allowed: ",
    ". --hours 0": "--hours 0; allowed: more than 0",
    ". --weight -1": "--weight -1; allowed: 0 or more",
    ". --forget nan": "--forget nan; allowed: nats per token, a finite number",
    ". --jobs 0": "--jobs 0; allowed: 1, 2",
    ". --seeds 4": "--seeds 4; allowed: 1 to 3",
    ". --arms kdd": "--arms kdd; allowed: ncl, ",
    ". seed=1": "seed=1: advise sets seed itself",
    ". trainer.batch=4": "trainer.batch is not known; did you mean",
    ". --model tiny_gpt3": "--model tiny_gpt3: ",
    ".": "domains.root",  # no text in it
}


@pytest.mark.parametrize("arguments", WRONG)
def test_what_cannot_be_asked_ends_in_one_line_and_leaves_nothing(arguments, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("cpt.contrib.advise.runs.run_all", lambda *given, **how: pytest.fail("a run"))
    with pytest.raises(SystemExit) as ended:
        advise.main(arguments.split())
    told = capsys.readouterr().err
    assert ended.value.code == 1 and len(told.splitlines()) == 1
    assert told.startswith("cpt: ") and WRONG[arguments] in told
    assert list(tmp_path.iterdir()) == []


def test_the_page_names_every_option_and_arm():
    page = (ROOT / "docs/advise.md").read_text(encoding="utf-8")
    options = {name for name in advise.make_parser()._option_string_actions if name.startswith("--")}
    assert {name for name in (options - {"--help"}) | {*NAMES} if f"`{name}`" not in page} == set()
