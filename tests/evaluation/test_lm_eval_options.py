"""What a probe may be told, when it is due, and what is said where its harness is not there."""

from importlib import metadata

import pytest

from cpt.evaluation.options import LMEvalOptions, is_due
from tests.support.tracked import refusing

PLAIN = {"include": None, "when": "last", "metrics": {}, "shots": None, "limit": None}
PLAIN |= {"batch_size": 8, "max_length": None}


def options(*tasks, **given):
    return LMEvalOptions(**{**PLAIN, "tasks": tasks or ["a", "b"], **given})


def harness(folder, *tasks, **given):
    from cpt.evaluation.lm_eval import Harness

    return Harness(options(*tasks, include=str(folder), **given))


@pytest.mark.parametrize(
    ("when", "due"),
    [("last", [0, 7]), ("each", list(range(8))), ("every:3", [0, 3, 6, 7]), ("every:9", [0, 7])],
)
def test_the_base_and_the_last_stage_are_always_measured(when, due):
    assert [n for n in range(8) if is_due(options(when=when).when, n, stages=7)] == due


@pytest.mark.parametrize(
    ("version", "right"),
    [("0.4.12", False), ("0.4.13", True), ("0.4.20.dev1", True), ("0.5.0", False), ("0.5", False)],
)
def test_versions_whose_results_are_not_known_to_be_read_are_refused(version, right, monkeypatch, tmp_path):
    monkeypatch.setattr(metadata, "version", lambda name: version)
    if right:
        options().check_installed()
        with pytest.raises(ValueError, match="probe.include=.*nowhere is no folder; allowed: null or a"):
            options(include=str(tmp_path / "nowhere")).check_installed()
        return
    with pytest.raises(ValueError, match=r"is installed; needed: 0\.4\.13 or later, below 0\.5: pip install"):
        options().check_installed()


def test_a_package_that_is_missing_is_told_with_what_to_install(monkeypatch):
    monkeypatch.setattr(metadata, "version", refusing(metadata.PackageNotFoundError("lm_eval")))
    with pytest.raises(ValueError, match=r"^probe=lm_eval needs .*: pip install -e '\.\[lm-eval\]'$"):
        options().check_installed()


def test_other_files_in_the_folder_make_another_stamp(tmp_path):
    probe = options(include=str(tmp_path))
    stamps = [probe.stamp]
    (tmp_path / "task.yaml").write_text("task: a")
    stamps.append(probe.stamp)
    (tmp_path / "task.yaml").write_text("task: ab")
    stamps.append(probe.stamp)
    (tmp_path / "__pycache__").mkdir()
    (tmp_path / "__pycache__" / "task.pyc").write_text("left by Python")
    assert len(set(stamps)) == 3 and probe.stamp == stamps[-1]
