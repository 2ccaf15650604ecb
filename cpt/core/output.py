"""Standard output whose reader may leave, as in `python -m cpt.status | head`."""

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NoReturn

UNREAD = 128 + 13  # the exit code that shells show for SIGPIPE


@contextmanager
def closing_output() -> Iterator[None]:
    """Ends the program without a traceback, by the exit code UNREAD, if nobody reads its output any more."""
    try:
        yield
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for Python's own flush at exit
        sys.exit(UNREAD)


def run_program(main: Callable[[Sequence[str]], int | None]) -> NoReturn:
    """Runs a program with the arguments of the command line and ends with its exit code."""
    with closing_output():
        code = main(sys.argv[1:])
    sys.exit(code)
