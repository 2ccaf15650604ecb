"""Precision and attention where the config leaves them open."""

import json
import logging

import pytest
import torch
from transformers import AutoConfig

from cpt.models import memory
from cpt.trainer import loop
from cpt.trainer.plan import make_plan
from cpt.trainer.preflight import resolve_auto
from cpt.trainer.run_dir import RunDir
from tests.methods.test_contract import bits
from tests.support.killing import KilledError, Killer

CPU = torch.device("cpu")


def settled(cfg, folder, device=CPU):
    plan, scores = make_plan(cfg), RunDir(folder).scores()
    stored = scores.numerics["precision"] if scores else None
    config = AutoConfig.for_model(**plan.model.config)
    return resolve_auto(plan.trainer, config, device, length=plan.model.length, stored=stored)


@pytest.mark.parametrize(
    ("device", "bf16", "chosen"),
    [("cuda", True, "bf16-mixed"), ("cuda", False, "32-true"), ("cpu", True, "32-true")],
)
def test_precision_auto_is_by_capability(device, bf16, chosen, small, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda: bf16)
    with caplog.at_level(logging.INFO, logger="cpt"):
        assert settled(small("trainer.precision=auto"), tmp_path, torch.device(device)).precision == chosen
    assert f"trainer.precision=auto: {chosen}" in caplog.text


def test_a_resumed_run_keeps_its_precision(small, start, tmp_path):
    start(small("trainer.precision=bf16-mixed", "order=[law]"), tmp_path)
    assert settled(small("trainer.precision=auto"), tmp_path).precision == "bf16-mixed"
    assert settled(small("trainer.precision=bf16-true"), tmp_path).precision == "bf16-true"


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


DROPS = ("model=tiny_roberta", "model.config.hidden_dropout_prob=0.1")
QUICK, IN_ATTENTION = "trainer.quick_dropout=true", "model.config.attention_probs_dropout_prob=0.1"


def test_a_run_learns_with_quick_dropout_and_makes_its_base_without(small, start, tmp_path, monkeypatch):
    drawn = []
    quick = memory.quick_dropout

    def noting(given, p, *rest, **how):
        drawn.append(p)
        return quick(given, p, *rest, **how)

    monkeypatch.setattr(memory, "quick_dropout", noting)
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
