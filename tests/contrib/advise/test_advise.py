"""`python -m cpt.contrib.advise`: which runs are planned, what they learned and forgot, which arm
is best; a whole advice that is interrupted and resumed."""

import json
import shlex
import sys
from types import SimpleNamespace

import numpy as np
import pytest
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from cpt.contrib.advise import __main__ as advise
from cpt.contrib.advise import advice, runs
from cpt.contrib.advise.advice import ArmRun, Measured, Point, Wish
from cpt.contrib.advise.runs import Costs, Model, Round, Setting, SweepPlan, list_arms, plan_sweep
from cpt.core.config import CONF
from cpt.core.preemption import GO_ON
from cpt.trainer.plan import make_plan
from tests.conftest import SMALL

OWN = [each for each in SMALL if not each.startswith(("trainer.steps", "logger"))]


def test_every_arm_says_what_it_sets_and_is_chosen_by_name_beside_the_reference():
    made = {arm: own for arm, (_, own) in list_arms(Setting(rate=1e-3, blocks=12, domains=3)).items()}
    assert made["ncl"] == [] and made["freeze"] == ["freeze.layers=6"]
    assert made["replay-5"] == ["replay=past", "replay.past_ratio=0.025", "replay.general_ratio=0.025"]
    assert runs.choose_arms(None) == [*made]
    assert runs.choose_arms("kd,lora,kd") == ["ncl", "kd", "lora"]
    with pytest.raises(ValueError, match="--arms kdd is invalid. Allowed: ncl, "):
        runs.choose_arms("kdd")


def fitted(seconds, *, arms=("ncl", "lora"), jobs=1, most=500, **given):
    costs = Costs(step=0.1, fixed=10, stages=2)
    return plan_sweep(arms, costs, seconds=seconds, jobs=jobs, most=most, **given)


def test_more_time_is_for_more_steps_up_to_an_epoch_then_for_more_seeds_and_less_for_fewer_arms():
    def planned(seconds, **given):
        plan = fitted(seconds, **given)
        return plan.seeds, plan.short, plan.steps

    # of 600 s 6 starts, then 540 s / (2 x 0.1 x 2 x 2.25), at most the 500 of an epoch; of 200 s 4 starts,
    # then 160 s / (2 x 0.1 x 2 x 1.25); in 45 s a shorter length has 10 steps, below 20.
    expected = {1000: (3, True, 500), 600: (2, True, 500), 200: (1, True, 320), 45: (1, False, 62)}
    assert {each: planned(each) for each in expected} == expected
    assert {each: planned(each / 2, jobs=2) for each in expected} == expected
    plan = fitted(1000)
    assert plan.seconds == pytest.approx(3 * 220 + 70)
    assert plan.rounds == [Round(0, 500), Round(0, 125), Round(1, 500), Round(2, 500)]
    five = ("ncl", "replay-5", "lr-1/4", "replay-25", "lora")
    assert (fitted(50, arms=five).arms, fitted(50, arms=five).steps) == (five[:4], 12)
    with pytest.raises(ValueError, match=r"30 s are left of --hours"):
        fitted(30, arms=five)


NLL = np.array([[4.0, 5.0, 3.0], [3.0, 5.0, 3.1], [3.4, 4.5, 3.3]])  # base, law, food x law, food, general
COUNTS = np.array([10.0, 30.0, 0.0])  # the last document scores nothing
UP = np.array([[0.0, 0, 0], [1, 0, 0], [1, 0, 0]])  # a nat less is learned of law


def made(nll, *, shift=0.0):
    """A run whose documents differ from the mean by a shift: of the first three times as much, and up."""
    told = SimpleNamespace(rows=["base", "law", "food"], learned=["law", "food"], matrix=nll)
    told.domains = ["law", "food", "general"]
    drift = np.array([0.0, 1.0, 1.0])[:, None] * shift * np.array([3.0, -1.0, 0.0])  # not of the base
    return ArmRun(told, [(nll[:, column, None] + drift) * COUNTS for column in range(3)], [COUNTS] * 3)


def bounds(runs, **options):
    return Measured(runs).bounds(**{"chosen": "ncl", "steps": 40, "weight": 1.0, "at": None} | options)


def test_means_are_over_what_all_arms_have_documents_and_seeds_are_redrawn_paired():
    found = [advice.trade(NLL, made(NLL).scores)[name] for name in ("learned", "FG", "drift", "forgotten")]
    assert found == pytest.approx([0.75, 0.4, 0.3, 0.35])
    runs = {("ncl", 40, 0): made(NLL), ("ncl", 40, 1): made(NLL + UP), ("kd", 40, 0): made(NLL)}
    both = Measured(runs | {("kd", 40, 1): made(NLL + UP)})
    assert both.means()["ncl", 40]["learned"] == pytest.approx((0.75 + 0.25) / 2)
    assert Measured(runs).means()["ncl", 40]["learned"] == pytest.approx(0.75)
    one = {("ncl", 40, 0): made(NLL)}
    assert bounds({("ncl", 40, 0): made(NLL, shift=0.1)})["ncl"]["learned"] == pytest.approx((0.45, 0.85))
    assert bounds(one | {("ncl", 40, 1): made(NLL + UP)})["ncl"]["learned"] == pytest.approx((0.25, 0.75))
    runs = {("ncl", 40, seed): made(NLL + seed * UP, shift=0.1) for seed in (0, 1)}
    runs |= {("kd", 40, seed): made(NLL + (seed + 0.2) * UP, shift=0.1) for seed in (0, 1)}
    found = bounds(runs)
    assert np.ptp(found["kd"]["learned"]) > 0.4 and found["ncl"]["worth"] == (0, 0)
    assert found["kd"]["worth"] == pytest.approx((-0.1, -0.1))  # 0.2 nats less of one of two domains
    found = bounds(one | {("ncl", 10, 0): made(NLL + UP)}, at=160)["ncl"]
    assert found["learned_at"] == pytest.approx((1.25, 1.25))  # 0.25, 0.75, and as much again


POINTS = {"strong": Point(1.0, 0.5), "mild": Point(0.8, 0.1), "weak": Point(0.5, 0.2)}
HIGHEST = {"strong": 0.7, "mild": 0.35, "weak": 0.25}
CHOSEN = {  # strong is worth 1 - 0.5 w, mild 0.8 - 0.1 w
    Wish(None, 0.49): "strong",
    Wish(None, 0.51): "mild",
    Wish(0.3, 1.0): "weak",  # mild learns more, but may forget 0.35
    Wish(0.15, 1.0): "mild",  # by its mean: no arm by the whole of its interval
    Wish(0.05, 1.0): "mild",  # no arm is within the bound; this one forgets least
}


def test_a_weight_says_what_forgetting_costs_and_a_bound_is_kept_by_the_interval():
    assert {wish: advice.choose(POINTS, HIGHEST, wish)[0] for wish in CHOSEN} == CHOSEN


@pytest.mark.parametrize(("epoch", "arm", "at"), [(41.0, "kd", ""), (160.0, "ncl", 160), (1e6, "ncl", 600)])
def test_an_arm_is_recommended_by_what_an_epoch_brings(epoch, arm, at):
    runs = {("ncl", 40, 0): made(NLL), ("ncl", 10, 0): made(NLL + UP)}
    runs |= {("kd", 40, 0): made(NLL - 0.2 * UP), ("kd", 10, 0): made(NLL)}  # ahead, and slower
    plan = SweepPlan(("ncl", "kd"), 40, 1, True, 60.0)
    texts, setting = ("domains=texts", "domains.root=texts"), Setting(1e-4, 24, 3)
    model = Model(("model=tiny_gpt2",), ("model=tiny_gpt2",))
    subject = advice.Subject(texts, (), model, setting, epoch, 512, 0)
    found = advice.make_advice(Measured(runs), subject, plan, Wish(None, 1.0), lost=[])
    recommended = found["recommended"]
    assert recommended["arm"] == arm and (f"to {at} steps a domain" in recommended["why"]) == bool(at)
    worth = {each["arm"]: each["intervals"]["worth"] for each in found["arms"]}
    assert worth.pop(arm) == [0, 0] and all(high < 0 for _, high in worth.values())


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

    def ask(*arguments, most=99):
        def run_all(jobs, *, command, places, grace):
            assert command == (sys.executable, "-m", "cpt") and len(places) <= len(jobs)
            for job in jobs:
                if len(begun) == most:
                    raise SystemExit(GO_ON)
                begun.append(job.folder.name)
                cfg = OmegaConf.create({key: job.config[key] for key in job.config if key != "hydra"})
                job.folder.mkdir(parents=True, exist_ok=True)
                job.console.write_text("")
                start(cfg, job.folder)
                job.code = 0

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
    rest = here("--weight", "0", "--hours", "1e-6")  # both lengths of the first seed, whatever they take
    # The pilot is ncl's run of two steps, and what was finished before the signal is not run again.
    assert rest == ["freeze_steps-4_seed-0", "replay-25_steps-2_seed-0", "freeze_steps-2_seed-0"]
    told, found = capsys.readouterr().out, json.loads((out / "advice.json").read_text())
    assert told.splitlines()[-1] == found["recommended"]["command"]
    words = shlex.split(found["recommended"]["command"])  # of a run over an epoch of the same texts
    assert words[:2] == ["python", "run.py"] and f"domains.root={corpora}" in words
    with initialize_config_dir(str(CONF), version_base="1.3"):
        ordered = make_plan(compose("config", overrides=words[2:]))
    assert ordered.order == ["food", "law", "space"] and ordered.budget.epochs == 1
    arms = {arm["arm"]: arm for arm in found["arms"]}
    assert set(arms) == {"ncl", "replay-25", "freeze"}
    assert found["recommended"]["arm"] == max(arms, key=lambda name: arms[name]["learned"])
    assert (out / "advice-plane.png").exists()
    assert here("--weight", "0") == []  # nothing is learned again
    assert json.loads((out / "advice.json").read_text()) == found


def test_of_many_domains_some_are_chosen_whatever_they_are_called(tmp_path, monkeypatch):
    for name in (names := ["2019", "2020", "null", "it's law", "a,b", "[x]", "résumé & co", "last"]):
        (tmp_path / "texts" / name).mkdir(parents=True)
    monkeypatch.setattr(advise, "settle", lambda given, sweep, *_: sys.exit(repr(sweep.plan().order)))
    with pytest.raises(SystemExit) as ended:
        order = f"order={json.dumps(names, ensure_ascii=False)}"
        advise.main([str(tmp_path / "texts"), "--out", str(tmp_path / "out"), order])
    assert ended.value.code == repr([names[8 * place // 6] for place in range(6)])
