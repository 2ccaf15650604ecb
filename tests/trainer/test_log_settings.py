"""The log says which options of the command line change nothing."""

from types import SimpleNamespace

import pytest
import torch

from cpt.methods.options import KDOptions
from cpt.trainer import log_settings

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
    set_keys("trainer.steps", "optim.lr", "optimized_metric", "mask", "model", "replay")
    plan = SimpleNamespace(names={"method": "none"})
    expected = ["trainer.steps, optim.lr, mask: method=none trains nothing"]
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
    plan = SimpleNamespace(has_monitor=has_monitor, chats=chats)
    assert list(log_settings.find_ineffective_evaluation(plan)) == lines


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
