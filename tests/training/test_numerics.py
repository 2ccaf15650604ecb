"""Precision and attention where the config leaves them open."""

import json
import logging

import pytest
import torch

from cpt.models import quick_dropout
from cpt.training import loop, numerics
from cpt.training.numerics import make_block, settle_numerics
from cpt.training.plan import make_plan
from cpt.training.readiness import prepare
from cpt.training.run_folder import RunFolder
from tests.methods.test_contract import bits
from tests.support.killing import KilledError, Killer

CPU = torch.device("cpu")


@pytest.fixture
def at_speed(monkeypatch):
    """A machine on which bf16-mixed is so many times as fast as 32-true."""

    def machine(times):
        seconds = iter([5.0, 5.0, *[times, 1.0] * 50])  # the first of each is not counted
        monkeypatch.setattr(numerics, "clock", lambda work, device: next(seconds))
        monkeypatch.setattr(numerics, "SECONDS", 0.0)

    return machine


def settled(cfg, folder, **how):
    return settle_numerics(make_plan(cfg), RunFolder(folder), CPU, **how).trainer


@pytest.mark.parametrize(
    ("times", "chosen"), [(2.0, "bf16-mixed"), (1.1, "bf16-mixed"), (1.05, "32-true"), (0.5, "32-true")]
)
def test_the_faster_precision_is_chosen_told_and_remembered(times, chosen, small, at_speed, tmp_path, caplog):
    at_speed(times)
    with caplog.at_level(logging.INFO, logger="cpt"):
        assert settled(small("trainer.precision=auto"), tmp_path).precision == chosen
    assert f"trainer.precision=auto: {chosen}; a step of one block" in caplog.text
    assert f"{times:.2f} times as fast" in caplog.text
    assert (tmp_path / "precision").read_text() == chosen


def test_a_run_goes_on_in_the_precision_that_it_began_with(small, at_speed, tmp_path):
    (tmp_path / "precision").write_text("32-true")
    at_speed(9.0)
    assert settled(small("trainer.precision=auto"), tmp_path).precision == "32-true"


def test_a_precision_by_name_is_neither_measured_nor_remembered(small, tmp_path):
    (tmp_path / "precision").write_text("32-true")
    assert settled(small("trainer.precision=bf16-true"), tmp_path).precision == "bf16-true"
    assert (tmp_path / "precision").read_text() == "32-true"


def test_a_forecast_remembers_nothing(small, at_speed, tmp_path):
    at_speed(2.0)
    assert settled(small("trainer.precision=auto"), tmp_path, remember=False).precision == "bf16-mixed"
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("found", ["", "64-true", "bf16-mixed\n"])
def test_a_damaged_choice_is_told(found, small, tmp_path):
    (tmp_path / "precision").write_text(found)
    with pytest.raises(ValueError, match=r"precision is damaged; write .* 32-true or bf16-mixed"):
        settled(small("trainer.precision=auto"), tmp_path)


def test_other_processes_take_what_the_first_one_has_chosen(small, tmp_path, monkeypatch):
    monkeypatch.setattr(numerics, "is_first_process", lambda: False)
    monkeypatch.setattr(
        numerics.time, "sleep", lambda seconds: (tmp_path / "precision").write_text("bf16-mixed")
    )
    assert settled(small("trainer.precision=auto"), tmp_path).precision == "bf16-mixed"


def test_other_processes_do_not_wait_for_ever(small, tmp_path, monkeypatch):
    monkeypatch.setattr(numerics, "is_first_process", lambda: False)
    monkeypatch.setattr(numerics, "WAIT", 0)
    with pytest.raises(ValueError, match="was not written by the first process"):
        settled(small("trainer.precision=auto"), tmp_path)


@pytest.mark.parametrize("model", ["small", "small_gpt2", "small_t5"])
def test_what_is_measured_is_a_block_of_this_model(model, request):
    plan = make_plan(
        request.getfixturevalue(model)(
            "model.length=24", "trainer.batch_size=6", "trainer.accumulate_grad_batches=3"
        )
    )
    before = torch.random.get_rng_state()
    block = make_block(plan, CPU)
    assert torch.equal(torch.random.get_rng_state(), before)
    whole = plan.model.config
    assert block.config.hidden_size == whole.get("hidden_size", whole.get("n_embd", whole.get("d_model")))
    assert block.config.num_hidden_layers == 1
    step, tokens = numerics.make_step(plan, CPU)
    assert tokens == 2 * 24
    for precision in numerics.CHOICES:
        step(precision)


@pytest.mark.parametrize(
    ("given", "found"),
    [
        ((), "auto"),
        (("trainer.precision=bf16-mixed",), "eager"),
        (("trainer.precision=bf16-true",), "eager"),
        (("trainer.precision=bf16-mixed", "trainer.attention=sdpa"), "sdpa"),
        (("trainer.attention=eager",), "eager"),
        (("trainer.precision=bf16-mixed", "model.length=512"), "eager"),
        (("trainer.precision=bf16-mixed", "model.length=513"), "auto"),
    ],
)
def test_attention_is_eager_on_a_processor_in_16_bits_of_short_rows(given, found, small, tmp_path, caplog):
    with caplog.at_level(logging.INFO, logger="cpt"):
        assert settled(small(*given), tmp_path).attention == found
    chosen = found == "eager" and not any("attention" in each for each in given)
    assert ("trainer.attention=auto: eager" in caplog.text) == chosen


def test_on_a_gpu_attention_is_as_transformers_has_it(small, tmp_path):
    plan = make_plan(small("trainer.precision=bf16-mixed"))
    assert settle_numerics(plan, RunFolder(tmp_path), torch.device("cuda")).trainer.attention == "auto"


def test_the_model_computes_attention_as_said(small, start, tmp_path, monkeypatch):
    cfg = small("trainer.precision=bf16-mixed", "order=[law]")
    start(small("order=[law]", "name=base"), tmp_path / "base")  # which makes the base, as ever

    def unwanted(*args, **kwargs):
        raise AssertionError("torch's own attention")

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", unwanted)
    start(cfg, tmp_path / "run")
    told = json.loads((tmp_path / "run" / "scores.json").read_text())["numerics"]
    assert told == {"precision": "bf16-mixed", "attention": "eager"}
    assert "in bf16-mixed, attention by eager" in (tmp_path / "run" / "report.md").read_text()


def test_an_attention_that_there_is_not_is_told_before_any_text_is_read(small, tmp_path):
    with pytest.raises(ValueError, match="trainer.attention=lightning: .*lightning"):
        prepare(make_plan(small("trainer.attention=lightning")), RunFolder(tmp_path))


ORDERED, COARSE = "trainer.deterministic=true", "trainer.precision=bf16-mixed"


@pytest.mark.parametrize(
    ("device", "given", "lines"),
    [
        ("cuda", [], ["in no fixed order", "2.5 to 3 times as fast"]),
        ("cuda", [ORDERED], ["2.5 to 3 times as fast"]),
        ("cuda", [COARSE], ["in no fixed order"]),
        ("cuda", [ORDERED, COARSE], []),
        ("cpu", [], []),
    ],
)
def test_what_the_defaults_cost_on_a_gpu_is_told(device, given, lines, small, tmp_path, caplog):
    with caplog.at_level(logging.INFO, logger="cpt"):
        settle_numerics(make_plan(small(*given)), RunFolder(tmp_path), torch.device(device))
    assert len(caplog.messages) == len(lines)
    assert all(line in told for line, told in zip(lines, caplog.messages, strict=True))


DROPS = ("model=tiny_roberta", "model.config.hidden_dropout_prob=0.1")
QUICK, IN_ATTENTION = "trainer.quick_dropout=true", "model.config.attention_probs_dropout_prob=0.1"
SDPA = "trainer.attention=sdpa"


@pytest.mark.parametrize(
    ("device", "given", "line"),
    [
        ("cpu", DROPS, "torch draws dropout (hidden_dropout_prob=0.1) slowly on a processor; trainer"),
        ("cpu", (*DROPS, "trainer.compile=true"), None),
        ("cpu", (*DROPS, QUICK), None),
        ("cpu", (QUICK,), "trainer.quick_dropout=true has no effect: the model has no dropout"),
        ("cuda", (*DROPS, QUICK, ORDERED, COARSE), "has no effect: a GPU draws dropout quickly anyway"),
        ("cpu", (*DROPS, QUICK, IN_ATTENTION, SDPA), "trainer.attention=sdpa draws its dropout itself"),
        ("cpu", (*DROPS, QUICK, SDPA), None),
        ("cuda", (*DROPS, QUICK, IN_ATTENTION, SDPA, ORDERED, COARSE), "a GPU draws dropout quickly anyway"),
        ("cpu", (*DROPS, QUICK, IN_ATTENTION), "trainer.attention=auto: eager, which on a processor draws"),
    ],
)
def test_what_can_be_drawn_quickly_is_told(device, given, line, small, tmp_path, caplog):
    with caplog.at_level(logging.INFO, logger="cpt"):
        plan = settle_numerics(make_plan(small(*given)), RunFolder(tmp_path), torch.device(device))
    assert len(caplog.messages) == (line is not None)
    assert line is None or line in caplog.text
    own = "eager" if IN_ATTENTION in given else "auto"
    assert plan.trainer.attention == ("sdpa" if SDPA in given else own)


def test_a_run_learns_with_quick_dropout_and_makes_its_base_without(small, start, tmp_path, monkeypatch):
    drawn = []
    quick = quick_dropout.quick_dropout

    def noting(given, p, *rest, **how):
        drawn.append(p)
        return quick(given, p, *rest, **how)

    monkeypatch.setattr(quick_dropout, "quick_dropout", noting)
    given = (*DROPS, IN_ATTENTION, "order=[law]", "trainer.steps=3")
    start(small(*given, "name=plain"), tmp_path / "plain")
    assert not drawn
    start(small(*given, QUICK, f"cache_dir={tmp_path}"), tmp_path / "quick")
    layers = make_plan(small(*given)).model.config["num_hidden_layers"]
    assert len(drawn) == 3 * (1 + 3 * layers) and set(drawn) == {0.1}  # of the domain's steps, not the base's


def test_a_killed_run_ends_with_the_same_bits_under_quick_dropout(small, start, tmp_path, monkeypatch):
    cfg = small(*DROPS, IN_ATTENTION, QUICK, "order=[law]", "trainer.steps=4", "trainer.checkpoint_every=2")
    start(cfg, tmp_path / "whole")
    trainer = loop.make_trainer

    def deadly(options, *, callbacks=(), **others):
        return trainer(options, callbacks=[*callbacks, Killer(step=3)], **others)

    with monkeypatch.context() as patched:
        patched.setattr(loop, "make_trainer", deadly)
        with pytest.raises(KilledError):
            start(cfg, tmp_path / "killed")
    start(cfg, tmp_path / "killed")
    assert bits(tmp_path / "killed") == bits(tmp_path / "whole")
