"""Progress bars, and the heartbeat of a run: a daemon thread of rank 0 writes `progress.json` from them.

The file is for `cpt.status` and other watchers; a run never reads it back."""

from __future__ import annotations

import json
import logging
import os
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal, TextIO

import psutil
from pydantic import AfterValidator, TypeAdapter, ValidationError
from tqdm import tqdm

from cpt.core.messages import truncate
from cpt.core.preemption import Preempted

log = logging.getLogger(__name__)
PROGRESS_FILE = "progress.json"
ACTIVE = ("running", "waiting")
TICK_S = 1.0  # within which a new phase is written
PERIOD_S = 5.0  # at which anything else is written
STALE_S = 180.0  # age at which a heartbeat of another host no longer counts
DELAY = 10.0  # after which a log file tells how far something is that is mostly quick
CLOCK_S = 5.0  # by which a start time may differ
MAX_MESSAGE = 400  # characters


def utc_now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def age_s(time_utc: str) -> float:
    """Seconds since a time, 0 for one in the future. Raises ValueError if it is not a time or has no zone."""
    time_read = datetime.fromisoformat(time_utc)
    if time_read.tzinfo is None:
        raise ValueError(f"{time_utc} has no time zone")
    return max(0.0, (datetime.now(UTC) - time_read).total_seconds())


def start_time(pid: int) -> float:
    """When a process was started, in seconds since the machine's start."""
    return psutil.Process(pid).create_time() - psutil.boot_time()


State = Literal["running", "waiting", "finished", "preempted", "failed"]


def check_time(text: str) -> str:
    """The text. Raises ValueError if it is not a time."""
    age_s(text)
    return text


Time = Annotated[str, AfterValidator(check_time)]


@dataclass(frozen=True, kw_only=True)
class ProcessId:
    """A process on any host; `start_time` tells it from a later one with the same pid."""

    host: str
    pid: int
    start_time: float  # seconds since the machine's start: its clock may be set
    namespace: str = ""  # of pids, which containers of a host have their own of, and the machine's start

    @classmethod
    def current(cls) -> ProcessId:
        namespace = ""
        with suppress(OSError):
            namespace = os.readlink("/proc/self/ns/pid")
            namespace += f" {Path('/proc/sys/kernel/random/boot_id').read_text().strip()}"
        pid = os.getpid()
        return cls(host=socket.gethostname(), pid=pid, start_time=start_time(pid), namespace=namespace)

    def is_alive(self) -> bool | None:
        """None for a process of another host or container."""
        current = ProcessId.current()
        if (self.host, self.namespace) != (current.host, current.namespace):
            return None
        try:
            # Another process may have the pid by now. A zombie has ended, although its exit code was not
            # collected yet.
            is_same = abs(start_time(self.pid) - self.start_time) < CLOCK_S
            return is_same and psutil.Process(self.pid).status() != psutil.STATUS_ZOMBIE
        except (psutil.NoSuchProcess, ValueError, OverflowError):
            return False

    def is_stopped(self) -> bool:
        """Whether it is a living process of this machine that SIGSTOP or a debugger has stopped."""
        if not self.is_alive():
            return False
        try:
            status = psutil.Process(self.pid).status()
        except psutil.NoSuchProcess:
            return False
        return status in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)


@dataclass(frozen=True, kw_only=True)
class Heartbeat:
    """Contents of `progress.json`: times in UTC, None where unknown."""

    version: Literal[2] = 2
    state: State
    phase: str = ""
    stage: int | None = None  # the current or last domain, from 1; 0: the base
    stages: int | None = None
    step: int | float | None = None  # of the phase
    steps: float | None = None
    done: float | None = None  # fraction of the run's optimizer steps
    phase_eta_s: float | None = None
    run_eta_s: float | None = None
    why: str = ""  # what the run waits for, or how it ended
    began: Time  # start of this process's run
    written: Time = field(default_factory=utc_now)
    process: ProcessId = field(default_factory=ProcessId.current)

    @property
    def active(self) -> bool:
        return self.state in ACTIVE

    @property
    def alive(self) -> bool:
        """Whether its process is alive. A process of another host counts as alive while its heartbeat is
        fresh."""
        if not self.active:
            return False
        is_alive = self.process.is_alive()
        return age_s(self.written) < STALE_S if is_alive is None else is_alive

    def with_end(self, state: State, message: str) -> Heartbeat:
        """The last heartbeat of a run, its message on one line."""
        line = truncate(" ".join(message.split()), MAX_MESSAGE)
        return replace(self, state=state, why=line, written=utc_now(), phase_eta_s=None, run_eta_s=None)

    def write(self, folder: Path) -> None:
        """Atomic, but not synced to disk: after a crash of the machine the file is worth nothing."""
        partial = folder / f"{PROGRESS_FILE}.{os.getpid()}.partial"
        partial.write_text(json.dumps(asdict(self)) + "\n", encoding="utf-8")
        os.replace(partial, folder / PROGRESS_FILE)

    @classmethod
    def load(cls, folder: Path) -> Heartbeat | None:
        """None without one. Fields of later versions are left out. Raises ValueError if it is unreadable."""
        try:
            return heartbeat_format().validate_json((folder / PROGRESS_FILE).read_bytes(), strict=True)
        except FileNotFoundError:
            return None
        except ValidationError as error:
            first = error.errors()[0]
            key = ".".join(map(str, first["loc"])) or "its form"  # no key: it is not a JSON object
            raise ValueError(f"{PROGRESS_FILE} cannot be read: {key}: {first['msg']}") from None
        except OSError as error:
            raise ValueError(f"{PROGRESS_FILE} cannot be read: {error}") from None


@cache
def heartbeat_format() -> TypeAdapter[Heartbeat]:
    return TypeAdapter(Heartbeat)


def record_exit(folder: Path, state: State, message: str, *, run_start: str) -> None:
    """Records how a run ended that was started at a time and may have been killed before it could do so."""
    with suppress(OSError):
        stored = None
        with suppress(ValueError):
            stored = Heartbeat.load(folder)
        is_of_earlier_start = stored is not None and stored.written < run_start and not stored.alive
        if stored is None or is_of_earlier_start:
            stored = Heartbeat(state="running", began=run_start)
        elif stored.alive or not stored.active:
            return  # it has recorded its end itself
        stored.with_end(state, message).write(folder)


@dataclass(frozen=True, kw_only=True)
class Phase:
    """What a run is doing, and what comes after it."""

    name: str
    stage: int | None = None
    stages: int | None = None
    trains: bool = False  # whether its progress bar counts optimizer steps
    earlier_steps: int = 0  # optimizer steps of the domains before
    total_steps: int = 0  # of all domains
    remaining_s: float | None = None  # all later phases; None if unknown
    remaining_steps: int = 0  # that take as long as this phase's, not in remaining_s


class HeartbeatThread:
    """Writes the heartbeat of this process from the current phase and the innermost open progress bar."""

    folder: Path | None = None
    phase = Phase(name="")
    waiting = ""  # what the run waits for
    run_start = ""
    bars: list[tqdm] = []

    @contextmanager
    def beating(self, folder: Path) -> Iterator[None]:
        """Keeps `progress.json` in a run folder, and records at the end how the run ended."""
        self.folder = folder
        self.phase = Phase(name="starting")
        self.bars = []
        self.waiting = ""
        self.run_start = utc_now()
        self.warned = False
        self.write(self.read())
        stopped = threading.Event()
        thread = threading.Thread(target=self.write_changes, args=[stopped], daemon=True, name="heartbeat")
        thread.start()

        state: State = "finished"
        message = ""
        try:
            yield
        except Preempted as error:
            state = "preempted"
            message = str(error).split(";")[0]
            raise
        except BaseException as error:
            state = "failed"
            message = format_error(error)
            raise
        finally:
            # The thread first: a heartbeat that it writes later would replace the last one.
            stopped.set()
            thread.join()
            beat = self.read().with_end(state, message)
            if state == "finished":
                beat = replace(beat, phase="", done=1.0)
            self.write(beat)
            self.folder = None
            self.bars = []

    def write_changes(self, stopped: threading.Event) -> None:
        """Until it is stopped: writes a new phase or state, and the first step of a phase, at once; all else
        once a period."""
        last_state = None
        next_time = 0.0
        while not stopped.wait(TICK_S):
            beat = self.read()
            current_state = (beat.phase, bool(beat.step), beat.state)
            if current_state != last_state or time.monotonic() > next_time:
                last_state = current_state
                next_time = time.monotonic() + PERIOD_S
                self.write(beat)

    def read(self) -> Heartbeat:
        """The current heartbeat. Within a stage a closed bar counts too, without the time left."""
        # Read once: the run's thread may set another phase meanwhile.
        phase = self.phase
        bars = self.bars
        open_bars = [bar for bar in bars if not bar.disable]
        if open_bars:
            bar = open_bars[-1]
        elif bars and phase.stage is not None:
            bar = bars[-1]
        else:
            bar = None

        beat = Heartbeat(
            state="waiting" if self.waiting else "running",
            phase=phase.name,
            stage=phase.stage,
            stages=phase.stages,
            why=self.waiting,
            began=self.run_start,
        )
        if bar is not None:
            beat = replace(beat, step=bar.n, steps=bar.total)
            if phase.stage is None and " " in bar.desc:  # `tokenizing law`, where the phase is `tokenizing`
                beat = replace(beat, phase=bar.desc.strip(": "))
            if open_bars:
                beat = add_eta(beat, bar, phase)

        if phase.total_steps:
            steps_done: int | float = phase.earlier_steps
            if phase.trains:
                steps_done += beat.step or 0
            beat = replace(beat, done=round(min(1.0, steps_done / phase.total_steps), 4))
        return beat

    def write(self, beat: Heartbeat) -> None:
        """Warns once if it cannot: a run continues without its heartbeat."""
        try:
            if self.folder is not None:
                beat.write(self.folder)
        except OSError as error:
            if not self.warned:
                log.warning("Failed to write %s: %s", PROGRESS_FILE, error)
            self.warned = True

    @contextmanager
    def waiting_for(self, event: str) -> Iterator[None]:
        """Inside the context the run's status says that it waits for this."""
        self.waiting = event
        try:
            yield
        finally:
            self.waiting = ""

    def set_phase(self, phase: Phase | str) -> None:
        """Begins a phase; bars of the phase before no longer count."""
        self.phase = Phase(name=phase) if isinstance(phase, str) else phase
        self.bars = []


def add_eta(beat: Heartbeat, bar: tqdm, phase: Phase) -> Heartbeat:
    """A heartbeat with the seconds that the phase of an open bar and the whole run still take, if known."""
    rate = find_rate(bar)
    if not rate or not bar.total:
        return beat
    phase_eta_s = round(max(0.0, bar.total - bar.n) / rate, 1)
    if phase.remaining_s is None:
        return replace(beat, phase_eta_s=phase_eta_s)
    # What follows the phase: seconds that are known, and further steps at the rate of this one.
    later_s = phase.remaining_s + phase.remaining_steps / rate
    return replace(beat, phase_eta_s=phase_eta_s, run_eta_s=round(phase_eta_s + later_s, 1))


def find_rate(bar: tqdm) -> float | None:
    """Units per second of a bar, None if unknown."""
    timing = bar.format_dict
    if timing["rate"]:  # a smoothed one, which a bar has once it has been drawn again
        return timing["rate"]
    num_new = bar.n - bar.initial
    if num_new > 0 and timing["elapsed"]:
        return num_new / timing["elapsed"]
    return None


HEARTBEAT = HeartbeatThread()
heartbeat = HEARTBEAT.beating
waiting_for = HEARTBEAT.waiting_for
set_phase = HEARTBEAT.set_phase


def is_terminal() -> bool:
    """Whether standard error is a terminal with room for a bar: those of some CI systems are 0 columns wide,
    and a bar in them is nothing."""
    if not sys.stderr.isatty():
        return False
    try:
        return os.get_terminal_size(sys.stderr.fileno()).columns > 0
    except OSError:
        return False


class Lines:
    """A stream that is not a terminal, to which each state of a bar is written as a line of its own."""

    def __init__(self, stream: TextIO) -> None:
        self.stream = stream

    def write(self, text: str) -> None:
        line = text.replace("\x1b[A", "").strip()
        if line:
            self.stream.write(f"{line}\n")

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


class Silence(Lines):
    """A stream that shows nothing."""

    def write(self, text: str) -> None:
        pass


def make_progress_bar(
    label: str,
    *,
    total: int | None,
    hidden: bool,
    initial: int = 0,
    unit: str = "it",
    scale: bool = False,
    delay: float = 0.0,
    has_lines: bool = True,
    in_heartbeat: bool = True,
) -> tqdm:
    """A bar named `label` that ends at `total` units, begins at `initial`, and goes when it is closed.
    With `scale` units are counted in k, M, G; in a log file it is silent for `delay` seconds, and without
    `has_lines` altogether. The run's progress.json says where it is, unless the bar is not `in_heartbeat`."""
    stream: Any = sys.stderr
    if not is_terminal():
        stream = Lines(sys.stderr) if has_lines else Silence(sys.stderr)
    bar = tqdm(
        desc=label,
        total=total,
        initial=initial,
        unit=unit,
        unit_scale=scale,
        leave=False,
        disable=hidden,
        file=stream,
        mininterval=0.2 if is_terminal() else 10.0,
        maxinterval=60,
        delay=0.0 if is_terminal() else delay,
    )
    if in_heartbeat and HEARTBEAT.folder is not None and not bar.disable:
        # A new list, as the thread reads the list. A bar is disabled when it is closed.
        open_bars = [open_bar for open_bar in HEARTBEAT.bars if not open_bar.disable]
        HEARTBEAT.bars = [*open_bars, bar]
    return bar


def format_error(error: BaseException) -> str:
    """One line: the message of a foreseen error, with its type for any other."""
    from cpt.core.errors import find_reason  # imports Hydra, for which cpt.status does not wait
    from cpt.core.secrets import redact_text

    message = redact_text(find_reason(error))
    return message if isinstance(error, ValueError | OSError) else f"{type(error).__name__}: {message}"
