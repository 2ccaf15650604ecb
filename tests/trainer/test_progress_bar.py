"""What a log and a terminal show of a fit."""

import doctest
import logging
import os
import pty
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from cpt.core import heartbeat
from cpt.core.heartbeat import HEARTBEAT, is_terminal
from cpt.data import datamodule
from cpt.data.datamodule import ImportanceLoader
from cpt.trainer import progress_bar
from cpt.trainer.costs import CostMonitor
from cpt.trainer.monitor import Monitor
from cpt.trainer.progress_bar import ProgressBar

NUM_STEPS = 25


class Trainer:
    """As much of Lightning's trainer as the bar reads; it counts how often its metrics are read."""

    log_every_n_steps = 10
    max_steps = NUM_STEPS
    world_size = 2
    is_global_zero = True
    strategy = SimpleNamespace(root_device=torch.device("cpu"))

    def __init__(self, *callbacks):
        self.global_step = 0
        self.num_reads = 0
        self.callbacks = callbacks

    @property
    def progress_bar_metrics(self):
        self.num_reads += 1
        return {"train/lm/law": 3.5512, "train/ewc/law": 0.25}


def fit(trainer, bar):
    bar.on_train_start(trainer, None)
    for step in range(1, NUM_STEPS + 1):
        bar.on_before_optimizer_step(trainer, None, SimpleNamespace(param_groups=[{"lr": 0.001 * step}]))
        for _ in range(2):  # micro-batches: the first one ends before the step
            bar.on_train_batch_end(trainer, None)
            trainer.global_step = step
    bar.on_train_batch_end(trainer, None)
    bar.teardown()


def lines_of(caplog):
    return [record.message for record in caplog.records if record.name == progress_bar.__name__]


def test_the_examples_of_the_docstrings():
    assert doctest.testmod(progress_bar).failed == 0


def set_seconds_per_step(monkeypatch, trainer, seconds):
    clock = SimpleNamespace(monotonic=lambda: seconds * trainer.global_step)
    monkeypatch.setattr(progress_bar, "time", clock)


def test_a_log_has_a_line_at_the_start_and_at_points_of_the_curves(caplog, monkeypatch):
    caplog.set_level(logging.INFO)
    costs = CostMonitor()
    costs.tokens_per_s = 3850.2
    trainer = Trainer(costs)
    set_seconds_per_step(monkeypatch, trainer, 1.0)
    fit(trainer, ProgressBar("law (2/3)"))
    start, first, second = lines_of(caplog)
    assert start == "law (2/3) · step 0/25"
    assert first.startswith("law (2/3) · step 10/25 · loss 3.551 · ewc 0.250 · lr 1.0e-2 · 7,700 tokens/s · ")
    assert second.startswith("law (2/3) · step 20/25 · loss 3.551 · ewc 0.250 · lr 2.0e-2 · ")
    assert trainer.num_reads == 2


def test_lines_keep_a_distance_but_for_the_last_point(caplog):
    caplog.set_level(logging.INFO)
    trainer = Trainer()
    fit(trainer, ProgressBar("law"))
    assert [line.split(" · ")[1] for line in lines_of(caplog)] == ["step 0/25", "step 20/25"]
    assert trainer.num_reads == 1


def test_slow_steps_have_a_line_between_points(caplog, monkeypatch):
    caplog.set_level(logging.INFO)
    trainer = Trainer()
    set_seconds_per_step(monkeypatch, trainer, 3.5)
    fit(trainer, ProgressBar("law"))
    lines = [line.split(" · ")[1:3] for line in lines_of(caplog)]
    assert lines[:5] == [
        ["step 0/25"],
        ["step 3/25", "loss 3.551 (step 1)"],
        ["step 6/25", "loss 3.551 (step 1)"],
        ["step 9/25", "loss 3.551 (step 1)"],
        ["step 12/25", "loss 3.551 (step 10)"],
    ]
    assert ["step 20/25", "loss 3.551"] in lines  # the last point
    assert trainer.num_reads == len(lines) - 1


def test_other_processes_than_the_first_log_and_read_nothing(caplog):
    caplog.set_level(logging.INFO)
    trainer = Trainer()
    trainer.is_global_zero = False
    fit(trainer, ProgressBar("law"))
    assert lines_of(caplog) == [] and trainer.num_reads == 0


def test_the_largest_rise_of_another_text_is_shown():
    monitor = Monitor.__new__(Monitor)
    monitor.stage_texts = ["law"]
    monitor.record = SimpleNamespace(nll={"law": [1, 5], "food": [2, 3, 2.25], "general": [3, 2, 2.9]})
    assert progress_bar.describe_rise(monitor) == ["food +0.250 nats"]
    monitor.record.nll["held-out chats"] = [2, 3]
    monitor.record.nll["base's answers"] = [1, 3]
    assert progress_bar.describe_rise(monitor) == ["food +0.250 nats", "base's answers +2.000 nats"]
    monitor.record = SimpleNamespace(nll={"law": [1], "food": [2]})
    assert progress_bar.describe_rise(monitor) == []


def test_the_time_left_is_that_of_the_heartbeat(monkeypatch):
    beat = SimpleNamespace(phase_eta_s=10.2, run_eta_s=3700.0)
    monkeypatch.setattr(progress_bar, "HEARTBEAT", SimpleNamespace(read=lambda: beat))
    assert progress_bar.describe_remaining() == ["0:10 left of stage, 1:01:40 of run"]
    beat.run_eta_s = beat.phase_eta_s = None
    assert progress_bar.describe_remaining() == []


@pytest.mark.parametrize(("columns", "is_wide"), [(80, True), (0, False)])
def test_a_terminal_without_columns_is_written_to_as_a_file(columns, is_wide, monkeypatch):
    import fcntl
    import struct
    import termios

    controller, terminal = pty.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    with os.fdopen(terminal, "w") as stream, monkeypatch.context() as patch:
        patch.setattr(sys, "stderr", stream)
        assert is_terminal() == is_wide
    os.close(controller)


def test_a_bar_in_a_terminal_has_what_a_line_has(monkeypatch):
    monkeypatch.setattr(progress_bar, "is_terminal", lambda: True)
    bar = ProgressBar("law")
    trainer = Trainer()
    fit(trainer, bar)
    assert bar.bar.postfix.startswith("loss 3.551 · ewc 0.250 · lr 2.0e-2 · ")
    assert trainer.num_reads == 2


def test_a_log_has_nothing_of_a_quick_evaluation(capsys, monkeypatch):
    trainer = SimpleNamespace(num_val_batches=[2, 1], is_global_zero=True)
    bar = ProgressBar("scoring after law")
    bar.on_validation_start(trainer, None)
    bar.on_validation_batch_end(trainer, None)
    bar.teardown()
    assert capsys.readouterr().err == ""

    monkeypatch.setattr(progress_bar, "DELAY", 0.0)
    bar.on_validation_start(trainer, None)
    bar.teardown()
    assert capsys.readouterr().err.startswith("scoring after law:   0%")


def test_a_long_measurement_of_importances_is_shown_and_counts_no_steps(tmp_path, capsys, monkeypatch):
    loader = ImportanceLoader([{"x": torch.ones(1)}] * 3, torch.device("cpu"), "law", 3, False)
    assert len(list(loader)) == 3 and capsys.readouterr().err == ""

    monkeypatch.setattr(datamodule, "DELAY", 0.0)
    with heartbeat.heartbeat(tmp_path):
        batches = iter(loader)
        next(batches)
        assert capsys.readouterr().err.startswith("measuring on law:   0%") and not HEARTBEAT.bars
        batches.close()
    assert list(replace(loader, is_silent=True)) and capsys.readouterr().err == ""
