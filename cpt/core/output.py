"""What a program is started with: standard streams that may be closed, and whose reader may leave, as in
`python -m cpt.status | head`, and a working folder that may be gone."""

import io
import logging
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NoReturn

STREAMS = (("stdin", "r"), ("stdout", "w"), ("stderr", "w"))  # by the number of their file descriptor
UNREAD = 128 + 13  # the exit code that shells show for SIGPIPE


def open_streams() -> None:
    """Opens the null device for each standard stream that is closed, as a daemon's are: a file that is opened
    would get its number. Text that the output's encoding lacks is escaped, and a log line that cannot be
    written is lost without a traceback."""
    logging.raiseExceptions = False
    for number, (name, mode) in enumerate(STREAMS):
        if getattr(sys, name) is None:
            descriptor = os.open(os.devnull, os.O_RDWR)
            if descriptor != number:
                os.dup2(descriptor, number)
                os.close(descriptor)
            setattr(sys, name, open(number, mode))  # noqa: SIM115

    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def require_working_folder() -> None:
    """Ends the program with exit code 1 and one line where its working folder has been removed: libraries
    fail there in words of their own."""
    try:
        os.getcwd()
    except OSError as error:
        sys.exit(f"cpt: the working folder is gone ({error.strerror}); run the command in one that exists")


@contextmanager
def closing_output() -> Iterator[None]:
    """Ends the program without a traceback, by the exit code UNREAD, if no program reads its output any
    more."""
    try:
        yield
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for Python's own flush at exit
        sys.exit(UNREAD)


def run_program(main: Callable[[Sequence[str]], int | None]) -> NoReturn:
    """Runs a program with the arguments of the command line and ends with its exit code."""
    open_streams()
    require_working_folder()
    with closing_output():
        code = main(sys.argv[1:])
    sys.exit(code)
