"""What docs/distributed.md and docs/resume.md say to type, with two gloo processes and without a cluster."""

import os
import re
import signal
import subprocess
import sys
import time

import pytest

from cpt.core.heartbeat import Heartbeat
from cpt.core.preemption import GO_ON
from tests.conftest import ROOT
from tests.runs.test_preemption import command, log_says

STEPS = ["strategy=ddp", "trainer.accelerator=cpu", "trainer.steps=4000", "trainer.checkpoint_every=10000"]


def page(name):
    return (ROOT / "docs" / f"{name}.md").read_text()


def test_the_batch_script_ends_with_the_code_of_the_run_and_requeues_at_75_alone(tmp_path):
    (script,) = re.findall(r"^(#!/bin/bash\n.*?)^```", page("distributed"), re.DOTALL | re.MULTILINE)
    for stub, line in {"srun": "exit $CODE", "scontrol": 'echo "$@" >> told; exit 3'}.items():
        (tmp_path / stub).write_text(f"#!/bin/bash\n{line}\n")
        (tmp_path / stub).chmod(0o755)
    path = f"{tmp_path}:{os.environ['PATH']}"
    for code in (0, 1, 137, GO_ON):
        given = {"PATH": path, "CODE": str(code), "SLURM_JOB_ID": "7"}
        assert subprocess.run(["bash", "-c", script], cwd=tmp_path, env=given).returncode == code
        assert (tmp_path / "told").exists() == (code == GO_ON)
    assert (tmp_path / "told").read_text() == "requeue 7\n"


def wait_for(seen, *processes):
    deadline = time.monotonic() + 120
    while not seen():
        assert time.monotonic() < deadline and all(is_there() for is_there in processes)
        time.sleep(0.05)


@pytest.mark.campaign
@pytest.mark.slow
def test_usr1_to_torchrun_is_handed_on_with_the_flag_of_the_page(corpora, cache, tmp_path):
    (flags,) = set(re.findall(r"^torchrun (--signals-to-handle \S+)", page("distributed"), re.MULTILINE))
    launched = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    folder = tmp_path / "run"
    start = [*command(corpora, cache), *STEPS, f"hydra.run.dir={folder}"]
    with (tmp_path / "log").open("w") as log:
        process = subprocess.Popen(
            [*launched, *flags.split(), str(ROOT / "run.py"), *start],
            cwd=tmp_path,
            stdout=log,
            stderr=subprocess.STDOUT,
        )
    try:
        wait_for(log_says(tmp_path, "law (1/2)"), lambda: process.poll() is None)
        process.send_signal(signal.SIGUSR1)
        assert process.wait(60) == 1  # torchrun's own: 75 is not seen behind it
    finally:
        process.kill()
    beat = Heartbeat.load(folder)
    assert beat.state == "preempted" and beat.why.startswith("stopped by SIGUSR1")
    assert subprocess.run(["pgrep", "-f", str(folder)], capture_output=True).stdout == b""  # no orphans
