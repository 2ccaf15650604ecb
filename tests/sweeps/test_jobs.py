"""The jobs of a sweep in this process: which are finished before, what they give back, and clusters."""

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.utils import JobReturn, JobStatus
from hydra.types import HydraContext, RunMode
from omegaconf import OmegaConf, open_dict

from cpt.core.preemption import GO_ON
from cpt.sweeps.jobs import BASIC_SWEEPER, compose_jobs
from cpt.sweeps.launcher import ClusterLauncher, ProcessLauncher, forward_signals
from tests.conftest import SMALL

pytestmark = pytest.mark.slow


class Sweep:
    def __init__(self, shared):
        self.shared, loader = list(shared), GlobalHydra.instance().config_loader()
        self.context = HydraContext(config_loader=loader, callbacks=None)
        self.config = loader.load_configuration("config", self.shared, RunMode.MULTIRUN)

    def jobs(self, *each):
        return compose_jobs(self.given(each), 0, context=self.context, config=self.config)

    def given(self, each):
        return [[*self.shared, *overrides.split()] for overrides in each]

    def launched(self, launcher, *each, sweeper="hydra_plugins.cpt.OptunaSweeper"):
        with open_dict(self.config):
            self.config.hydra.sweeper._target_ = sweeper
        launcher.setup(hydra_context=self.context, task_function=None, config=self.config)
        return launcher.launch(self.given(each), 0)


@pytest.fixture
def sweep(small, corpora, cache, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["run.py"])
    yield Sweep(["domains=texts", f"domains.root={corpora}", f"cache_dir={cache}", *SMALL])
    HydraConfig.instance().cfg = None


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    return tmp_path_factory.mktemp("kept") / "run"


@pytest.fixture
def done(sweep, start, kept):
    (job,) = sweep.jobs("seed=1")
    assert not job.before and job.folder.parent == Path("outputs/default")
    if not kept.exists():
        start(OmegaConf.create({key: job.config[key] for key in job.config if key != "hydra"}), job.folder)
        shutil.copytree(job.folder, kept)
    shutil.copytree(kept, job.folder, dirs_exist_ok=True)
    return job.folder


def test_a_wrong_choice_of_a_swept_group_is_named(sweep, capsys):
    wrong = Sweep([*sweep.shared, "mask=[migu,mofu],none", "method='ncl',ewc"])
    with pytest.raises(SystemExit):
        wrong.launched(ProcessLauncher(jobs=1, threads=1), "seed=1")
    assert capsys.readouterr().err.startswith("cpt: mask=mofu is invalid: unknown choice")


def test_equal_jobs_are_one_and_labels_say_what_differs(sweep):
    assert [str(job) for job in sweep.jobs("seed=1", "seed=2", "seed=1")] == ["#0 seed=1", "#1 seed=2"]
    with pytest.raises(ValueError, match="'#0 seed=1' and '#1 seed=2' share it"):
        sweep.jobs("hydra.run.dir=outputs/one seed=1", "hydra.run.dir=outputs/one seed=2")


def test_finished_runs_are_known_without_a_process(sweep, done, monkeypatch):
    monkeypatch.setattr("subprocess.Popen", lambda *given, **options: pytest.fail("a process"))
    launcher = ProcessLauncher(jobs=None, threads=None)
    (returned,) = sweep.launched(launcher, "seed=1", sweeper=BASIC_SWEEPER)
    scores = json.loads((done / "scores.json").read_text())
    assert (returned.status, returned.return_value) == (JobStatus.COMPLETED, scores["optimized_metric"])
    # Another objective is no other run: it is computed from what was measured.
    (returned,) = sweep.launched(launcher, "seed=1 optimized_metric=FG.nats")
    assert returned.return_value == scores["metrics"]["FG"]["nats"]


def test_what_is_not_finished_gets_its_process(sweep, done):
    def before(overrides="seed=1"):
        return sweep.jobs(f"{overrides} hydra.run.dir={done}")[0].before

    assert before() and before("seed=1 trainer.num_workers=1")  # how a run is carried out only
    for lacking in ("seed=2", "seed=1 trainer.steps=7", "seed=1 trainer.steps=???", "seed=1 endtask=texts"):
        assert not before(lacking)
    finished = (done / "scores.json").read_text()
    for damaged in (finished.replace('"finished": true', '"finished": false'), finished[:100]):
        (done / "scores.json").write_text(damaged)
        assert not before()


class Cluster:
    """Calls the jobs here, one after another, as another launcher would in its workers."""

    lost = False

    def __init__(self, *, nodes):
        pass

    def setup(self, *, hydra_context, task_function, config):
        self.context, self.task, self.config = hydra_context, task_function, config

    def launch(self, job_overrides, initial_job_idx):
        if self.lost:
            raise RuntimeError("Traceback:\n  a node died\n")
        ended = []
        for overrides in job_overrides:
            cfg = self.context.config_loader.load_sweep_config(self.config, overrides)
            HydraConfig.instance().set_config(cfg)
            try:
                ended.append(JobReturn(status=JobStatus.COMPLETED, _return_value=self.task(cfg)))
            except OSError as error:
                ended.append(JobReturn(status=JobStatus.FAILED, _return_value=error))
        return ended


TASK = """
import os, sys
print(sys.argv[1:], os.getcwd(), os.environ["CPT_LAUNCHER"] == str(os.getppid()))
open(os.environ["SEEN"], "a").write(" ".join(sys.argv[1:]) + chr(10))
if "seed=3" in sys.argv:
    sys.exit("cpt: no")
if "seed=4" in sys.argv:
    sys.exit(75)
if "seed=5" not in sys.argv:
    (folder,) = [each for each in os.listdir("outputs/default") if "seed-2" in each]
    open("outputs/default/" + folder + "/scores.json", "w").write('{"run": {"finished": true}}')
"""


@pytest.fixture
def cluster(monkeypatch, tmp_path):
    monkeypatch.setenv("SEEN", str(tmp_path / "seen"))
    monkeypatch.setattr("cpt.sweeps.launcher.job_command", lambda config: [sys.executable, "-S", "-c", TASK])
    return ClusterLauncher(through=f"{__name__}.Cluster", extra="slurm", options={"nodes": 1})


def test_a_cluster_runs_the_command_that_a_job_would_have_alone(sweep, cluster, tmp_path):
    returned = sweep.launched(cluster, "seed=2", "seed=3", "seed=2")
    assert [each.status.name for each in returned] == ["COMPLETED", "FAILED", "COMPLETED"]
    assert str(returned[1]._return_value) == "#1 seed=3: failed (exit 1): cpt: no"
    lines = (tmp_path / "seen").read_text().splitlines()
    assert lines == [" ".join([*sweep.shared, f"seed={seed}", "hydra.mode=RUN"]) for seed in (2, 3)]
    consoles = sorted(tmp_path.glob("outputs/default/*/console.log"))
    assert len(consoles) == 2 and consoles[0].read_text().strip().endswith(f"{tmp_path} True")


@pytest.mark.parametrize(("seed", "code", "how"), [(3, 1, "failed"), (4, GO_ON, "were preempted")])
def test_a_preempted_job_is_neither_finished_nor_failed(sweep, cluster, capsys, seed, code, how):
    with pytest.raises(SystemExit) as end:
        sweep.launched(cluster, "seed=2", f"seed={seed}", sweeper=BASIC_SWEEPER)
    assert end.value.code == code
    assert capsys.readouterr().err.startswith(f"cpt: 1 of 2 jobs {how}: #1 seed={seed}")


def test_a_job_that_ends_well_without_a_finished_run_or_cannot_start_has_failed(sweep, cluster, monkeypatch):
    (returned,) = sweep.launched(cluster, "seed=5")
    assert returned.status is JobStatus.FAILED
    assert "scores.json in its folder is not that of a finished run" in str(returned._return_value)
    monkeypatch.setattr("cpt.sweeps.launcher.job_command", lambda config: ["no such program"])
    (returned,) = sweep.launched(cluster, "seed=2")
    assert "failed (lost): [Errno 2] No such file" in str(returned._return_value)


def test_finished_runs_are_not_submitted_and_stay_so_where_a_job_is_lost(
    sweep, done, cluster, tmp_path, monkeypatch
):
    returned = sweep.launched(cluster, "seed=2", "seed=1")
    assert len((tmp_path / "seen").read_text().splitlines()) == 1 and returned[1].return_value > 0
    monkeypatch.setattr(Cluster, "lost", True)
    monkeypatch.setattr("cpt.sweeps.jobs.is_finished_already", lambda cfg, folder: False)
    returned = sweep.launched(cluster, "seed=1", "seed=6")
    assert returned[0].status is JobStatus.COMPLETED
    assert str(returned[1]._return_value) == "#1 seed=6: failed (lost): a node died"


SAVER = """
import pathlib, signal, sys, time
def save(*_):
    pathlib.Path("saved").touch()
    sys.exit(75)
signal.signal(signal.SIGTERM, save)
print("ready", flush=True)
time.sleep(30)
"""


def test_a_clusters_signal_reaches_the_job_before_the_clusters_own_handler(tmp_path):
    """submitit's has the job queued again and ends."""
    saved = []
    before = signal.signal(signal.SIGUSR2, lambda *_: saved.append((tmp_path / "saved").exists()))
    options = {"cwd": tmp_path, "stdout": subprocess.PIPE, "start_new_session": True}
    try:
        with subprocess.Popen([sys.executable, "-S", "-c", SAVER], **options) as process:
            assert process.stdout.readline() == b"ready\n"
            with forward_signals(process):
                threading.Timer(0.1, os.kill, [os.getpid(), signal.SIGUSR2]).start()
                assert process.wait() == 75
    finally:
        signal.signal(signal.SIGUSR2, before)
    assert saved == [True]
