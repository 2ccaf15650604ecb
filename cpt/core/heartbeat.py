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

from cpt.core.preemption import Preempted

log = logging.getLogger(__name__)
PROGRESS_FILE = "progress.json"
ACTIVE = ("running", "waiting")
TICK_S, PERIOD_S = 1.0, 5.0  # a new phase is written within a tick, anything else once a period
STALE_S = 180.0  # age at which a heartbeat of another host no longer counts
DELAY = 10.0  # after which a log file tells how far something is that is mostly quick
CLOCK_S = 5.0  # by which a start time may differ
MAX_MESSAGE = 400  # characters


def utc_now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def age_s(time_utc: str) -> float:
    """Seconds since a time, 0 for one in the future. Raises ValueError if it is no time or has no zone."""
    then = datetime.fromisoformat(time_utc)
    if then.tzinfo is None:
        raise ValueError(f"{time_utc} has no time zone")
    return max(0.0, (datetime.now(UTC) - then).total_seconds())


def start_time(pid: int) -> float:
    """When a process was started, in seconds since the machine's start."""
    return psutil.Process(pid).create_time() - psutil.boot_time()


State = Literal["running", "waiting", "finished", "preempted", "failed"]
Time = Annotated[str, AfterValidator(lambda text: text if age_s(text) >= 0 else text)]


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
        here = ProcessId.current()
        if (self.host, self.namespace) != (here.host, here.namespace):
            return None
        try:
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
        """Whether its process is at work; one of another host is as long as it is heard of."""
        alive = self.active and self.process.is_alive()
        return age_s(self.written) < STALE_S if alive is None else alive

    def ended(self, state: State, why: str) -> Heartbeat:
        """The last heartbeat of a run, its message on one line."""
        line = " ".join(why.split())
        why = line if len(line) <= MAX_MESSAGE else f"{line[: MAX_MESSAGE - 1]}…"
        return replace(self, state=state, why=why, written=utc_now(), phase_eta_s=None, run_eta_s=None)

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
            place = ".".join(map(str, first["loc"])) or "its form"
            raise ValueError(f"{PROGRESS_FILE} cannot be read: {place}: {first['msg']}") from None
        except OSError as error:
            raise ValueError(f"{PROGRESS_FILE} cannot be read: {error}") from None


@cache
def heartbeat_format() -> TypeAdapter[Heartbeat]:
    return TypeAdapter(Heartbeat)


def record_exit(folder: Path, state: State, why: str, *, began: str) -> None:
    """Records how a run ended that began at a time and may have been killed before it could do so."""
    with suppress(OSError):
        last = None
        with suppress(ValueError):
            last = Heartbeat.load(folder)
        if last is None or (last.written < began and not last.alive):  # of an earlier start
            last = Heartbeat(state="running", began=began)
        elif last.alive or not last.active:
            return  # it has recorded its end itself
        last.ended(state, why).write(folder)


@dataclass(frozen=True, kw_only=True)
class Phase:
    """What a run is doing, and what comes after it."""

    name: str
    stage: int | None = None
    stages: int | None = None
    trains: bool = False  # whether its progress bar counts optimizer steps
    done: int = 0  # optimizer steps of the domains before
    total: int = 0  # of all domains
    remaining_s: float | None = None  # all later phases; None if unknown
    remaining_steps: int = 0  # that take as long as this phase's, not in remaining_s


class HeartbeatThread:
    """Writes the heartbeat of this process from the current phase and the innermost open progress bar."""

    folder: Path | None = None
    phase, waiting, began = Phase(name=""), "", ""
    bars: list[tqdm] = []

    @contextmanager
    def beating(self, folder: Path) -> Iterator[None]:
        """Keeps `progress.json` in a run folder, and records at the end how the run ended."""
        self.folder, self.phase, self.bars, self.waiting = folder, Phase(name="starting"), [], ""
        self.began, self.warned = utc_now(), False
        self.write(self.read())
        stopped = threading.Event()
        end: tuple[State, str] = ("finished", "")

        def work() -> None:
            """Writes a new phase or state, and the first step of a phase, at once; all else once a period."""
            last, written = None, 0.0
            while not stopped.wait(TICK_S):
                beat = self.read()
                if (now := (beat.phase, bool(beat.step), beat.state)) != last or time.monotonic() > written:
                    last, written = now, time.monotonic() + PERIOD_S
                    self.write(beat)

        thread = threading.Thread(target=work, daemon=True, name="heartbeat")
        thread.start()
        try:
            yield
        except Preempted as error:
            end = ("preempted", str(error).split(";")[0])
            raise
        except BaseException as error:
            end = ("failed", format_error(error))
            raise
        finally:
            stopped.set()
            thread.join()
            last = self.read().ended(*end)
            self.write(replace(last, phase="", done=1.0) if end[0] == "finished" else last)
            self.folder, self.bars = None, []

    def read(self) -> Heartbeat:
        """The current heartbeat. Within a stage a closed bar counts too, without the time left."""
        phase, bars = self.phase, self.bars
        open_bars = [bar for bar in bars if not bar.disable]
        bar = open_bars[-1] if open_bars else bars[-1] if bars and phase.stage is not None else None
        beat = Heartbeat(
            state="waiting" if self.waiting else "running",
            phase=phase.name,
            stage=phase.stage,
            stages=phase.stages,
            why=self.waiting,
            began=self.began,
        )
        if bar is not None:
            shown, new = bar.format_dict, bar.n - bar.initial
            beat = replace(beat, step=bar.n, steps=bar.total)
            if phase.stage is None and " " in bar.desc:  # `tokenising law`, where the phase is `tokenising`
                beat = replace(beat, phase=bar.desc.strip(": "))
            rate = shown["rate"] or (new / shown["elapsed"] if new > 0 and shown["elapsed"] else None)
            if rate and bar.total and open_bars:
                eta = round(max(0.0, bar.total - bar.n) / rate, 1)
                beat = replace(beat, phase_eta_s=eta)
                if phase.remaining_s is not None:
                    later = phase.remaining_s + phase.remaining_steps / rate
                    beat = replace(beat, run_eta_s=round(eta + later, 1))
        if phase.total:
            done = (phase.done + (beat.step or 0) * phase.trains) / phase.total
            beat = replace(beat, done=round(min(1.0, done), 4))
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
    def waiting_for(self, what: str) -> Iterator[None]:
        self.waiting = what
        try:
            yield
        finally:
            self.waiting = ""

    def set_phase(self, phase: Phase | str) -> None:
        self.phase, self.bars = Phase(name=phase) if isinstance(phase, str) else phase, []


HEARTBEAT = HeartbeatThread()
heartbeat, waiting_for, set_phase = HEARTBEAT.beating, HEARTBEAT.waiting_for, HEARTBEAT.set_phase


class Lines:
    """A stream that is not a terminal, to which each state of a bar is written as a line of its own."""

    def __init__(self, stream: TextIO) -> None:
        self.stream = stream

    def write(self, text: str) -> None:
        if state := text.replace("\x1b[A", "").strip():
            self.stream.write(f"{state}\n")

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


def progress_bar(
    label: str,
    *,
    total: int | None,
    hidden: bool,
    done: int = 0,
    unit: str = "it",
    scale: bool = False,
    delay: float = 0.0,
) -> tqdm:
    """A bar named `label` that ends at `total` units, of which some are done, and goes when it is closed.
    With `scale` units are counted in k, M, G; in a log file it is silent for `delay` seconds. The run's
    progress.json says where it is."""
    on_terminal = sys.stderr.isatty()
    how: dict[str, Any] = {"unit": unit, "unit_scale": scale, "leave": False, "disable": hidden}
    how |= {"file": sys.stderr, "mininterval": 0.2} if on_terminal else {"file": Lines(sys.stderr)}
    how |= {} if on_terminal else {"mininterval": 10.0, "delay": delay}
    bar = tqdm(desc=label, total=total, initial=done, maxinterval=60, **how)
    if HEARTBEAT.folder is not None and not bar.disable:  # until it is closed
        HEARTBEAT.bars = [*(each for each in HEARTBEAT.bars if not each.disable), bar]  # the thread reads it
    return bar


def format_error(error: BaseException) -> str:
    """One line: the message of a foreseen error, with its type for any other."""
    from cpt.core.errors import reason  # imports Hydra, for which cpt.status does not wait
    from cpt.core.secrets import redact_text

    message = redact_text(reason(error))
    return message if isinstance(error, ValueError | OSError) else f"{type(error).__name__}: {message}"
