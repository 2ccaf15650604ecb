"""Progress bars, all alike: with the time left; in a log file, a line every few seconds."""

import sys
from typing import Any, TextIO

from tqdm import tqdm

from cpt.core.heartbeat import watch_bar

DELAY = 10.0  # seconds after which a log file tells how far something is that is mostly quick


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
    interval = 0.2 if sys.stderr.isatty() else 10.0
    bar = tqdm(
        file=sys.stderr if sys.stderr.isatty() else Lines(sys.stderr),
        desc=label,
        total=total,
        initial=done,
        unit=unit,
        unit_scale=scale,
        delay=0.0 if sys.stderr.isatty() else delay,
        disable=hidden,
        leave=False,
        mininterval=interval,
        maxinterval=60,
    )
    return watch_bar(bar)
