"""The log says which options of the command line change nothing."""

from types import SimpleNamespace

import pytest

from cpt.trainer import log_settings

MONITOR = "monitor.past, monitor.max_tokens: monitor.every is null"
ANSWERS = "chats.max_new_tokens: chats.generate is 0"


@pytest.mark.parametrize(
    ("has_monitor", "chats", "lines"),
    [
        (False, SimpleNamespace(generate=0), [MONITOR, ANSWERS]),
        (True, SimpleNamespace(generate=16), []),
        (True, SimpleNamespace(generate=None), []),
        (True, None, []),
    ],
)
def test_options_of_evaluations_that_the_run_does_not_do(has_monitor, chats, lines, monkeypatch):
    keys = ["monitor.past", "monitor.every", "monitor.max_tokens", "chats.max_new_tokens", "trainer.steps"]
    config = SimpleNamespace(overrides=SimpleNamespace(task=[f"+{key}=1" for key in keys]))
    monkeypatch.setattr(log_settings.HydraConfig, "initialized", lambda: True)
    monkeypatch.setattr(log_settings.HydraConfig, "get", lambda: config)
    plan = SimpleNamespace(has_monitor=has_monitor, chats=chats)
    assert list(log_settings.find_ineffective_evaluation(plan)) == lines
