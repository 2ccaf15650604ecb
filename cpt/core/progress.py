"""Progress bars, all alike: with the time left; in a log file, a line every few seconds."""

import sys

from tqdm import tqdm


def progress_bar(label: str, *, total: int, hidden: bool, done: int = 0, unit: str = "it") -> tqdm:
    """A bar named `label` that ends at `total` units, of which some are done, and goes when it is closed."""
    interval = 0.2 if sys.stderr.isatty() else 10.0
    return tqdm(
        desc=label,
        total=total,
        initial=done,
        unit=unit,
        disable=hidden,
        leave=False,
        mininterval=interval,
        maxinterval=60,
    )
