"""Times a run of any version of cpt from within: a callback of Lightning that a command line adds, as in
`+callbacks.clock._target_=step_clock.StepClock`. It needs nothing of cpt.

It sends the benchmark that started the run what has taken how long. In one domain it waits between chunks of
steps until the benchmark lets it go on, so that two runs take turns."""

import time
from multiprocessing.connection import Connection
from typing import Any

from lightning import Trainer
from lightning.pytorch.callbacks import Callback

Times = dict[str, float]


def read_clocks() -> Times:
    """Seconds of wall time and of CPU time, of this process with all its threads."""
    return {"wall": time.monotonic(), "cpu": time.process_time()}


def time_since(start: Times) -> Times:
    """What has passed since `start`."""
    current = read_clocks()
    return {kind: current[kind] - start[kind] for kind in current}


class StepClock(Callback):
    """Sends (kind, times) through `pipe`, an open file: at the end of the first step (`start`), after every
    chunk of steps (`chunk`) and after every evaluation (`score`), and the losses of the timed domain.

    `stage` is the domain whose steps are timed, counted from 1; 0: none. The first message of the kind
    `chunk` ends its warm-up."""

    def __init__(self, pipe: int, stage: int = 0, warmup: int = 0, chunk: int = 1, chunks: int = 0) -> None:
        self.pipe: Connection = Connection(pipe)
        self.stage = stage
        self.warmup = warmup
        self.chunk = chunk
        self.chunks = chunks
        self.num_stages = 0
        self.num_steps = 0
        self.start = read_clocks()
        self.losses: list[Any] = []
        time_evaluations(self.pipe)

    def on_train_start(self, trainer: Any, module: Any) -> None:
        self.num_stages += 1
        self.num_steps = 0

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, number: int) -> None:
        self.num_steps += 1
        if self.num_stages == 1 and self.num_steps == 1:
            self.pipe.send(("start", read_clocks()))
        if self.num_stages != self.stage:
            return
        self.losses.append(outputs["loss"].detach())
        num_timed = self.num_steps - self.warmup
        if 0 <= num_timed <= self.chunk * self.chunks and num_timed % self.chunk == 0:
            self.pipe.send(("chunk", time_since(self.start)))
            self.pipe.recv()
            self.start = read_clocks()

    def on_train_end(self, trainer: Any, module: Any) -> None:
        if self.num_stages == self.stage:
            self.pipe.send(("losses", [loss.item() for loss in self.losses]))


def time_evaluations(pipe: Connection) -> None:
    """Has the times of every evaluation of this process sent: it calls no callbacks of the config."""
    validate = Trainer.validate

    def timed_validate(*args: Any, **options: Any) -> Any:
        start = read_clocks()
        result = validate(*args, **options)
        pipe.send(("score", time_since(start)))
        return result

    Trainer.validate = timed_validate  # type: ignore[method-assign]
