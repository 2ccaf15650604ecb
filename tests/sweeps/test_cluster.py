"""The jobs of a sweep on a cluster, without one: what is asked of a scheduler, how each job ends, what an
earlier start left in the queue, and what a preempted job does. tests/campaigns/slurm.py tries it on a real
SLURM."""

import json
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.types import HydraContext, RunMode
from omegaconf import OmegaConf

from cpt.core.preemption import GO_ON
from cpt.sweeps import cluster, launcher
from cpt.sweeps.cluster import (
    ClusterJob,
    Collector,
    LocalQueue,
    SlurmQueue,
    Submission,
    SubmissionLog,
    find_queued,
    format_jobs,
)
from cpt.sweeps.cluster_task import ClusterTask, JobEnd, parse_job
from cpt.sweeps.jobs import BASIC_SWEEPER, Job, summarize_jobs
from cpt.sweeps.launcher import SubmititLauncher
from cpt.sweeps.progress import JobProgress
from tests.conftest import ROOT, SMALL

submitit = pytest.importorskip("submitit")


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    for name, seconds in {"POLL_S": 0.01, "QUEUE_S": 0.02, "GONE_S": 0.05, "UNREADABLE_S": 0.05}.items():
        monkeypatch.setattr(cluster, name, seconds)


class FakeQueue:
    """A scheduler that says one answer after another, the last for ever."""

    cluster = "slurm"

    def __init__(self, *answers, final=None):
        self.answers = list(answers)
        self.final = final or {}

    def active(self):
        answer = self.answers[0]
        if len(self.answers) > 1:
            self.answers.pop(0)
        if answer is None:
            return None
        return {job: (state, "/work") for job, state in answer.items()}

    def final_state(self, job):
        return self.final.get(job, "")

    def cancel_command(self, jobs):
        return SlurmQueue().cancel_command(jobs)


@pytest.fixture
def submitted(tmp_path, monkeypatch):
    """Makes a job with submitit's handle of it, and writes its result."""
    monkeypatch.chdir(tmp_path)

    def make(number, *, result=None, text=None, errors=None):
        job = Job(number, (f"x={number}",), f"x={number}", OmegaConf.create(), Path(f"run-{number}"))
        handle = submitit.SlurmJob(folder=tmp_path / "jobs" / "%j", job_id=f"38_{number}")
        handle.paths.folder.mkdir(parents=True)
        if result is not None:
            handle.paths.result_pickle.write_bytes(pickle.dumps(result))
        if text is not None:
            handle.paths.result_pickle.write_bytes(text)
        if errors is not None:
            handle.paths.stderr.write_text(errors)
        return ClusterJob(job, handle)

    return make


def wait(queue, *cluster_jobs):
    Collector(cluster_jobs, queue, [], JobProgress(num_jobs=len(cluster_jobs))).wait()
    return [cluster_job.job for cluster_job in cluster_jobs]


def finish(cluster_job, monkeypatch):
    folder = cluster_job.job.folder
    folder.mkdir()
    (folder / "scores.json").write_text('{"run": {"finished": true}}')
    monkeypatch.setattr(cluster, "is_finished_already", lambda config, folder: folder.exists())


def test_each_job_ends_for_itself(submitted, monkeypatch):
    jobs = [
        submitted(0, result=("success", JobEnd(0, 0))),
        submitted(1, result=("success", JobEnd(1, 0))),
        submitted(2, result=("success", JobEnd(GO_ON, 0))),
        submitted(3, result=("success", JobEnd(GO_ON, 0, "cancelled"))),
        submitted(4, result=("success", JobEnd(GO_ON, 0, "it reached its time limit too often"))),
        submitted(5, result=("error", "Traceback (most recent call last):\n  …\nOSError: no such node\n")),
        submitted(6),
        submitted(7),
        submitted(8, errors="slurmstepd: error\nModuleNotFoundError: No module named 'cpt'\n"),
        submitted(9, text=b"\x80\x05 torn"),
        submitted(10, text=b"a damaged pickle"),
        submitted(11, result=("success", (0, 0))),  # of another version
    ]
    finish(jobs[0], monkeypatch)
    finish(jobs[10], monkeypatch)
    final = {"38_6": "CANCELLED", "38_7": "TIMEOUT", "38_8": "FAILED"}
    finished_jobs = wait(FakeQueue({}, final=final), *jobs)
    assert [job.state for job in finished_jobs] == [
        "finished",
        "failed",
        "preempted",
        "failed",
        "preempted",
        "failed",
        "failed",
        "preempted",
        "failed",
        "failed",
        "finished",
        "failed",
    ]

    messages = [job.failure() for job in finished_jobs]
    assert messages[3] == "failed (cancelled): job 38_3 was cancelled"
    assert messages[4] == "preempted: job 38_4: it reached its time limit too often"
    assert messages[5] == "failed (lost): OSError: no such node"
    assert messages[6] == "failed (cancelled): job 38_6 was cancelled"
    assert messages[7] == "preempted: job 38_7 reached its time limit (hydra.launcher.timeout_min)"
    assert "ended as FAILED without a result: ModuleNotFoundError: No module named 'cpt'" in messages[8]
    assert "38_9_0_result.pkl is unreadable: " in messages[9] and "unreadable: tuple in it" in messages[11]
    lines = summarize_jobs(finished_jobs)
    assert lines[0] == "12 jobs: 2 finished, 3 preempted, 7 failed"
    assert not any("console.log" in line for line in lines)  # none of them has one


def test_a_requeued_job_is_waited_for_and_logged_once(submitted, caplog):
    caplog.set_level("INFO")
    job = submitted(0)
    queue = FakeQueue(
        {"38_0": "PENDING"},
        {"38_0": "RUNNING"},
        {"38_0": "RUNNING"},
        {},
        {"38_0": "PENDING"},
        None,
        {"38_0": "RUNNING"},
        {},
    )

    def end_job():
        """Writes the result once the queue has given all its answers."""
        while len(queue.answers) > 1:
            time.sleep(0.01)
        job.handle.paths.result_pickle.write_bytes(pickle.dumps(("success", JobEnd(1, 0))))

    threading.Thread(target=end_job).start()
    # A job that is in no queue for less than this is not taken for lost.
    cluster.GONE_S = 10.0
    wait(queue, job)
    lines = [record.getMessage() for record in caplog.records]
    assert lines[-1] == "Job #0 x=0: failed (exit 1): (no output) (1 of 1 job ended)"
    assert lines[:-1] == [
        "Job #0 x=0: running (38_0), run-0/console.log",
        "Job #0 x=0: queued again (38_0)",
        "The scheduler does not answer; waiting",
        "The scheduler answers again",
        "Job #0 x=0: running (38_0), run-0/console.log",
    ]


def test_an_unknown_job_is_not_waited_for_and_a_silent_scheduler_ends_none(submitted):
    (job,) = wait(FakeQueue(None, None, {}), submitted(0))
    assert job.failure() == ("failed (lost): job 38_0 left no result, and the scheduler no longer knows it")


def test_a_signal_leaves_the_jobs_in_the_queue_and_names_them(submitted, caplog):
    jobs = [submitted(number) for number in (0, 1, 2, 5)]
    with pytest.raises(SystemExit) as system_exit:
        Collector(jobs, FakeQueue({}), [signal.SIGINT], JobProgress(num_jobs=4)).wait()
    assert system_exit.value.code == GO_ON
    assert caplog.messages == [
        "Stopping on SIGINT; 4 jobs still in the queue: 38_[0-2,5]; scancel 38 ends them; "
        "the same command waits for them"
    ]
    assert format_jobs(["7", "38_3", "40_0", "40_1"]) == "7, 38_3, 40_[0-1]"


def test_what_an_earlier_start_has_in_the_queue_is_found(submitted, tmp_path):
    log = SubmissionLog(tmp_path / "outputs" / ".jobs" / "submitted.jsonl")
    assert log.latest() == {}
    jobs = [submitted(number).job for number in range(6)]

    def make_submission(number, *, overrides=None, folder="/work", cluster="slurm", job=None):
        overrides = overrides or (f"x={number}",)
        return Submission(f"run-{number}", overrides, cluster, job or f"38_{number}", folder)

    earlier = make_submission(0, job="12")  # of the same job: the last submission counts
    with_other_options = make_submission(2, overrides=("x=2", "y=1"))
    log.extend([earlier, make_submission(0), make_submission(1), with_other_options])
    elsewhere = make_submission(3, folder="/elsewhere")
    log.extend([elsewhere, make_submission(4, cluster="local"), make_submission(5)])
    # The last line is that of a start which was killed while it wrote.
    with log.path.open("a") as file:
        file.write('{"run": "run-5", "job": "99')

    states = dict.fromkeys(("38_0", "38_2", "38_3", "38_4", "38_5", "12"), "RUNNING")
    queued, queued_with_other_options = find_queued(jobs, log.latest(), FakeQueue(states))
    assert {job.number: submission.job for job, submission in queued.items()} == {0: "38_0", 5: "38_5"}
    ids = {job.number: submission.job for job, submission in queued_with_other_options.items()}
    assert ids == {2: "38_2"}
    assert find_queued(jobs, {}, FakeQueue(None)) == ({}, {})  # nothing to ask
    with pytest.raises(ValueError, match="squeue does not answer"):
        find_queued(jobs, log.latest(), FakeQueue(None))


@pytest.fixture
def write_program(tmp_path, monkeypatch):
    """Stands for SLURM's programs: shell scripts first on the path."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder), prepend=":")

    def write(name, script):
        (folder / name).write_text(f"#!/bin/bash\n{script}\n")
        (folder / name).chmod(0o755)

    return write


def test_slurm_is_asked_by_squeue_sacct_and_scontrol(write_program):
    write_program("squeue", "echo '38_0|RUNNING|/home/a|b'; echo '41|PENDING|/home'")
    write_program("sacct", "exit 1")  # no accounting
    write_program(
        "scontrol",
        "echo 'JobId=5 ArrayJobId=5 JobState=NODE_FAIL Reason=None'; echo 'JobId=6 JobState=RUNNING'",
    )
    queue = SlurmQueue()
    assert queue.active() == {"38_0": ("RUNNING", "/home/a|b"), "41": ("PENDING", "/home")}
    assert queue.final_state("38_0") == "NODE_FAIL"
    write_program("sacct", "echo 'CANCELLED by 1000'")
    assert queue.final_state("38_0") == "CANCELLED"
    for name in ("sacct", "scontrol", "squeue"):
        write_program(name, "echo error >&2; exit 1")
    assert queue.final_state("38_0") == "" and queue.active() is None
    assert queue.cancel_command(["38_0", "38_1", "41"]) == "scancel 38 41"
    assert parse_job("") == {}


RUN = """
import signal, sys, time
def save(number, frame):
    print("saved", flush=True)
    sys.exit(75)
signal.signal(signal.SIGTERM, save)
open("ready", "w").close()
time.sleep(30)
"""


@pytest.fixture
def run_task(tmp_path, monkeypatch):
    """Calls a task to which a scheduler sends a signal as soon as its run is ready."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SLURM_JOB_ID", "5")
    monkeypatch.setenv("SLURM_PROCID", "0")
    previous_handler = signal.signal(signal.SIGTERM, lambda *_: None)  # stands for submitit's

    def call(*, number=signal.SIGTERM, times=2):
        def send_signals():
            while not (tmp_path / "ready").exists():
                time.sleep(0.01)
            for _ in range(times):  # as SLURM does at the end of a grace time
                os.kill(os.getpid(), number)
                time.sleep(0.2)

        sender = threading.Thread(target=send_signals)
        sender.start()
        try:
            return ClusterTask((sys.executable, "-S", "-c", RUN), tmp_path, Path("console.log"), 20.0)()
        finally:
            sender.join()

    yield call
    signal.signal(signal.SIGTERM, previous_handler)


@pytest.mark.parametrize(
    ("state", "requeue_exit", "end"),  # None: it is queued again, and leaves no result
    [
        ("RUNNING", "exit 0", None),  # preempted, with time to spare
        ("RUNNING", "exit 1", JobEnd(GO_ON, 0)),  # the cluster queues no job again
        ("CANCELLED", "exit 0", JobEnd(GO_ON, 0, "cancelled")),
        ("PENDING", "exit 1", None),  # SLURM queues it again itself
        ("", "exit 0", JobEnd(GO_ON, 0)),
    ],
)
def test_a_preempted_job_is_queued_again_and_a_cancelled_one_is_not(
    run_task, write_program, tmp_path, state, requeue_exit, end
):
    requeue = f'echo "$2" >> {tmp_path}/requeued; {requeue_exit}'
    show = f"echo JobId=5 JobState={state}" if state else "exit 1"
    write_program("scontrol", f'if [ "$1" = requeue ]; then {requeue}; else {show}; fi')
    if end is None:
        with pytest.raises(SystemExit):
            run_task()
    else:
        assert run_task() == end

    # One signal reaches the run, however many come.
    assert (tmp_path / "console.log").read_text() == "saved\n"
    assert (tmp_path / "requeued").exists() == (state == "RUNNING")


def test_too_many_time_limits_are_no_failure(run_task):
    def refuse(*_):  # submitit's handler of its last warning
        raise submitit.core.utils.UncompletedJobError("Job not requeued because: timed-out too many times.")

    previous_handler = signal.signal(signal.SIGUSR2, refuse)
    try:
        end = run_task(number=signal.SIGUSR2, times=1)
    finally:
        signal.signal(signal.SIGUSR2, previous_handler)
    assert end.code == GO_ON and "hydra.launcher.max_num_timeout" in end.stopped


class FakeExecutor:
    """Takes arrays and writes a result for each of their jobs, or refuses."""

    def __init__(self, folder, *, refuses=(), words="error: Batch job submission failed: Invalid"):
        self.folder = folder
        self.refuses = refuses  # numbers of arrays, from 1
        self.words = words  # of sbatch that refuses
        self.arrays = []  # their sizes

    def submit_array(self, tasks):
        self.arrays.append(len(tasks))
        array = len(self.arrays)
        if array in self.refuses:
            raise submitit.core.utils.FailedJobError(f"sbatch: {self.words}\n")

        handles = []
        for number, task in enumerate(tasks):
            handle = submitit.SlurmJob(folder=self.folder, job_id=f"{array}_{number}")
            handles.append(handle)
            handle.paths.folder.mkdir(parents=True)
            folder = task.folder / task.console.parent
            folder.mkdir(parents=True)
            (folder / "scores.json").write_text('{"run": {"finished": true}}')
            handle.paths.result_pickle.write_bytes(pickle.dumps(("success", JobEnd(0, 0))))
        return handles


@pytest.fixture
def run_sweep(tmp_path, monkeypatch):
    """A launcher whose sweep has so many jobs, without a config of their own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(launcher, "format_sweep_command", lambda config: ["run.py"])
    monkeypatch.setattr(launcher, "SlurmQueue", lambda: FakeQueue({}))

    def run(num_jobs, **options):
        swept_launcher = SubmititLauncher(
            cluster="slurm", submitit_folder=str(tmp_path / "jobs" / "%j"), gpus_per_node=1
        )
        swept_launcher.config = OmegaConf.create({"hydra": {"sweep": {"dir": "outputs/many"}}})
        executor = FakeExecutor(tmp_path / "jobs" / "%j", **options)
        monkeypatch.setattr(swept_launcher, "make_executor", lambda: executor)
        jobs = []
        for number in range(num_jobs):
            override = f"x={number}"
            jobs.append(Job(number, (override,), override, OmegaConf.create(), Path(f"run-{number}")))
        swept_launcher.run(jobs, jobs, 0)
        return jobs, executor

    return run


def test_many_jobs_are_arrays_that_slurm_takes_and_a_refused_array_fails_alone(
    run_sweep, monkeypatch, tmp_path
):
    monkeypatch.setattr(launcher, "MAX_ARRAY_JOBS", 80)
    jobs, executor = run_sweep(200, refuses={3})
    assert executor.arrays == [80, 80, 40]
    assert [job.state for job in jobs] == ["finished"] * 160 + ["failed"] * 40
    assert jobs[199].failure() == "failed (refused): sbatch: error: Batch job submission failed: Invalid"
    recorded = (tmp_path / "outputs" / "many" / ".jobs" / "submitted.jsonl").read_text().splitlines()
    assert len(recorded) == 160 and json.loads(recorded[81])["job"] == "2_1"


def test_what_sbatch_refuses_at_once_is_one_line_with_the_options_that_ask(run_sweep):
    message = (
        r"sbatch: error: .* Invalid\. Allowed: .*gpus_per_node \(is 1\); without GPUs hydra.launcher.gpus_per"
    )
    with pytest.raises(ValueError, match=message):
        run_sweep(3, refuses={1})


@pytest.mark.parametrize(
    "words",
    [
        "fatal: Could not establish a configuration source",
        "error: Batch job submission failed: Unable to contact slurm controller (connect failure)",
    ],
)
def test_a_machine_without_a_cluster_is_not_asked_for_other_resources(run_sweep, words):
    with pytest.raises(ValueError, match="hydra/launcher=slurm is invalid") as error:
        run_sweep(3, refuses={1}, words=words)
    assert words in str(error.value) and "`sinfo`" in str(error.value) and "mem_gb" not in str(error.value)


def test_options_are_checked_and_requeue_is_an_option_of_sbatch(write_program, tmp_path):
    write_program("srun", "exit 1")
    write_program("sbatch", "exit 1")

    def write_script(**options):
        """The file that sbatch gets."""
        slurm_launcher = SubmititLauncher(cluster="slurm", submitit_folder=str(tmp_path / "%j"), **options)
        slurm_launcher.check()
        return slurm_launcher.make_executor()._executor._make_submission_file_text("true", "x")

    text = write_script(
        requeue=True, name="first", partition="gpu", timeout_min=600, comment=None, tasks_per_node=2
    )
    for option in (
        "requeue",
        "job-name=first",
        "partition=gpu",
        "time=600",
        "ntasks-per-node=2",
        "signal=USR2@120",
    ):
        assert f"#SBATCH --{option}\n" in text
    assert "comment" not in text

    # An option of sbatch that is no option of the launcher is a further parameter.
    mail = {"mail-type": "END"}
    assert "--no-requeue" in write_script(requeue=False, additional_parameters=mail)
    text = write_script(additional_parameters=mail)
    assert "mail-type=END" in text and "requeue" not in text
    for options, message in (
        ({"partitoin": "gpu"}, "Unknown argument 'partitoin'"),
        ({"timeout_min": "long"}, '"timeout_min" expected type'),
        ({"requeue": "often"}, "hydra.launcher.requeue=often is invalid"),
        ({"signal_delay_s": 0}, "hydra.launcher.signal_delay_s=0 is invalid"),
    ):
        with pytest.raises(ValueError, match=message) as raised:
            write_script(**options)
        assert "\n" not in str(raised.value)


def test_without_slurm_the_launcher_says_so(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ValueError, match="this machine has no sbatch and srun"):
        SubmititLauncher(cluster="slurm", submitit_folder="jobs/%j").check()


def test_a_sweep_inside_an_allocation_submits_as_from_outside(monkeypatch):
    variables = {
        "SLURM_JOB_ID": "7",
        "SLURM_NTASKS": "4",
        "SLURM_CONF": "/etc/slurm.conf",
        "SBATCH_ACCOUNT": "a",
    }
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with cluster.outside_allocation():
        assert [name for name in variables if name in os.environ] == ["SLURM_CONF", "SBATCH_ACCOUNT"]
    assert all(os.environ[name] == value for name, value in variables.items())


TASK = """
import os, sys, time
if "seed=3" in sys.argv:
    sys.exit("cpt: no")
if "seed=4" in sys.argv:
    time.sleep(60)
(folder,) = [name for name in os.listdir("outputs/default") if "seed-2" in name]
open("outputs/default/" + folder + "/scores.json", "w").write('{"run": {"finished": true}}')
"""


@pytest.fixture
def launch_locally(small, corpora, cache, tmp_path, monkeypatch):
    """Launches a sweep by submitit's executor on this machine, whose jobs do what TASK says."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["run.py"])
    monkeypatch.setattr(launcher, "format_sweep_command", lambda config: [sys.executable, "-S", "-c", TASK])
    shared = [
        "domains=texts",
        f"domains.root={corpora}",
        f"cache_dir={cache}",
        "hydra/launcher=slurm_local",
        *SMALL,
    ]
    loader = GlobalHydra.instance().config_loader()
    config = loader.load_configuration("config", shared, RunMode.MULTIRUN)

    def launch(*overrides):
        options = config.hydra.launcher
        local_launcher = SubmititLauncher(
            cluster=options.cluster, submitit_folder=options.submitit_folder, timeout_min=options.timeout_min
        )
        config.hydra.sweeper._target_ = BASIC_SWEEPER
        context = HydraContext(config_loader=loader, callbacks=None)
        local_launcher.setup(hydra_context=context, task_function=None, config=config)
        return local_launcher.launch([[*shared, override] for override in overrides], 0)

    yield launch
    HydraConfig.instance().cfg = None


@pytest.mark.slow
def test_a_sweep_by_submitit_on_this_machine(launch_locally, capsys, tmp_path):
    with pytest.raises(SystemExit) as system_exit:
        launch_locally("seed=2", "seed=3")
    assert system_exit.value.code == 1
    assert "1 of 2 jobs failed: #1 seed=3" in capsys.readouterr().err
    names = {path.name for path in (tmp_path / "outputs" / "default").iterdir()}
    assert not any(name.isdigit() for name in names)  # no stray folders beside the runs


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # its process
def test_jobs_of_a_submitter_that_died_are_waited_for(launch_locally, tmp_path, monkeypatch, caplog):
    """As after kill -9: the second start finds them in the queue and submits nothing."""
    caplog.set_level("INFO")
    # The first start submits a job, and dies before it waits.
    monkeypatch.setattr(Collector, "wait", lambda self: None)
    with pytest.raises(SystemExit):
        launch_locally("seed=4")

    # The second start: a job takes a minute, so that its end is not waited for.
    def end_jobs(self):
        for cluster_job in self.jobs:
            cluster_job.note_end(JobEnd(GO_ON, 0))

    monkeypatch.undo()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["run.py"])
    monkeypatch.setattr(launcher, "format_sweep_command", lambda config: pytest.fail("submitted again"))
    (job,) = LocalQueue().active()
    monkeypatch.setattr(Collector, "wait", end_jobs)
    with pytest.raises(SystemExit) as system_exit:
        launch_locally("seed=4")
    assert system_exit.value.code == GO_ON
    assert any(f"submitted before ({job})" in message for message in caplog.messages)
    os.kill(int(job), signal.SIGTERM)


def test_the_help_of_flat_keys(tmp_path):
    command = [
        sys.executable,
        str(ROOT / "run.py"),
        "-m",
        "hydra/launcher=slurm",
        "hydra.launcher.partitio=gpu",
    ]
    process = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert process.returncode == 1 and len(process.stderr.splitlines()) == 1
    assert "hydra.launcher.partitio is invalid" in process.stderr and "partition" in process.stderr
