"""The jobs of a sweep: which are finished before, their processes and share of the machine, clusters."""

import itertools
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
from functools import partial
from pathlib import Path

import pytest
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.utils import JobReturn, JobStatus
from hydra.types import HydraContext, RunMode
from omegaconf import OmegaConf, open_dict, read_write

from cpt import cli
from cpt.cli import to_hydra
from cpt.core import resolved
from cpt.core.heartbeat import Heartbeat, utc_now
from cpt.core.preemption import GO_ON
from cpt.sweeps.jobs import (
    BASIC_SWEEPER,
    Job,
    compose_jobs,
    divide_machine,
    list_visible_gpus,
    read_scores,
    start_process,
    summarize_jobs,
    take_out_secrets,
)
from cpt.sweeps.launcher import ClusterLauncher, ProcessLauncher, forward_signals, run_all
from cpt.sweeps.progress import JobProgress
from cpt.trainer.preflight import check_process_start
from tests.conftest import ROOT, SMALL
from tests.support.forked_scripts import is_alive, wait_for


class Sweep:
    def __init__(self, shared):
        self.shared = list(shared)  # the overrides of every job
        loader = GlobalHydra.instance().config_loader()
        self.context = HydraContext(config_loader=loader, callbacks=None)
        self.config = loader.load_configuration("config", self.shared, RunMode.MULTIRUN)

    def jobs(self, *lines):
        return compose_jobs(self.overrides(*lines), 0, context=self.context, config=self.config)

    def compose(self, line):
        """The config of a job as Hydra's launchers compose it, in the process of the sweep."""
        (overrides,) = self.overrides(line)
        overrides.append("hydra.mode=MULTIRUN")  # of Hydra's main program, by `-m`
        config = self.context.config_loader.load_sweep_config(self.config, overrides)
        HydraConfig.instance().set_config(config)
        return config

    def compose_run(self, line=""):
        """The config of the same job as a run of its own."""
        (overrides,) = self.overrides(line)
        config = self.context.config_loader.load_configuration("config", overrides, RunMode.RUN)
        HydraConfig.instance().set_config(config)
        return config

    def overrides(self, *lines):
        """All overrides of jobs, given those of each on a line."""
        return [[*self.shared, *line.split()] for line in lines]

    def launch(self, launcher, *lines, sweeper="hydra_plugins.cpt.OptunaSweeper"):
        with read_write(self.config.hydra), open_dict(self.config):
            self.config.hydra.sweeper._target_ = sweeper
        HydraConfig.instance().set_config(self.config)  # as `-m` does: read-only
        launcher.setup(hydra_context=self.context, task_function=None, config=self.config)
        return launcher.launch(self.overrides(*lines), 0)


@pytest.fixture
def sweep(small, corpora, cache, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["run.py"])
    yield Sweep(["domains=texts", f"domains.root={corpora}", f"cache_dir={cache}", *SMALL])
    HydraConfig.instance().cfg = None


@pytest.fixture(scope="module")
def stored_run(tmp_path_factory):
    """Where the finished run is kept for all tests; the first of them makes it."""
    return tmp_path_factory.mktemp("stored") / "run"


@pytest.fixture
def finished_run(sweep, start, stored_run):
    """The folder of the job "seed=1", which is finished."""
    (job,) = sweep.jobs("seed=1")
    assert not job.was_finished and job.folder.parent == Path("outputs/default")
    if not stored_run.exists():
        config = OmegaConf.create({name: job.config[name] for name in job.config if name != "hydra"})
        start(config, job.folder)
        shutil.copytree(job.folder, stored_run)
    shutil.copytree(stored_run, job.folder, dirs_exist_ok=True)
    return job.folder


def test_equal_jobs_run_once_and_labels_name_the_differences(sweep):
    assert [str(job) for job in sweep.jobs("seed=1", "seed=2", "seed=1")] == ["#0 seed=1", "#1 seed=2"]
    with pytest.raises(ValueError, match="'#0 seed=1' and '#1 seed=2' share it"):
        sweep.jobs("hydra.run.dir=outputs/one seed=1", "hydra.run.dir=outputs/one seed=2")


def test_jobs_whose_paths_end_alike_have_folders_of_their_own_and_tell_their_processes(sweep):
    lines = [f"init_from={folder} seed=1" for folder in ("a/run", "b/run", "b/other")]
    first, second, third = sweep.jobs(*lines)
    assert "init.from-a.run" in first.folder.name and "init.from-b.run" in second.folder.name
    assert second.arguments[-1] == f"hydra.run.dir={second.folder}"
    assert second.console.parent == second.folder
    assert third.arguments[:-1] == list(third.overrides) and "init.from-other" in third.folder.name
    assert [job.folder for job in sweep.jobs(*lines)] == [first.folder, second.folder, third.folder]


def test_a_folder_that_the_user_names_is_each_jobs_own(sweep):
    """In its own process a job has no number, and another time."""
    for override, folder in (
        ("hydra.sweep.subdir=${hydra.job.num}", "outputs/default/{}"),
        ('hydra.sweep.subdir="it\'s_${seed}"', "outputs/default/it's_{}"),
        ("hydra.sweep.dir=multirun/${now:%Y}", None),
    ):
        jobs = Sweep([*sweep.shared, override]).jobs("seed=0", "seed=1")
        for number, job in enumerate(jobs):
            (parsed,) = OverridesParser.create().parse_overrides(job.arguments[-1:])
            assert (parsed.key_or_group, str(parsed.value())) == ("hydra.run.dir", str(job.folder))
            assert folder is None or str(job.folder) == folder.format(number)
    with pytest.raises(ValueError, match=r"^hydra\.run\.dir=outputs/\$\{seed\}/.* is invalid: "):
        Sweep([*sweep.shared, "name='\\${seed}'"]).jobs("seed=0", "seed=1")


@pytest.mark.parametrize(
    "overrides",
    ["seed=1", "order=[law,food] seed=2", "name=other method=ewc", "init_from=a/b"],
)
def test_launchers_of_hydras_plugins_write_to_the_folder_of_a_run_alone(sweep, overrides):
    config = sweep.compose(overrides)
    folder = Path(config.hydra.sweep.dir) / config.hydra.sweep.subdir  # as hydra.core.utils.run_job
    (job,) = sweep.jobs(overrides)
    assert folder == job.folder == Path(sweep.compose_run(overrides).hydra.run.dir)


def test_a_job_in_the_process_of_a_sweep_starts_no_other_processes(sweep, monkeypatch):
    """Lightning would start them by the command line, which is that of the sweep."""
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    sweep.compose("seed=1")
    check_process_start(1, "1")
    with pytest.raises(ValueError, match="trainer.devices=auto is invalid: .* slurm for 2"):
        check_process_start(2, "auto")
    monkeypatch.setenv("LOCAL_RANK", "0")  # torchrun has started them
    check_process_start(2, "2")

    monkeypatch.delenv("LOCAL_RANK")
    sweep.compose_run()
    check_process_start(2, "2")


def test_submitit_gets_the_error_of_a_job_and_other_launchers_a_line(sweep, monkeypatch, capsys):
    def refuse(config, *, run_dir):
        raise ValueError(f"{run_dir}/x is invalid. Allowed: y")

    monkeypatch.setattr(cli, "train", refuse)
    monkeypatch.delenv("SUBMITIT_EXECUTOR", raising=False)
    config = sweep.compose("seed=1")
    resolved.set_values(HydraConfig.instance().cfg, {"hydra.runtime.output_dir": "outputs/one"})
    with pytest.raises(SystemExit):
        cli.app(config)
    assert capsys.readouterr().err == "cpt: outputs/one/x is invalid. Allowed: y\n"
    monkeypatch.setenv("SUBMITIT_EXECUTOR", "slurm")
    with pytest.raises(ValueError, match="outputs/one/x is invalid"):
        cli.app(config)


def test_finished_runs_are_known_without_a_process(sweep, finished_run, monkeypatch):
    monkeypatch.setattr("subprocess.Popen", lambda *args, **options: pytest.fail("a process"))
    launcher = ProcessLauncher(jobs=None, threads=None)
    (result,) = sweep.launch(launcher, "seed=1", sweeper=BASIC_SWEEPER)
    scores = json.loads((finished_run / "scores.json").read_text())
    assert (result.status, result.return_value) == (JobStatus.COMPLETED, scores["optimized_metric"])
    # Another objective is no other run: it is computed from what was measured.
    (result,) = sweep.launch(launcher, "seed=1 optimized_metric=FG.nats")
    assert result.return_value == scores["metrics"]["FG"]["nats"]


def test_what_is_not_finished_gets_its_process(sweep, finished_run):
    def is_finished_before(overrides="seed=1"):
        (job,) = sweep.jobs(f"{overrides} hydra.run.dir={finished_run}")
        return job.was_finished

    assert is_finished_before()
    # Only how a run is carried out.
    assert is_finished_before("seed=1 trainer.num_workers=1")
    for overrides in ("seed=2", "seed=1 trainer.steps=7", "seed=1 trainer.steps=???", "seed=1 endtask=texts"):
        assert not is_finished_before(overrides)

    scores = (finished_run / "scores.json").read_text()
    for damaged in (scores.replace('"finished": true', '"finished": false'), scores[:100]):
        (finished_run / "scores.json").write_text(damaged)
        assert not is_finished_before()


class Cluster:
    """Calls the jobs here, one after another, as another launcher would in its workers."""

    lost = False

    def __init__(self, *, nodes):
        pass

    def setup(self, *, hydra_context, task_function, config):
        self.context = hydra_context
        self.task = task_function
        self.config = config

    def launch(self, job_overrides, initial_job_idx):
        if self.lost:
            raise RuntimeError("Traceback:\n  a node died\n")
        results = []
        for overrides in job_overrides:
            cfg = self.context.config_loader.load_sweep_config(self.config, overrides)
            HydraConfig.instance().set_config(cfg)
            try:
                results.append(JobReturn(status=JobStatus.COMPLETED, _return_value=self.task(cfg)))
            except OSError as error:
                results.append(JobReturn(status=JobStatus.FAILED, _return_value=error))
        return results


TASK = """
import os, sys
print(sys.argv[1:], os.getcwd(), os.environ["CPT_LAUNCHER"] == str(os.getppid()))
open(os.environ["SEEN"], "a").write(" ".join(sys.argv[1:]) + chr(10))
if "seed=3" in sys.argv:
    sys.exit("cpt: no")
if "seed=4" in sys.argv:
    sys.exit(75)
if "seed=5" not in sys.argv:
    (folder,) = [name for name in os.listdir("outputs/default") if "seed-2" in name]
    open("outputs/default/" + folder + "/scores.json", "w").write('{"run": {"finished": true}}')
"""


@pytest.fixture
def cluster(monkeypatch, tmp_path):
    monkeypatch.setenv("SEEN", str(tmp_path / "seen"))
    monkeypatch.setattr(
        "cpt.sweeps.launcher.format_sweep_command", lambda config: [sys.executable, "-S", "-c", TASK]
    )
    return ClusterLauncher(through=f"{__name__}.Cluster", extra="slurm", options={"nodes": 1})


@pytest.mark.parametrize("through", ["cluster", "processes"])
def test_a_job_is_the_command_that_it_would_be_alone(sweep, cluster, tmp_path, through):
    launcher = cluster if through == "cluster" else ProcessLauncher(jobs=1, threads=None)
    results = sweep.launch(launcher, "seed=2", "seed=3", "seed=2")
    assert [result.status.name for result in results] == ["COMPLETED", "FAILED", "COMPLETED"]
    assert str(results[1]._return_value) == "#1 seed=3: failed (exit 1): cpt: no"
    lines = (tmp_path / "seen").read_text().splitlines()
    jobs = sweep.jobs("seed=2", "seed=3")
    assert lines == [" ".join([*job.arguments, "hydra.mode=RUN"]) for job in jobs]
    consoles = sorted(tmp_path.glob("outputs/default/*/console.log"))
    assert len(consoles) == 2 and consoles[0].read_text().strip().endswith(f"{tmp_path} True")


@pytest.mark.parametrize(("seed", "code", "ending"), [(3, 1, "failed"), (4, GO_ON, "were preempted")])
def test_a_preempted_job_is_neither_finished_nor_failed(sweep, cluster, capsys, seed, code, ending):
    with pytest.raises(SystemExit) as end:
        sweep.launch(cluster, "seed=2", f"seed={seed}", sweeper=BASIC_SWEEPER)
    assert end.value.code == code
    assert capsys.readouterr().err.startswith(f"cpt: 1 of 2 jobs {ending}: #1 seed={seed}")


def test_a_job_that_ends_well_without_a_finished_run_or_cannot_start_has_failed(sweep, cluster, monkeypatch):
    (result,) = sweep.launch(cluster, "seed=5")
    assert result.status is JobStatus.FAILED
    assert "scores.json in its folder is not that of a finished run" in str(result._return_value)
    monkeypatch.setattr("cpt.sweeps.launcher.format_sweep_command", lambda config: ["no such program"])
    (result,) = sweep.launch(cluster, "seed=2")
    assert "failed (lost): [Errno 2] No such file" in str(result._return_value)


def test_finished_runs_are_not_submitted_and_stay_so_where_a_job_is_lost(
    sweep, finished_run, cluster, tmp_path, monkeypatch
):
    results = sweep.launch(cluster, "seed=2", "seed=1")
    # One job was submitted, "seed=1" is finished.
    assert len((tmp_path / "seen").read_text().splitlines()) == 1 and results[1].return_value > 0

    monkeypatch.setattr(Cluster, "lost", True)
    monkeypatch.setattr("cpt.sweeps.jobs.is_finished_already", lambda cfg, folder: False)
    results = sweep.launch(cluster, "seed=1", "seed=6")
    assert results[0].status is JobStatus.COMPLETED
    assert str(results[1]._return_value) == "#1 seed=6: failed (lost): a node died"


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
    was_saved = []  # whether the job had saved, at each call of the cluster's handler

    def handle_signal(*_):
        was_saved.append((tmp_path / "saved").exists())

    previous_handler = signal.signal(signal.SIGUSR2, handle_signal)
    command = [sys.executable, "-S", "-c", SAVER]
    try:
        with subprocess.Popen(
            command, cwd=tmp_path, stdout=subprocess.PIPE, start_new_session=True
        ) as process:
            assert process.stdout.readline() == b"ready\n"
            with forward_signals(process):
                threading.Timer(0.1, os.kill, [os.getpid(), signal.SIGUSR2]).start()
                assert process.wait() == 75
    finally:
        signal.signal(signal.SIGUSR2, previous_handler)
    assert was_saved == [True]


PROGRAM = """
import os, signal, sys, time
number = int(sys.argv[1][2:])
if "QUIET" not in os.environ:
    print("begun", number)
if number == 0:
    raise RuntimeError("boom")
if number == 1:
    os.kill(os.getpid(), signal.SIGKILL)
began = time.time()
time.sleep(0.3)
open(f"{number}/scores.json", "w").write('{"run": {"finished": true}}')
open(f"{number}/times", "w").write(f"{began} {time.time()}")
"""


def make_job(number):
    job = Job(number, (f"x={number}",), f"x={number}", OmegaConf.create(), Path(str(number)))
    job.folder.mkdir()
    return job


@pytest.mark.slow
def test_failed_jobs_stop_no_other_and_no_more_run_at_once_than_there_are_places(
    tmp_path, monkeypatch, caplog
):
    caplog.set_level("INFO")
    monkeypatch.chdir(tmp_path)
    jobs = [make_job(number) for number in range(5)]
    command = [sys.executable, "-S", "-c", PROGRAM]
    run_all(jobs, command=command, environments=[{}, {}], grace=1)
    assert [job.state for job in jobs] == ["failed"] * 2 + ["finished"] * 3
    killed = "failed (signal 9, Killed; perhaps for want of memory)"
    assert jobs[0].failure() == "failed (exit 1): RuntimeError: boom"
    assert jobs[1].failure() == f"{killed}: begun 1"
    for job in jobs[:2]:
        heartbeat = Heartbeat.load(job.folder)
        assert f"{heartbeat.state} {heartbeat.why}" == job.failure()

    # A log says of each job that it started and how it ended, as which of how many, and the time left.
    assert "Job #0 x=0: started (1 of 5), 0/console.log" in caplog.messages
    assert "Job #4 x=4: started (5 of 5), 4/console.log" in caplog.messages
    lines = "\n".join(caplog.messages)
    assert "failed (exit 1): RuntimeError: boom (" in lines
    assert re.search(r"finished in 0:0\d \(4 of 5 jobs ended, about 0:0\d left\)\n", lines)
    assert lines.endswith(" (5 of 5 jobs ended)")

    # Two run at once: the second begins beside the first, the third when one of them has ended.
    times = []
    for job in jobs[2:]:
        begin, end = (job.folder / "times").read_text().split()
        times.append((float(begin), float(end)))
    begins = [begin for begin, _ in sorted(times)]
    ends = [end for _, end in sorted(times)]
    assert begins[1] < ends[0] and begins[2] >= min(ends[:2])

    jobs[3].was_finished = True
    jobs[0].code = GO_ON
    assert summarize_jobs(jobs)[0] == "5 jobs: 2 finished, 1 finished before, 1 preempted, 1 failed"

    # A second start appends to the same console, whose last line is no reason of its failure.
    run_all(jobs[1:2], command=command, environments=[{"QUIET": "1"}], grace=1)
    assert jobs[1].failure() == f"{killed}: (no output)" and jobs[1].console.read_text() == "begun 1\n"


def test_the_command_that_compares_is_for_a_shell_and_scores_of_another_form_are_none(tmp_path):
    job = Job(0, (), "", OmegaConf.create(), tmp_path / "my sweep" / "run", was_finished=True)
    command = summarize_jobs([job])[-1].removeprefix("compare: python -m cpt.report ")
    assert shlex.split(command) == [str(tmp_path / "my sweep")]
    job.folder.mkdir(parents=True)
    for content in ("[1]", "null", "[" * 100_000, "{"):
        (job.folder / "scores.json").write_text(content)
        assert read_scores(job.folder) == {}


def test_the_time_left_is_what_runs_say_of_themselves_and_else_that_of_other_jobs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(time, "monotonic", lambda: 1000.0)
    first, second = (make_job(number) for number in range(2))
    for job in (first, second):
        job.start_time = 900.0
        job.start_date = utc_now()
    progress = JobProgress(num_jobs=5, num_places=2)
    assert progress.describe([first, second]) == "0 of 5 jobs ended"
    assert JobProgress(num_jobs=5).describe() == "0 of 5 jobs ended"  # of a cluster

    # A run that has begun at this start says 300 s, of 400 s in all. The other takes as long, then three more.
    Heartbeat(state="running", began=utc_now(), run_eta_s=300.0).write(first.folder)
    assert progress.estimate_s([first, second]) == 300 + 2 * 400
    Heartbeat(state="running", began="2020-01-01T00:00:00Z", run_eta_s=1.0).write(second.folder)
    assert progress.estimate_s([first, second]) == 300 + 2 * 400

    # Others took 200 s.
    progress.durations = [150.0, 250.0]
    progress.num_ended = 2
    assert progress.describe([first, second]) == "2 of 5 jobs ended, about 5:00 left"


SWEEP = """
import sys
from pathlib import Path
from omegaconf import OmegaConf
from cpt.sweeps.jobs import Job
from cpt.sweeps.launcher import run_all
jobs = [Job(n, (f"x={n}",), "", OmegaConf.create(), Path(str(n))) for n in range(2)]
run_all(jobs, command=[sys.executable, "-c", sys.argv[1]], environments=[{}, {}], grace=5)
"""
WAITING = """
import os, signal, subprocess, sys, time
from cpt.core.processes import die_with_parent
die_with_parent()
folder = sys.argv[1][2:]
def left(number, _):
    open(folder + "/got", "w").write(str(number))
    sys.exit(75)
signal.signal(signal.SIGTERM, left)
signal.signal(signal.SIGINT, left)
helper = subprocess.Popen(["sleep", "60"])
open(folder + "/pids.part", "w").write(f"{os.getpid()} {helper.pid}")
os.rename(folder + "/pids.part", folder + "/pids")
time.sleep(60)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="/proc, prctl")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_jobs_end_with_their_sweep(number, tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    with subprocess.Popen([sys.executable, "-c", SWEEP, WAITING], cwd=tmp_path) as process:
        assert wait_for(lambda: len(list(tmp_path.glob("*/pids"))) == 2)
        process.send_signal(number)
    jobs = []
    helpers = []
    for path in tmp_path.glob("*/pids"):
        job, helper = path.read_text().split()
        jobs.append(int(job))
        helpers.append(int(helper))

    # A sweep that is killed cannot end the processes that its jobs have started.
    if number == signal.SIGKILL:
        for helper in helpers:
            os.kill(helper, signal.SIGKILL)
        assert wait_for(lambda: not any(map(is_alive, jobs)))
    else:
        assert process.returncode == GO_ON and not any(map(is_alive, jobs + helpers))
        assert [path.read_text() for path in tmp_path.glob("*/got")] == [str(int(number))] * 2


@pytest.fixture
def nvidia_smi(monkeypatch, tmp_path):
    """Where a machine of 8 cores has the program that lists its GPUs; a test writes it."""
    monkeypatch.setattr("cpt.sweeps.jobs.count_cores", lambda: 8)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    for name in ("CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS", "MKL_NUM_THREADS", "OMP_WAIT_POLICY"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path / "nvidia-smi"


def read_variable(name, num_jobs, *, jobs=None, threads=None, waiting=None, **trainer):
    """A variable in the environment of each job that runs at once."""
    configs = [OmegaConf.create({"trainer": trainer})] * num_jobs
    environments = divide_machine(configs, jobs=jobs, threads=threads, waiting=waiting)
    return [environment.get(name) for environment in environments]


def test_gpus_are_divided(nvidia_smi, monkeypatch):
    lines = [f"echo 'GPU {number}: X (UUID: GPU-{number})'\n" for number in range(4)]
    nvidia_smi.write_text("#!/bin/sh\n" + "".join(lines))
    nvidia_smi.chmod(0o755)
    gpus = partial(read_variable, "CUDA_VISIBLE_DEVICES", 9)
    assert gpus(devices=1) == ["0", "1", "2", "3"] and gpus(devices=2) == ["0,1", "2,3"]
    assert gpus(devices=3) == ["0,1,2"]
    assert gpus() == gpus(devices=-1) == gpus(devices=[1, 2]) == ["0,1,2,3"]
    assert read_variable("CUDA_VISIBLE_DEVICES", 2, devices="auto") == ["0,1", "2,3"]
    assert gpus(devices=1, jobs=5) == ["0", "1", "2", "3", "0"]
    assert gpus(devices=1, accelerator="cpu") == [None] * 8

    # Only those that the user's environment shows are used.
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,GPU-7")
    assert gpus(devices=1) == ["3", "GPU-7"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "-1")
    assert list_visible_gpus() == []


def test_cores_are_divided_and_threads_that_the_user_has_set_stay(nvidia_smi, monkeypatch):
    nvidia_smi.write_text("#!/bin/sh\n")
    nvidia_smi.chmod(0o755)
    threads = partial(read_variable, "OMP_NUM_THREADS")
    assert threads(9, devices=1) == ["1"] * 8 and threads(3, devices=1) == ["2"] * 3
    assert threads(9, devices=2) == ["1"] * 4 and threads(9, devices=1, jobs=2) == ["4"] * 2

    # Jobs that go on with fewer beside them have the threads that they would have had.
    for waiting, num_environments in ((9, 4), (3, 3), (1, 1)):
        assert threads(9, devices=1, jobs=4, waiting=waiting) == ["2"] * num_environments
    assert read_variable("OMP_WAIT_POLICY", 2, devices=1) == ["PASSIVE"] * 2
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    assert threads(1) == [None] and threads(9, devices=1, jobs=1, threads=3) == ["3"]


def test_options_of_a_swept_group_are_left_to_the_jobs_and_all_else_stays():
    swept = ["-m", "method=lora,olora", "method.t=[a]"]
    assert to_hydra(swept) == ["-m", "method=lora,olora", "method.t=choice([a])"]
    single = ["-m", "method=lora", "method.t=1"]
    assert to_hydra(single) == single


class Counter:
    """A resolver that gives another value each time."""

    def __init__(self):
        self.numbers = itertools.count()

    def __call__(self):
        return next(self.numbers)


@pytest.fixture
def draws():
    OmegaConf.register_new_resolver("draw", Counter(), replace=True)
    yield
    OmegaConf.clear_resolver("draw")


def test_what_changes_between_processes_is_resolved_once_and_handed_on(sweep, draws):
    sweep.shared += ["+hydra.job.env_set.X=1", "hydra.run.dir=out/${draw:}/${now:%f}/s${seed}"]
    sweep.shared += [
        "tags=['t${draw:}',fixed]",
        "+callbacks.c.label=${draw:}",
        '+callbacks.c.owner="it\'s ${draw:}"',
    ]
    jobs = sweep.jobs("seed=1", "seed=${draw:}", "seed=2 ++callbacks.c.number=${hydra:job.num}")
    seeds = [job.config.seed for job in jobs]
    assert seeds[0] == 1 and seeds == [job.config.seed for job in jobs]
    assert len({job.folder.parent.name for job in jobs}) == 1  # one time in all

    # The process of a job composes the same config from its arguments, each time it is read.
    loader = sweep.context.config_loader
    for number, job in enumerate(jobs):
        config = loader.load_sweep_config(sweep.config, job.arguments)
        HydraConfig.instance().set_config(config)
        assert Path(config.hydra.run.dir) == job.folder and job.folder.name == f"s{job.config.seed}"
        for key in ("seed", "tags", "callbacks"):
            assert config[key] == job.config[key] == config[key]
        assert ("hydra.job.num=2" in job.arguments) == (number == 2)
    assert config.callbacks.c.number == 2


def test_jobs_without_such_values_get_their_folder_only(sweep):
    (job,) = sweep.jobs("seed=1")
    assert job.arguments[:-1] == list(job.overrides) and job.arguments[-1] == f"hydra.run.dir={job.folder}"


def test_the_processes_of_a_run_share_its_values(sweep, draws, monkeypatch):
    monkeypatch.delenv(resolved.RESOLVED, raising=False)
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    overrides = [*sweep.shared, "seed=${draw:}", "hydra.run.dir=out/${seed}-${draw:}", "hydra.mode=RUN"]
    loader = sweep.context.config_loader
    first = loader.load_sweep_config(sweep.config, overrides)
    second = loader.load_sweep_config(sweep.config, overrides)
    resolved.resolve_once(first)
    monkeypatch.setenv("LOCAL_RANK", "1")
    resolved.resolve_once(second)
    assert (first.seed, first.hydra.run.dir) == (second.seed, second.hydra.run.dir)
    assert first.seed == first.seed and first.hydra.run.dir.startswith(f"out/{first.seed}-")

    # Processes of several nodes, which no other has started, do not share the time.
    monkeypatch.delenv(resolved.RESOLVED)
    monkeypatch.setattr(resolved, "start", None)
    with pytest.raises(ValueError, match="differs between the processes of a run on several nodes"):
        resolved.format_start("%H")


def test_secrets_are_not_in_the_arguments_of_a_job(tmp_path):
    arguments = [
        "run.py",
        "--config-dir=x",
        "+callbacks.n.chat_token='can, ary'",
        "seed=1",
        "a.pin_password=12",
        "+x.uri=https://me:canary@host",
        "k.api_key=${oc.env:MINE}",
        "model.pad_token=<p>",
    ]
    safe_arguments, variables = take_out_secrets(arguments)
    assert variables == {
        "CPT_SECRET_0": "can, ary",
        "CPT_SECRET_1": "12",
        "CPT_SECRET_2": "https://me:canary@host",
    }
    assert safe_arguments[2] == "+callbacks.n.chat_token=${oc.env:CPT_SECRET_0}"
    assert "canary" not in " ".join(safe_arguments)
    for number in (0, 1, 3, 6, 7):  # those without a secret
        assert safe_arguments[number] == arguments[number]

    code = "import os, sys; print(sys.argv[1:], os.environ['CPT_SECRET_0'])"
    command = [sys.executable, "-c", code, "a.token=canary"]
    process, _ = start_process(command, tmp_path / "log", env=os.environ)
    assert process.wait(30) == 0
    assert "'a.token=${oc.env:CPT_SECRET_0}'" in (tmp_path / "log").read_text()
