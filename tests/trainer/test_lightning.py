"""Lightning's Trainer as cpt makes it: which of Lightning's notices reach a user, and how processes are
counted."""

import pytest
from lightning.pytorch.plugins.environments import LightningEnvironment, SLURMEnvironment

from cpt.trainer.lightning import make_trainer

OPTIONS = {"accelerator": "cpu", "devices": 1, "strategy": "auto"}


@pytest.fixture
def srun(tmp_path, monkeypatch):
    """A machine on which SLURM is installed."""
    program = tmp_path / "srun"
    program.write_text("#!/bin/sh\nexit 1\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")


def test_an_installed_srun_that_is_not_used_gives_no_message(srun):
    with pytest.warns(UserWarning, match="`srun` command is available"):  # Lightning itself does
        SLURMEnvironment.detect()
    make_trainer(OPTIONS, label="", steps=1)
    SLURMEnvironment.detect()  # Lightning asks again at each fit and evaluation; here a warning is an error


def test_a_batch_script_is_no_task_and_srun_within_salloc_starts_tasks(monkeypatch):
    """Lightning takes any process with SLURM_NTASKS for a task, and none in a job of the name
    `interactive`."""
    job = {"SLURM_JOB_ID": "7", "SLURM_NODEID": "0", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"}
    for name, value in (job | {"SLURM_NTASKS": "1", "SLURM_JOB_NAME": "batch"}).items():
        monkeypatch.setenv(name, value)
    trainer = make_trainer(OPTIONS | {"devices": 2, "strategy": "ddp"}, label="", steps=1)
    assert (type(trainer.strategy.cluster_environment), trainer.world_size) == (LightningEnvironment, 2)
    step = {"SLURM_NTASKS": "2", "SLURM_NTASKS_PER_NODE": "2", "SLURM_STEP_ID": "0"}
    for name, value in (step | {"SLURM_JOB_NAME": "interactive"}).items():
        monkeypatch.setenv(name, value)
    trainer = make_trainer(OPTIONS | {"devices": 2, "strategy": "ddp"}, label="", steps=1)
    assert (type(trainer.strategy.cluster_environment), trainer.world_size) == (SLURMEnvironment, 2)
