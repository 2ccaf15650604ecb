"""What a log file gets: dates, and a line for each state of a bar."""

import io
import logging
import re
import sys

from omegaconf import OmegaConf

from cpt.core.config import CONF
from cpt.core.progress import progress_bar


def test_a_bar_without_a_terminal_shares_no_line_with_an_event(monkeypatch):
    both = io.StringIO()
    monkeypatch.setattr(sys, "stderr", both)
    with progress_bar("outer", total=2, hidden=False) as outer, progress_bar("inner", total=1, hidden=False):
        print("an event", file=both)
        outer.update()
        outer.refresh()
        print("another", file=both)
    bars = [line for line in both.getvalue().splitlines() if "%|" in line]
    assert [line for line in both.getvalue().split("\n") if line not in bars] == ["an event", "another", ""]
    assert len(bars) >= 3 and "\r" not in both.getvalue()


def test_a_log_line_has_a_date():
    how = OmegaConf.load(CONF / "config.yaml").hydra.job_logging.formatters.simple
    line = logging.Formatter(how.format, how.datefmt).format(logging.makeLogRecord({"msg": "x"}))
    assert re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d x", line)
