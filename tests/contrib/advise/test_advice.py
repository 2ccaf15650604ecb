"""What advice is made of, by hand: what is tried in the time that there is, what runs learned and forgot, how
sure that is, which arm is best, and what is said of it."""

import math
import shlex
from types import SimpleNamespace

import numpy as np
import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from transformers import AutoConfig

from cpt.contrib.advise.advice import Subject, find_unknown, make_advice, make_blocks, say_command
from cpt.contrib.advise.candidates import (
    NAMES,
    Model,
    Setting,
    check_overrides,
    choose_arms,
    choose_domains,
    find_model,
    find_texts,
    make_sibling,
    overrides,
    quote,
)
from cpt.contrib.advise.results import (
    ArmRun,
    Measured,
    Point,
    Recommendation,
    Wish,
    choose,
    find_front,
    trade,
    weigh_lengths,
)
from cpt.contrib.advise.runs import Costs, Round, SweepPlan, plan_sweep

TINY = Model(("model=tiny_gpt2",), ("model=tiny_gpt2",))
LARGE = Model(("model=tiny_gpt2",), ("model=checkpoint", "model.checkpoint=big"), 24, "big is big")


# --- texts and models


def test_folders_of_text_are_domains_or_those_of_their_corpora(tmp_path):
    assert find_texts(tmp_path, []) == ["domains=texts", f"domains.root={tmp_path}"]
    assert find_texts(tmp_path, ["domains=m2d2"]) == [f"domains.root={tmp_path}"]
    (tmp_path / "corpora").mkdir()
    assert find_texts(tmp_path, [])[2:] == ["domains.folder=corpora"]
    names = [f"d{number}" for number in range(14)]
    assert choose_domains(names) == ["d0", "d2", "d4", "d7", "d9", "d11"]  # of many some are tried
    assert choose_domains(names[:6]) == names[:6] and choose_domains(["d1"]) == ["d1"]


@pytest.mark.parametrize("value", ["plain/a-b_c.d", "with space", "a,b", "it's", "key=value", "[x]", "{y}"])
def test_any_name_reaches_hydra_as_it_is(value):
    (parsed,) = OverridesParser.create().parse_overrides([f"domains.root={quote(value)}"])
    assert parsed.value() == value or str(parsed.value()) == value


@pytest.mark.parametrize("given", ["trainer.steps=9", "hydra.launcher.jobs=2", "+method=kd"])
def test_what_advise_sets_is_not_set_twice(given):
    name = given.lstrip("+").partition("=")[0]
    with pytest.raises(ValueError, match=f"advise sets {name} itself"):
        check_overrides(["trainer.batch_size=4", given])


def test_a_small_model_is_tried_itself_and_a_large_one_by_a_sibling_of_its_family(tmp_path):
    def saved(name, **sizes):
        config = AutoConfig.for_model("gpt2", **sizes)
        config.architectures = ["GPT2LMHeadModel"]
        config.save_pretrained(tmp_path / name)
        return find_model(str(tmp_path / name))

    assert find_model("tiny").tried == ("model=tiny_modernbert",) and find_model("tiny_gpt2").is_itself
    small, large = saved("small", n_embd=64, n_layer=2, n_head=2), saved("large", n_embd=768, n_layer=7)
    assert small.is_itself and small.real == ("model=checkpoint", f"model.checkpoint={tmp_path}/small")
    assert large.tried == ("model=tiny_gpt2",) and large.real[1].endswith("/large")
    assert large.blocks == 7 and "89 M parameters" in large.gap
    model, without, config = make_sibling(AutoConfig.for_model("llama", num_key_value_heads=8), "causal")
    assert (model, without) == ("model=tiny_gpt2", "~model.config")
    (parsed,) = OverridesParser.create().parse_overrides([config])
    made = [parsed.value()[name] for name in ("model_type", "hidden_size", "num_key_value_heads")]
    assert made == ["llama", 128, 2]
    assert make_sibling(AutoConfig.for_model("t5"), "span") == ["model=tiny_t5"]
    bert = make_sibling(AutoConfig.for_model("bert"), "masked")
    assert bert[0] == "model=tiny_roberta" and "num_key_value_heads" not in bert[2]


def test_every_arm_says_what_it_sets_and_is_chosen_by_name_beside_the_reference():
    setting = Setting(rate=1e-3, blocks=12, domains=3)
    made = {arm: overrides(arm, setting) for arm in NAMES}
    assert made["ncl"] == [] and made["freeze"] == ["freeze.layers=6"]
    assert made["lr-1/4"] == ["model.lr=0.00025"] and made["lr-1/2"] == ["model.lr=0.0005"]
    assert made["replay-5"] == ["replay=past", "replay.past=0.025", "replay.general=0.025"]
    assert made["ewc-strong"] == ["method=ewc", "method.strength=500000"]  # whatever the method's default
    assert len(set(map(tuple, made.values()))) == len(NAMES)
    alone = overrides("replay-25", Setting(rate=1e-3, blocks=2, domains=1))
    assert alone == ["replay=past", "replay.past=0", "replay.general=0.25"]
    assert choose_arms(None) == list(NAMES) and choose_arms("kd,lora,kd") == ["ncl", "kd", "lora"]
    with pytest.raises(ValueError, match="--arms ncl; allowed: one or more beside ncl"):
        choose_arms("ncl")


# --- what fits into the time: 10 s a run, 0.1 s a step, two stages

FIVE = ["ncl", "replay-5", "lr-1/4", "replay-25", "lora"]


def fitted(seconds, *, arms=("ncl", "lora"), jobs=1, most=500, **given):
    costs = Costs(step=0.1, fixed=10, stages=2)
    return plan_sweep(arms, costs, seconds=seconds, jobs=jobs, most=most, **given)


def planned(seconds, **given):
    plan = fitted(seconds, **given)
    return plan.seeds, plan.short, plan.steps


@pytest.mark.parametrize(
    ("seconds", "plan"),
    [
        (1000, (3, True, 500)),  # more steps than an epoch has are of no use
        (600, (2, True, 500)),  # 6 starts, then 540 s / (2 x 0.1 x 2 x 2.25)
        (200, (1, True, 320)),  # 4 starts, then 160 s / (2 x 0.1 x 2 x 1.25)
        (45, (1, False, 62)),  # with a shorter length 10 steps, below 20
    ],
)
def test_more_time_is_for_more_steps_up_to_an_epoch_then_for_more_seeds(seconds, plan):
    assert planned(seconds) == plan == planned(seconds / 2, jobs=2)


def test_the_time_of_the_whole_is_the_sum_of_its_runs_and_arms_are_left_out_from_the_end():
    plan = fitted(1000)
    assert plan.seconds == pytest.approx(3 * 220 + 70)
    assert plan.rounds == [Round(0, 500), Round(0, 125), Round(1, 500), Round(2, 500)]
    teacher = fitted(1000, arms=["ncl", "kd"]).seconds  # and its passes
    assert teacher == pytest.approx(plan.seconds + 0.4 * 0.2 * (1500 + 125))
    assert planned(1000, most=900) == (3, True, 707) and planned(1000, most=900, seeds=2) == (2, True, 900)
    assert (len(fitted(60, arms=FIVE).arms), fitted(60, arms=FIVE).steps) == (5, 10)
    assert (fitted(50, arms=FIVE).arms, fitted(50, arms=FIVE).steps) == (tuple(FIVE[:4]), 12)
    with pytest.raises(ValueError, match=r"30 s are left of --hours, and 3 runs of 10 steps take 36 s"):
        fitted(30, arms=FIVE)


# --- what runs learned and forgot

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


def test_means_are_over_earlier_domains_and_the_general_text_and_the_seeds_that_all_arms_have():
    found = trade(NLL, made(NLL).scores)
    assert [found[name] for name in ("learned", "FG", "drift", "forgotten")] == pytest.approx(
        [0.75, 0.4, 0.3, 0.35]
    )
    runs = {("ncl", 40, 0): made(NLL), ("ncl", 40, 1): made(NLL + UP), ("kd", 40, 0): made(NLL)}
    both = Measured(runs | {("kd", 40, 1): made(NLL + UP)})
    assert both.means()["ncl", 40]["learned"] == pytest.approx((0.75 + 0.25) / 2)
    alone = Measured(runs)
    assert alone.seeds == {40: [0]} and alone.means()["ncl", 40]["learned"] == pytest.approx(0.75)


def test_documents_and_seeds_are_redrawn_and_differences_between_arms_are_paired():
    assert bounds({("ncl", 40, 0): made(NLL, shift=0.1)})["ncl"]["learned"] == pytest.approx((0.45, 0.85))
    assert bounds({("ncl", 40, 0): made(NLL)})["ncl"]["learned"] == pytest.approx((0.75, 0.75))
    runs = {("ncl", 40, 0): made(NLL), ("ncl", 40, 1): made(NLL + UP)}
    assert bounds(runs)["ncl"]["learned"] == pytest.approx((0.25, 0.75))
    runs = {("ncl", 40, seed): made(NLL + seed * UP, shift=0.1) for seed in (0, 1)}
    runs |= {("kd", 40, seed): made(NLL + (seed + 0.2) * UP, shift=0.1) for seed in (0, 1)}
    found = bounds(runs)
    assert np.ptp(found["kd"]["learned"]) > 0.4
    assert found["kd"]["worth"] == pytest.approx((-0.1, -0.1))  # 0.2 nats less of one of two domains
    assert found["ncl"]["worth"] == (0, 0)


def test_more_tokens_are_told_from_two_lengths_alone_by_the_logarithm():
    runs = {("ncl", 40, 0): made(NLL)}
    assert "learned_at" not in bounds(runs, at=160)["ncl"]
    found = bounds(runs | {("ncl", 10, 0): made(NLL + UP)}, at=160)["ncl"]
    assert found["learned_at"] == pytest.approx((1.25, 1.25))  # 0.25, 0.75, and as much again
    assert found["learned"] == pytest.approx((0.75, 0.75))
    assert found["forgotten_at"] == pytest.approx((0.35, 0.35))
    # From 100 to 400 as much is added as from 400 to 1600: 2 b - a.
    assert weigh_lengths([100, 400], 1600) == pytest.approx([-1, 2])
    assert weigh_lengths([10, 100, 1000], 100) == pytest.approx([1 / 3] * 3)


# --- which arm

POINTS = {
    "strong": Point(1.0, 0.5),
    "mild": Point(0.8, 0.1),
    "weak": Point(0.5, 0.2),
    "same": Point(1.0, 0.6),
}
HIGHEST = {"strong": 0.7, "mild": 0.35, "weak": 0.25, "same": 0.8}


@pytest.mark.parametrize(("weight", "arm"), [(1.0, "mild"), (0.1, "strong"), (0.5, "strong"), (0.51, "mild")])
def test_a_weight_says_what_forgetting_costs(weight, arm):
    # strong: 1 - 0.5 w, mild: 0.8 - 0.1 w; they are equal at 0.5, where the first is taken
    choice = choose(POINTS, HIGHEST, Wish(None, weight))
    assert choice.arm == arm and f"- {weight:g} x forgotten" in choice.why
    assert find_front(POINTS | {"none": Point(0.0, 0.0)}) == ["strong", "mild", "none"]
    assert find_front({"one": Point(1.0, 0.5), "twin": Point(1.0, 0.5)}) == ["one"]


@pytest.mark.parametrize(
    ("bound", "arm", "why"),
    [
        (0.3, "weak", "by the whole of its interval"),  # mild learns more, but may forget 0.35
        (0.35, "mild", "by the whole of its interval"),
        (0.15, "mild", "by its mean, not by its interval"),
        (0.05, "mild", "no arm forgets at most 0.05 nats; this one forgets least"),
    ],
)
def test_a_bound_is_kept_by_the_interval_where_one_can(bound, arm, why):
    choice = choose(POINTS, HIGHEST, Wish(bound, 1.0))
    assert choice.arm == arm and why in choice.why
    unknown = choose({"one": Point(1.0, 0.1)}, {"one": math.nan}, Wish(0.2, 1.0))
    assert unknown.arm == "one" and "by its mean" in unknown.why


def subject(model=TINY, *, epoch=400.0, left_out=0, given=(), setting=Setting(1e-4, 24, 3)):  # noqa: B008
    return Subject(("domains=texts", "domains.root='my texts'"), given, model, setting, epoch, 512, left_out)


@pytest.mark.parametrize(
    ("epoch", "arm", "why"),
    [(41.0, "kd", "forgotten"), (160.0, "ncl", "to 160 steps a dom"), (1e6, "ncl", "to 600 steps a dom")],
)
@pytest.mark.parametrize("wish", [Wish(None, 1.0), Wish(0.4, 1.0)])
def test_an_arm_is_recommended_by_what_an_epoch_brings(wish, epoch, arm, why):
    runs = {("ncl", 40, 0): made(NLL), ("ncl", 10, 0): made(NLL + UP)}
    runs |= {("kd", 40, 0): made(NLL - 0.2 * UP), ("kd", 10, 0): made(NLL)}  # ahead, and slower
    plan = SweepPlan(("ncl", "kd"), 40, 1, True, 60.0)
    advice = make_advice(Measured(runs), subject(epoch=epoch), plan, wish, lost=[])
    assert advice["recommended"]["arm"] == arm and (why in advice["recommended"]["why"] or wish.bound)
    worth = {each["arm"]: each["intervals"]["worth"] for each in advice["arms"]}
    assert worth.pop(arm) == [0, 0] and all(high < 0 for _, high in worth.values())
    assert [each["arm"] for each in advice["arms"]] == ["kd", "ncl"]  # as measured
    first, command, table, last = make_blocks(advice)
    assert first.title == f"Recommended: {arm}" and first.picture and command.code.startswith("python run.py")
    assert "40 steps" in first.lines[1] and [row[0] for row in table.cells] == ["kd", "ncl"] and last.lines


# --- what is said of it


def test_the_command_is_of_the_model_that_is_meant_and_one_line_for_a_shell():
    given = ("model.length=32", "trainer.batch_size=4")
    small = say_command(Recommendation("lr-1/4", ""), subject(given=given))
    assert "\n" not in small and shlex.split(small) == [
        *("python", "run.py", "domains=texts", "domains.root='my texts'", "model=tiny_gpt2"),
        *("model.lr=2.5e-05", *given, "trainer.steps=null", "trainer.epochs=1"),
    ]
    large = say_command(Recommendation("freeze", ""), subject(LARGE, given=given))
    assert "model.checkpoint=big freeze.layers=12 trainer.batch_size=4 trainer.steps=null" in large


def unknown(about, *, worth=(-0.2, -0.1), seeds=1, many=False):
    found, plan = (
        {"kd": {"worth": (0, 0)}, "ncl": {"worth": worth}},
        SweepPlan(("ncl", "kd"), 100, 1, False, 60.0),
    )
    return find_unknown(found, Recommendation("kd", ""), about, plan, seeds=seeds, many=many)


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        (unknown(subject(LARGE)), "big is big"),
        (unknown(subject(), worth=(-0.2, 0.1)), "not told apart from kd by these runs: ncl"),
        (unknown(subject(), worth=(math.nan,) * 2), "not told apart from kd by these runs: ncl"),
        (unknown(subject()), "one seed was run, intervals are over documents alone"),
        (unknown(subject(), seeds=3), "how much seeds differ is known from 3 of them"),
        (unknown(subject()), "4.0 times what was learned here; one length was run, so nothing is said of it"),
        (unknown(subject(), many=True), "over the logarithm of the tokens, extrapolated"),
        (unknown(subject(left_out=8)), "8 more domains, which were not tried"),
    ],
)
def test_what_the_runs_cannot_say_is_said_and_nothing_else(lines, said):
    assert sum(said in line for line in lines) == 1, lines
    plain = unknown(subject(epoch=101.0), seeds=5, many=True)
    assert plain == ["settings between the arms, other orders of the domains, end tasks"]
