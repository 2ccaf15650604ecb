"""The pulse of a run: a thread that keeps `progress.json` in its folder, by what phases and bars say.

It is the first process's. A phase is entered and a bar is watched in any case, and told where there is a
pulse: neither costs a step anything, and nothing that is learned depends on it."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from tqdm import tqdm

from cpt.core.preemption import Preempted
from cpt.core.signs import Holder, Sign, now, shorten

log = logging.getLogger(__name__)
TICK_S = 1.0  # how often it is looked whether something new is done
PERIOD_S = 5.0  # how often the file is written where the same is done
FOREVER_S = 10 * 365 * 24 * 3600.0  # no number of seconds that is worth telling is larger


@dataclass(frozen=True, kw_only=True)
class Phase:
    """What a run is at, and what of it is left: seconds as far as they are known, and optimizer steps of
    later domains as long as none has been timed."""

    name: str
    stage: int | None = None
    stages: int | None = None
    learns: bool = False  # whether the steps of its bar are optimizer steps of a domain
    done: int = 0  # optimizer steps of the domains before
    total: int = 0  # of all domains
    rest_s: float | None = None  # of all later phases; None: nobody knows
    rest_steps: int = 0  # that take as long as those of this phase, beside rest_s
    untimed: Sequence[str] = ()  # later phases that are in neither


@dataclass(frozen=True)
class Place:
    """Where a bar is."""

    label: str
    step: float
    steps: float | None
    unit: str
    per_unit_s: float | None  # seconds, None before there are some

    @classmethod
    def of(cls, bar: tqdm) -> Place:
        told = bar.format_dict
        new, elapsed, rate = bar.n - bar.initial, told["elapsed"], told["rate"]
        per_unit = 1 / rate if rate else elapsed / new if new > 0 else None
        return cls(told["prefix"], bar.n, bar.total, told["unit"], per_unit)

    @property
    def eta_s(self) -> float | None:
        if self.per_unit_s is None or not self.steps:
            return None
        return bounded(max(0.0, self.steps - self.step) * self.per_unit_s)


class Pulse:
    """The pulse of this process: still, until it begins in a folder."""

    def __init__(self) -> None:
        self.folder: Path | None = None
        self.phase, self.waits, self.bars = Phase(name=""), "", list[tqdm]()
        self.began, self.moved = "", ""
        self.seen: tuple[str, float | None, str] | None = None  # what was last told
        self.written, self.failed = 0.0, False
        self.stopped = threading.Event()
        self.thread: threading.Thread | None = None

    def begin(self, folder: Path) -> None:
        """From here on it beats."""
        self.folder, self.waits = folder, ""
        self.enter(Phase(name="starting"))
        self.began = self.moved = now()
        self.seen, self.failed, self.holder = None, False, Holder.own()
        self.stopped = threading.Event()
        self.beat()
        self.thread = threading.Thread(target=self.work, args=[self.stopped], daemon=True, name="pulse")
        self.thread.start()

    def work(self, stopped: threading.Event) -> None:
        while not stopped.wait(TICK_S):
            self.beat()

    def beat(self) -> None:
        """Writes what is new, and every PERIOD_S that the process lives."""
        sign = self.sign()
        seen = (sign.phase, sign.step, sign.state)
        if seen != self.seen:
            self.moved = sign.written
        begun = self.seen is None or known(seen) != known(self.seen)
        if begun or time.monotonic() - self.written >= PERIOD_S:
            self.put(replace(sign, moved=self.moved))
        self.seen = seen

    def end(self, state: str, why: str) -> None:
        """The last words."""
        self.stopped.set()
        if self.thread is not None:
            self.thread.join()
        last = replace(
            self.sign(), state=state, why=shorten(why), phase_eta_s=None, run_eta_s=None, untimed=[]
        )
        self.put(replace(last, phase="", learned=1.0) if state == "finished" else last)
        self.folder, self.thread, self.bars = None, None, []

    def put(self, sign: Sign) -> None:
        """A run does not end because nobody can look on."""
        self.written = time.monotonic()
        try:
            if self.folder is not None:
                sign.write(self.folder)
        except OSError as error:
            if not self.failed:
                log.warning("how far the run is cannot be told: %s", error)
            self.failed = True

    def enter(self, phase: Phase) -> None:
        """The run is at something else."""
        self.phase, self.bars = phase, []

    def place(self) -> Place | None:
        """Where the last open bar is; in a stage also one that is closed, without the time left."""
        bars = self.bars
        if is_open := [bar for bar in bars if not bar.disable]:
            return Place.of(is_open[-1])
        return replace(Place.of(bars[-1]), per_unit_s=None) if bars and self.phase.stage is not None else None

    def sign(self) -> Sign:
        """What is to be told now."""
        phase = self.phase
        place = self.place()
        learned, at = None, place.step if place and phase.learns else 0
        if phase.total:
            learned = round(min(1.0, (phase.done + at) / phase.total), 4)
        return Sign(
            state="waiting" if self.waits else "running",
            phase=name_of(phase, place),
            stage=phase.stage,
            stages=phase.stages,
            step=place.step if place else None,
            steps=place.steps if place else None,
            unit=place.unit if place else "",
            learned=learned,
            phase_eta_s=place.eta_s if place else None,
            run_eta_s=rest_of_run(phase, place),
            untimed=list(phase.untimed),
            why=self.waits,
            began=self.began,
            moved=self.moved,
            written=now(),
            holder=self.holder,
        )


def known(seen: tuple[str, float | None, str]) -> tuple[str, bool, str]:
    """What is told at once where it has changed: the phase, whether a step of it was made, the state."""
    return seen[0], bool(seen[1]), seen[2]


def name_of(phase: Phase, place: Place | None) -> str:
    """The phase; before the stages what its bar says of a text (`tokenising law`) tells more."""
    if place is None or phase.stage is not None or not place.label.strip(": ") or " " not in place.label:
        return phase.name
    return place.label.strip(": ")


def rest_of_run(phase: Phase, place: Place | None) -> float | None:
    """Seconds to the run's end, as far as they are known."""
    own = place.eta_s if place else None
    if phase.rest_s is None or own is None:
        return None
    later = phase.rest_steps * (place.per_unit_s or 0.0) if place else 0.0
    return bounded(own + phase.rest_s + later)


def bounded(seconds: float) -> float:
    """To the tenth of a second."""
    return round(min(seconds, FOREVER_S), 1)


PULSE = Pulse()


@contextmanager
def beating(folder: Path) -> Iterator[None]:
    """While it lasts, a folder says what is done in it; and at the end, how that ended."""
    PULSE.begin(folder)
    try:
        yield
    except Preempted as leaving:
        PULSE.end("preempted", str(leaving).split(";")[0])
        raise
    except BaseException as error:
        PULSE.end("failed", told(error))
        raise
    PULSE.end("finished", "")


def told(error: BaseException) -> str:
    """An error in a line: as it is read on the console if it was foreseen, else with its kind."""
    from cpt.core.errors import reason  # Hydra, which is there where a run is

    words = reason(error)
    return words if isinstance(error, ValueError | OSError) else f"{type(error).__name__}: {words}"


def enter_phase(name: str) -> None:
    """A run is at something else."""
    PULSE.enter(Phase(name=name))


def watch(bar: tqdm) -> tqdm:
    """Has the pulse tell where a bar is, until that is closed."""
    if PULSE.folder is not None and not bar.disable:
        PULSE.bars = [*(each for each in PULSE.bars if not each.disable), bar]  # which the thread may read
    return bar


@contextmanager
def waiting_for(what: str) -> Iterator[None]:
    """While it lasts, the run waits."""
    PULSE.waits = what
    try:
        yield
    finally:
        PULSE.waits = ""
