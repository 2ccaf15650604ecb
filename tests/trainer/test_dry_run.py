"""What plan=true and plan=json say a run will cost, compared with the run; runs of equal compute."""

import json
import logging
import math
import re
import signal

import pytest
from omegaconf import OmegaConf

from cpt.core.preemption import Preempted
from cpt.models.units import find_block_matrices
from cpt.trainer import profiling
from tests.conftest import ROOT, SMALL, VOCABULARIES, sentences
from tests.runs.reading import assert_same_bits, read_scores, scores_of, start_and_kill, times
from tests.support.campaign import run_few
from tests.support.chat_decoder import write_checkpoint
from tests.support.method_fixtures import NEED_EXAMPLES, build_method_fixture

METHODS = sorted({path.stem for path in (ROOT / "conf" / "method").glob("*.yaml")} - NEED_EXAMPLES)
DOMAINS = ["law", "food", "space", "tax", "sea"]  # two more stages than are tried
FEW = ["trainer.steps=2", "eval.when=last", "eval.columns=seen", "eval.max_tokens=64"]
THREE = "order=[law,food,space]"
GROWING = {"elle", "lifelong_moe", "sapt"}  # what they add differs from stage to stage


@pytest.fixture
def five(tmp_path):
    words = list(VOCABULARIES.values())
    for seed, name in enumerate(["general", *DOMAINS]):
        (tmp_path / "five" / name).mkdir(parents=True)
        lines = sentences(words[seed % len(words)], count=60, seed=seed)
        (tmp_path / "five" / name / "all.txt").write_text("\n".join(lines) + "\n")
    return tmp_path / "five"


@pytest.fixture
def planned(start, capsys):
    def tell(cfg, folder) -> dict:
        capsys.readouterr()
        folder.mkdir(exist_ok=True)  # as Hydra does
        start(OmegaConf.merge(cfg, {"plan": "json"}), folder)
        return json.loads(capsys.readouterr().out)

    return tell


COMPOSED = [
    "optim.state_across_domains=moments lr_scheduler=wsd lr_scheduler.decay=0.5",
    "method=ewc mask=migu replay=past replay.buffer_size=8",
    "method=das method.contrast_every=3",
]
GIVEN = [*(f"method={name}" for name in METHODS), *COMPOSED]


@pytest.mark.parametrize("option", run_few(GIVEN, ["method=none", "method=joint", COMPOSED[1]]))
def test_bytes_steps_and_tokens_are_those_of_the_run(
    start, composed, five, cache, planned, tmp_path, option, monkeypatch
):
    monkeypatch.setattr("cpt.trainer.finalize.link_weights", lambda path, model: None)  # the disk at the most
    data_options = [
        "domains=texts",
        f"domains.root={five}",
        f"cache_dir={cache}",
        f"order=[{','.join(DOMAINS)}]",
    ]
    cfg = composed(*data_options, *SMALL, *FEW, *option.split(), "save_all_stages=true")
    estimate = planned(cfg, tmp_path / "said")
    start(cfg, tmp_path / "done")

    scores = scores_of(tmp_path / "done")
    assert [stage["stage"] for stage in estimate["stages"]] == scores.rows
    stored = [stage["stored"] for stage in estimate["stages"]]
    method = option.removeprefix("method=")
    assert stored[:4] == scores.stored[:4]  # of the stages that were profiled
    pairs = zip(stored, scores.stored, strict=True)
    assert all(low == size or method in GROWING and low < size for low, size in pairs)
    assert estimate["lower_bound"] == (method in ("elle", "lifelong_moe"))

    if len(scores.rows) == 1:
        return
    assert estimate["trained_parameters"] == max(scores.trained[:4]) and estimate["step_seconds"] > 0
    files = sum(path.stat().st_size for path in (tmp_path / "done" / "stages").glob("*.pt"))
    expected = estimate["disk"]["all stage files (save_all_stages=true)"]
    assert expected == pytest.approx(files, rel=0.03) or (estimate["lower_bound"] and expected < files)

    if option in COMPOSED:
        return
    assert estimate["memory"]["first"]["gradients"] == 4 * scores.trained[1]  # of parameters in 32 bits
    assert [stage["tokens"] for stage in estimate["stages"][1:]] == pytest.approx(
        scores.tokens_read[1:], rel=0.05
    )
    assert estimate["memory"]["last"]["peak"] == pytest.approx(max(scores.memory), rel=0.15)


@pytest.mark.parametrize(("num_steps", "num_measured"), [(1, 2), (3, 3), (20, 5)])
def test_no_more_steps_are_measured_than_the_run_has(
    num_steps, num_measured, planned, small, tmp_path, monkeypatch
):
    measured = []
    train_stage = profiling.train_stage

    def record(plan, *arguments):
        measured.append(plan.budget.steps)
        train_stage(plan, *arguments)

    monkeypatch.setattr(profiling, "train_stage", record)
    estimate = planned(small("order=[law,food]", f"trainer.steps={num_steps}"), tmp_path / "run")
    assert measured == [num_measured] * 2 and estimate["step_seconds"] > 0


def find_remaining(estimate: dict) -> dict[str, tuple[int, int]]:
    return {
        stage["stage"]: (stage["left_steps"], stage["left_scored_tokens"]) for stage in estimate["stages"]
    }


def test_nothing_is_left_behind_and_cells_are_counted_as_they_are_measured(start, small, planned, tmp_path):
    eval_options = ["eval.when=last", "eval.columns=near:1", "eval.max_tokens=64"]
    cfg = small(THREE, "trainer.steps=2", *eval_options, f"cache_dir={tmp_path / 'cache'}")
    estimate = planned(cfg, tmp_path / "run")
    assert estimate["state"] == "new" and estimate["not_included"] == ["training of the base model"]
    assert not (tmp_path / "run").exists() and not (tmp_path / "cache" / "base").exists()
    start(cfg, tmp_path / "run")
    scores = scores_of(tmp_path / "run")
    before = times(tmp_path)
    scored = dict(zip(scores.domains, scores.scored, strict=True))
    for number, stage in enumerate(estimate["stages"]):
        measured = scores.measured(number)
        assert stage["scored_texts"] == len(measured)
        assert stage["scored_tokens"] == sum(scored[text] for text in measured)
    plan_of_all = planned(cfg, tmp_path / "run")
    assert (plan_of_all["left"], plan_of_all["not_included"]) == ("nothing", [])
    plain = {name: time for name, time in times(tmp_path).items() if not name.endswith(".lock")}
    assert plain == {name: time for name, time in before.items() if not name.endswith(".lock")}


def test_a_plan_that_a_signal_ends_leaves_no_folder(small, start, tmp_path, monkeypatch):
    def leave(*args):
        raise Preempted(signal.SIGTERM)

    monkeypatch.setattr("cpt.trainer.dry_run.estimate", leave)
    (tmp_path / "run").mkdir()  # as Hydra does
    with pytest.raises(Preempted):
        start(small("plan=true", f"cache_dir={tmp_path / 'cache'}"), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_what_is_left_of_a_run_that_was_killed_or_is_to_have_more(start, small, planned, killing, tmp_path):
    cfg = small(THREE, "eval.columns=seen", "save_all_stages=true")
    start_and_kill(start, killing, cfg, tmp_path / "run", step=5, domain="food")
    before = times(tmp_path / "run")
    estimate = planned(cfg, tmp_path / "run")
    assert times(tmp_path / "run") == before and estimate["state"] == "unfinished, last measured: law"
    steps = {name: steps for name, (steps, _) in find_remaining(estimate).items()}
    assert steps == {"base": 0, "law": 0, "food": 2, "space": 6}  # a checkpoint after 4 of 6 steps
    assert find_remaining(estimate)["law"][1] == 0 < find_remaining(estimate)["food"][1]
    start(cfg, tmp_path / "run")
    wider = find_remaining(planned(small(THREE, "save_all_stages=true"), tmp_path / "run"))
    assert wider["law"][1] > wider["food"][1] > wider["base"][1] == wider["space"][1] == 0
    assert not any(steps for steps, _ in wider.values())


FEW_CELLS = ["order=[law,food]", "trainer.steps=20", "trainer.checkpoint_every_n_steps=5", "eval.when=last"]
FEW_CELLS += ["eval.max_tokens=64"]
COSTLY = ["das", "kd", "ewc trainer.importance_samples=64", "ncl replay=past replay.mode=append", "lora"]


@pytest.mark.parametrize("method", run_few(COSTLY, ["kd", "lora"]))
def test_a_matched_run_takes_the_operations_of_ncl(method, start, small, tmp_path, caplog):
    caplog.set_level(logging.INFO)
    start(small(*FEW_CELLS), tmp_path / "ncl")
    start(small(*FEW_CELLS, *f"method={method}".split(), "trainer.match=ncl"), tmp_path / "matched")
    steps = json.loads((tmp_path / "matched" / "matched.json").read_text())["steps"]
    assert f"operations of ncl: trainer.steps={steps}, " in caplog.text
    assert (steps > 20) == (method == "lora")  # the steps of ncl
    ncl, matched = (sum(read_scores(tmp_path / name)["flops"]) for name in ("ncl", "matched"))
    assert matched == pytest.approx(ncl, rel=0.5 / steps + 0.02)  # rounded to a whole step


def test_it_is_the_run_of_these_steps_also_if_it_was_killed(start, small, killing, tmp_path, caplog):
    caplog.set_level(logging.INFO)
    kd = [*FEW_CELLS, "method=kd"]
    start_and_kill(
        start, killing, small(*kd, "trainer.match=ncl"), tmp_path / "matched", step=7, domain="food"
    )
    steps = re.search(r"trainer.steps=(\d+)", "".join(caplog.messages))[1]
    caplog.clear()
    start(small(*kd, "trainer.match=ncl"), tmp_path / "matched")
    assert "Matching" not in caplog.text  # what it has stored
    start(small(*kd, f"trainer.steps={steps}"), tmp_path / "given")
    assert_same_bits(tmp_path / "matched", tmp_path / "given")
    with pytest.raises(ValueError, match="trainer.match"):
        start(small(*kd, f"trainer.steps={steps}", "trainer.match=ncl"), tmp_path / "given")
    (tmp_path / "matched" / "matched.json").write_text("{}")
    (tmp_path / "matched" / "scores.json").unlink()
    with pytest.raises(ValueError, match="matched.json is damaged; restore it"):
        start(small(*kd, "trainer.match=ncl"), tmp_path / "matched")


def test_epochs_are_scaled_and_importances_alone_may_be_too_much(start, small, tmp_path):
    epochs = ["trainer.steps=null", "trainer.epochs=2", "trainer.match=ncl", *FEW_CELLS[2:], "order=[law]"]
    start(small("method=kd", *epochs), tmp_path / "epochs")
    assert 1.3 < json.loads((tmp_path / "epochs/matched.json").read_text())["epochs"] < 1.8
    options = [
        "method=das",
        *FEW_CELLS,
        "trainer.steps=1",
        "trainer.match=ncl",
        "trainer.importance_samples=96",
    ]
    with pytest.raises(ValueError, match=r"trainer.match=ncl is invalid: .* Allowed: null, more trainer"):
        start(small(*options), tmp_path / "few")


STATES = {  # bytes of the state of a weight: of a matrix of a block, of another weight
    "optim=muon": (4, 8),
    "optim=muon trainer.precision=bf16-true": (4, 8),
    "optim=adamw trainer.precision=bf16-true": (8, 8),
    "optim=adamw trainer.precision=bf16-true optim.rounding=nearest": (4, 4),
    "optim=sgd optim.momentum=0.9": (4, 4),
    "optim=sgd": (0, 0),
}


@pytest.mark.parametrize("options", run_few(STATES, ["optim=muon trainer.precision=bf16-true"]))
def test_the_state_of_an_optimizer_is_counted(options, small_gpt2, planned, tmp_path):
    config = small_gpt2("order=[law]", "trainer.steps=2", *options.split())
    memory = planned(config, tmp_path / "run")["memory"]["first"]
    model = build_method_fixture(config).module.model
    num_weights = sum(weight.numel() for weight in model.parameters())
    num_in_matrices = sum(weight.numel() for weight in find_block_matrices(model))
    of_matrices, of_others = STATES[options]
    expected = of_matrices * num_in_matrices + of_others * (num_weights - num_in_matrices)
    assert memory["optimizer state"] == pytest.approx(expected, abs=1000)  # counts of steps
    assert memory["weights"] == pytest.approx((2 if "bf16" in options else 4) * num_weights, rel=0.05)


def test_factors_and_moments_in_8_bits_are_counted(small_gpt2, planned, tmp_path):
    config = small_gpt2("order=[law]", "trainer.steps=2", "optim=adafactor")
    memory = planned(config, tmp_path / "factors")["memory"]["first"]
    model = build_method_fixture(config).module.model
    expected = 0
    for weight in model.parameters():
        expected += 4 * (sum(weight.shape) if weight.ndim == 2 else weight.numel())
    assert memory["optimizer state"] == pytest.approx(expected, abs=1000)

    pytest.importorskip("bitsandbytes", reason="the extra: pip install -e '.[bitsandbytes]'")
    config = small_gpt2("order=[law]", "trainer.steps=2", "optim=adamw_8bit", "optim.min_8bit_size=1")
    memory = planned(config, tmp_path / "bits")["memory"]["first"]
    num_weights = sum(weight.numel() for weight in model.parameters())
    tables = 2 * 256 * 4  # of the values of 8 bits, one for all parameters
    scales = sum(8 * math.ceil(weight.numel() / 256) for weight in model.parameters())
    assert memory["optimizer state"] == 2 * num_weights + scales + tables


def test_chats_are_a_part_of_the_time_of_their_own(small_gpt2, planned, tmp_path):
    write_checkpoint(tmp_path / "decoder")
    options = ["order=[law]", f"model.name_or_path={tmp_path / 'decoder'}", "chats.max_new_tokens=4"]
    seconds = planned(small_gpt2(*options), tmp_path / "run")["seconds"]
    assert seconds.pop("chats") > 0 and not (tmp_path / "run" / "chats").exists()
    total = seconds.pop("total")
    assert "chats" not in planned(small_gpt2(*options[:2], "chats=none"), tmp_path / "without")["seconds"]
    assert total > sum(seconds.values())
