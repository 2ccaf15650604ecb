"""The log says which options of the command line change nothing."""

from types import SimpleNamespace

import pytest
import torch

from cpt.data.datamodule import Domain, DomainSequence
from cpt.methods.options import KDOptions
from cpt.trainer import log_settings
from tests.support.method_fixtures import ORDER, build_method_fixture

MONITOR = "monitor.past, monitor.max_tokens: monitor.every is null"
ANSWERS = "chats.max_new_tokens: chats.generate is 0"


@pytest.fixture
def set_keys(monkeypatch):
    """Sets the options that the command line has."""

    def set_on_command_line(*keys):
        config = SimpleNamespace(overrides=SimpleNamespace(task=[f"+{key}=1" for key in keys]))
        monkeypatch.setattr(log_settings.HydraConfig, "initialized", lambda: True)
        monkeypatch.setattr(log_settings.HydraConfig, "get", lambda: config)

    return set_on_command_line


def test_options_of_training_where_no_stage_is_trained(set_keys):
    set_keys("trainer.steps", "trainer.match", "optim.lr", "optimized_metric", "mask", "model", "replay")
    plan = SimpleNamespace(names={"method": "none"})
    expected = ["trainer.steps, trainer.match, optim.lr, mask: method=none trains nothing"]
    assert list(log_settings.find_untrained_options(plan, [])) == expected
    assert list(log_settings.find_untrained_options(plan, ["a stage"])) == []


@pytest.mark.parametrize(
    ("has_monitor", "chats", "lines"),
    [
        (False, SimpleNamespace(generate=0), [MONITOR, ANSWERS]),
        (True, SimpleNamespace(generate=16), []),
        (True, SimpleNamespace(generate=None), []),
        (True, None, []),
    ],
)
def test_options_of_evaluations_that_the_run_does_not_do(has_monitor, chats, lines, set_keys):
    set_keys("monitor.past", "monitor.every", "monitor.max_tokens", "chats.max_new_tokens", "trainer.steps")
    plan = SimpleNamespace(
        has_monitor=has_monitor, chats=chats, measures_chats=True, answers=None, resolved={}
    )
    assert list(log_settings.find_ineffective_evaluation(plan)) == lines


def test_options_of_chats_and_answers_that_a_run_does_not_have(set_keys):
    set_keys("chats.generate", "answers.when", "answers")
    resolved = {"chats": {"_target_": "C"}, "answers": {"_target_": "A"}}
    plan = SimpleNamespace(
        has_monitor=False, chats=None, measures_chats=False, answers=None, resolved=resolved
    )
    expected = ["chats.generate: no held-out chats are measured", "answers.when: the model answers no tasks"]
    assert list(log_settings.find_ineffective_evaluation(plan)) == expected


def test_options_that_are_added_to_a_choice_without_any(set_keys):
    set_keys("replay.sources", "replay", "loss.share", "trainer.steps", "seed")
    resolved = {
        "replay": {"name": "none", "_target_": None},
        "loss": {"_target_": "L"},
        "trainer": {"steps": 1},
    }
    plan = SimpleNamespace(resolved=resolved)
    assert list(log_settings.find_options_of_nothing(plan)) == ["replay.sources: replay=none"]


def test_the_base_of_a_run_that_starts_from_the_model_of_another(set_keys):
    set_keys("model", "model.name_or_path", "model.config.hidden_size", "model.max_seq_length")
    settings = {"init_from": "outputs/first/run", "model": {"pretraining": None}}
    model = SimpleNamespace(name_or_path="outputs/first/run/model", pretraining=None)
    plan = SimpleNamespace(settings=settings, model=model)
    expected = "model.name_or_path, model.config.hidden_size: init_from=outputs/first/run has the model"
    assert list(log_settings.find_ineffective_base(plan)) == [expected]
    settings["init_from"] = None
    assert list(log_settings.find_ineffective_base(plan)) == []


@pytest.mark.parametrize(
    ("rate", "method", "is_told"), [(0.0, "ncl", True), (1e-9, "ncl", False), (0.0, "none", False)]
)
def test_a_rate_of_zero_is_a_warning(rate, method, is_told, caplog):
    plan = SimpleNamespace(optim=SimpleNamespace(arguments={"lr": rate}), names={"method": method})
    log_settings.warn_of_no_rate(plan)
    assert ("optim.lr=0: no step changes a weight" in caplog.messages) == is_told


def test_tags_of_a_run_that_is_not_logged_to_wandb():
    for tags, wandb, lines in (
        (("a", "b"), False, ["tags=[a,b]: nothing is logged to W&B (logger=wandb)"]),
        (("a", "b"), True, []),
        ((), False, []),
    ):
        plan = SimpleNamespace(run=SimpleNamespace(tags=tags), logger=SimpleNamespace(wandb=wandb))
        assert list(log_settings.find_ineffective_logging(plan)) == lines


@pytest.mark.parametrize(
    ("options", "line"),
    [
        (["method=ncl"], "method=ncl with mask=none"),
        (["method=ncl", "mask=migu"], "method=ncl with mask=migu"),
        (["method=ncl", "mask=migu", "mask.migu.importance=fisher"], ""),
        (["method=ewc"], ""),
        (["method=ncl", "loss=flow"], ""),
    ],
)
def test_importance_samples_where_nothing_is_estimated_on_them(options, line, small, set_keys):
    run = build_method_fixture(small(ORDER, *options))
    set_keys("trainer.steps")
    assert list(log_settings.find_ineffective_importances(run.plan, run.module)) == []
    set_keys("trainer.importance_samples")
    expected = [f"trainer.importance_samples: {line} estimates nothing on samples"] if line else []
    assert list(log_settings.find_ineffective_importances(run.plan, run.module)) == expected


def test_what_is_frozen_of_an_adapter_method_without_effect(small):
    for options, lines in (
        (["method=ncl", "freeze.embeddings=true", "trainable=[norms,attention]"], []),
        (["method=lora", "freeze.layers=1"], []),
        (["method=lora", "method.embeddings=true", "freeze.embeddings=true"], []),
        (
            ["method=lora", "freeze.embeddings=true"],
            ["freeze.embeddings=true: method=lora trains no embedding"],
        ),
        (
            ["method=lora", "trainable=[norms,attention]"],
            ["trainable=norms: method=lora trains nothing of what it finds"],
        ),
        (
            ["method=lora", "method.modules_to_save=[final_norm]", "trainable=norms"],
            ["method=lora: freeze or trainable leaves method.modules_to_save alone, and no adapter"],
        ),
        (["method=lora", "method.modules_to_save=[final_norm]", "trainable=[norms,attention]"], []),
        (
            ["method=prompt", "freeze.layers=1"],
            ["freeze.layers=1: method=prompt trains nothing in these blocks"],
        ),
    ):
        run = build_method_fixture(small(ORDER, *options))
        assert list(log_settings.find_ineffective_freezing(run.plan, run.module)) == lines


@pytest.mark.parametrize(
    ("options", "line"),
    [
        (
            ["mask=migu", "trainable=norms"],
            "mask=migu: freeze or trainable leaves none of the weights that Magn",
        ),
        (
            ["mask=migu", "freeze.layers=2"],
            "mask=migu: freeze or trainable leaves none of the weights that Magn",
        ),
        (
            ["mask=mofo", "trainable=norms"],
            "mask=mofo: freeze or trainable leaves none of the weights that Mome",
        ),
        (["method=migu", "trainable=norms"], "the mask of method=migu: freeze or trainable leaves none"),
        (["method=osf", "trainable=norms"], "the mask of method=osf: freeze or trainable leaves none"),
        (["method=osf", "trainable=[norms,attention]"], ""),
        (["method=das", "trainable=norms"], "the mask of method=das: freeze or trainable leaves none"),
        (["mask=migu", "freeze.layers=1"], ""),
        (["mask=mofo", "trainable=[norms,attention]"], ""),
        (["method=lora", "mask=migu"], ""),
    ],
)
def test_masks_of_weights_that_all_are_frozen(options, line, small):
    run = build_method_fixture(small(ORDER, *options))
    descriptions = list(log_settings.find_ineffective_masks(run.plan, run.module))
    assert [text[: len(line)] for text in descriptions] == ([line] if line else [])


@pytest.mark.parametrize(
    ("teacher", "precision", "device", "is_emulated", "is_slow"),
    [
        ("bf16-mixed", "32-true", "cpu", True, True),
        ("bf16-mixed", "32-true", "cpu", False, False),
        ("bf16-mixed", "32-true", "cuda", True, False),
        ("bf16-mixed", "bf16-mixed", "cpu", True, False),  # of which the run has warned
        ("run", "32-true", "cpu", True, False),
    ],
)
def test_a_teacher_that_is_to_be_faster_and_is_slower(
    teacher, precision, device, is_emulated, is_slow, monkeypatch, caplog
):
    monkeypatch.setattr(log_settings, "is_bf16_emulated", lambda: is_emulated)
    options = KDOptions(strength=1.0, temperature=1.0, distilled="logits", teacher=teacher)
    machine = SimpleNamespace(precision=precision, device=torch.device(device))
    log_settings.warn_of_slow_teacher(machine, SimpleNamespace(options=options))
    assert ("method.teacher=bf16-mixed is slow on this CPU" in caplog.text) == is_slow


def test_stages_with_fewer_rows_than_a_batch_are_named_once(caplog):
    class Stages(list):
        budget = SimpleNamespace(batch_size=16)
        train = {"law": range(9), "food": range(16), "arts": range(12)}
        count_rows = DomainSequence.count_rows

    texts_by_stage = {"law": ("law",), "food": ("food",), "joint": ("law", "arts"), "arts": ("arts",)}
    stages = Stages(Domain(name, 0, texts) for name, texts in texts_by_stage.items())
    caplog.set_level("INFO", logger="cpt")
    log_settings.log_repeats(stages)
    expected = (
        "Fewer rows than a batch (trainer.batch_size=16): law, arts, of which the fewest are 9; a step may "
        "read a row more than once"
    )
    assert caplog.messages == [expected]
    caplog.clear()
    stages.budget.batch_size = 9
    log_settings.log_repeats(stages)
    assert caplog.messages == []
