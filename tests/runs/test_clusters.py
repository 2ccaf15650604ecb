"""What docs/distributed.md and docs/resume.md say to type, with two gloo processes and without a cluster."""

import os
import re
import subprocess

from cpt.core.preemption import GO_ON
from tests.conftest import ROOT


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
