"""Lightning's Trainer as cpt makes it: which of Lightning's notices reach a user, and how processes are
counted."""

import pytest
from lightning.pytorch.plugins.environments import SLURMEnvironment

from cpt.trainer.lightning import make_trainer

OPTIONS = {"accelerator": "cpu", "devices": 1, "strategy": "auto"}


@pytest.fixture
def srun(tmp_path, monkeypatch):
    """A machine on which SLURM is installed."""
    program = tmp_path / "srun"
    program.write_text("#!/bin/sh\nexit 1\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")


def test_nothing_is_said_of_an_installed_srun_that_is_not_used(srun):
    with pytest.warns(UserWarning, match="`srun` command is available"):  # Lightning itself does
        SLURMEnvironment.detect()
    make_trainer(OPTIONS, label="", steps=1)
    SLURMEnvironment.detect()  # Lightning asks again at each fit and evaluation; here a warning is an error
