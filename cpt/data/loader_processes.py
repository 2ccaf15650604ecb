"""The processes of data loaders: where their sockets lie, what they do with signals, and how an error in
them reaches the run.

PyTorch notices that a loader process is gone. It does not notice that one is alive and could not send a
batch: the error ends in the thread of a queue, and the run would wait for this batch for ever."""

import atexit
import multiprocessing
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from multiprocessing import queues, util
from multiprocessing.process import current_process
from threading import current_thread, main_thread
from types import FrameType, TracebackType
from typing import Any

from torch._utils import ExceptionWrapper
from torch.utils.data import DataLoader
from torch.utils.data._utils import signal_handling

from cpt.core.preemption import ignore_signals

MAX_SOCKET_PATH = 107  # bytes of an AF_UNIX address, <linux/un.h>
SOCKET_SUFFIX = len("/pymp-12345678/listener-12345678")  # of multiprocessing, below the temporary folder
SHORT_FOLDERS = ("/tmp", "/var/tmp", "/dev/shm")
# The exit code of a loader process that lost a batch: EX_SOFTWARE of BSD's <sysexits.h>.
LOST_BATCH_EXIT_CODE = 70
EXIT_S = 1.0  # seconds between a broken connection and the end of its process
raise_every_error: Callable[[int, FrameType | None], Any]  # torch's handler of SIGCHLD


@atexit.register  # before multiprocessing's own, which sends a SIGTERM, which workers ignore once, and waits
def kill_workers() -> None:
    """Ends the processes of loaders that an error has left, so that this one can end."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # torch's handler would raise an error
    for process in multiprocessing.active_children():
        if process.daemon:
            process.kill()


class WatchedLoader(DataLoader):
    """A loader that names a process of its own which has ended, where PyTorch reports the broken connection
    to it: a tensor is fetched from the process that made it."""

    def __iter__(self) -> Any:
        batches = super().__iter__()
        return self.watch(batches) if self.num_workers else batches

    def watch(self, batches: Any) -> Iterator[Any]:
        """Raises RuntimeError, in PyTorch's words, for a loader process that has ended."""
        try:
            yield from batches
        except (OSError, EOFError) as error:
            # The connection breaks a moment before the process is gone and has an exit code.
            deadline = time.monotonic() + EXIT_S
            while time.monotonic() < deadline:
                for worker in batches._workers:
                    if worker.exitcode is not None:
                        raise RuntimeError(
                            f"DataLoader worker (pid {worker.pid}) ended: {describe_exit(worker.exitcode)}"
                        ) from error
                time.sleep(0.05)
            raise


def describe_exit(exit_code: int) -> str:
    """How a process ended, in the words by which PyTorch says that it was killed."""
    return "killed by signal: Killed" if exit_code == -signal.SIGKILL else f"exit code {exit_code}"


def prepare_loader_processes() -> None:
    """What this process needs before it starts loader processes. Raises ValueError as `use_short_sockets`."""
    use_short_sockets()
    if current_thread() is not main_thread():
        return
    signal_handling._set_SIGCHLD_handler()  # once per process: a further call changes nothing
    raise_error = signal.getsignal(signal.SIGCHLD)
    if raise_error is raise_first_error or not callable(raise_error):
        return
    global raise_every_error
    raise_every_error = raise_error
    signal.signal(signal.SIGCHLD, raise_first_error)


def raise_first_error(number: int, frame: FrameType | None) -> None:
    """The handler of SIGCHLD: raises RuntimeError for the first loader process that failed. Later ones are
    ignored: they end with the run, and an error would interrupt its last writes."""
    try:
        raise_every_error(number, frame)
    except RuntimeError:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        raise


def use_short_sockets() -> None:
    """Moves the sockets by which loader processes hand over tensors to a short folder, where TMPDIR is too
    long for them. Raises ValueError without such a folder."""
    temporary = tempfile.gettempdir()
    # Processes inherit these settings, spawned or forked.
    settings: dict[str, Any] = vars(current_process())["_config"]
    if "tempdir" in settings or len(os.fsencode(temporary)) + SOCKET_SUFFIX <= MAX_SOCKET_PATH:
        return

    for parent in SHORT_FOLDERS:
        try:
            folder = tempfile.mkdtemp(prefix="cpt-", dir=parent)
        except OSError:
            continue
        util.Finalize(None, shutil.rmtree, args=(folder, True), exitpriority=-100)
        settings["tempdir"] = folder
        return
    longest = MAX_SOCKET_PATH - SOCKET_SUFFIX
    raise ValueError(
        f"TMPDIR={temporary} is invalid: too long for the sockets of loader processes. "
        f"Allowed: at most {longest} bytes, or trainer.num_workers=0"
    )


def start_loader_process(worker: int) -> None:
    """The first call in a loader process."""
    ignore_signals()
    sys.excepthook = ignore_broken_connection
    queues.Queue._on_queue_feeder_error = report_unsent_batch  # type: ignore[attr-defined]


def ignore_broken_connection(
    kind: type[BaseException], error: BaseException, traceback: TracebackType | None
) -> None:
    """Replaces sys.excepthook, to which the thread that hands over tensors reports a run that has ended."""
    if not issubclass(kind, OSError | EOFError):
        sys.__excepthook__(kind, error, traceback)


def report_unsent_batch(queue: Any, error: Exception, batch: Any) -> None:
    """Sends the error in the place of a batch that could not be sent. `batch` is (number, tensors); where it
    is bytes already, its number is lost and the process ends, which the run notices."""
    message = f"a loader process cannot send a batch: {error}"
    if isinstance(batch, tuple):
        number = batch[0]
        failure = OSError(f"{message} (trainer.num_workers)")
        wrapper = ExceptionWrapper((OSError, failure, None), where="in DataLoader worker process")
        queue.put((number, wrapper))
    else:
        print(f"cpt: {message}", file=sys.stderr, flush=True)
        os._exit(LOST_BATCH_EXIT_CODE)
