"""Errors that a user can read: one line, a non-zero exit code."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from hydra.errors import HydraException
from omegaconf.errors import OmegaConfBaseException

from cpt.core.processes import is_one_of_several


def reason(error: BaseException) -> str:
    """An error's message on one line; of an error inside a Hydra instantiation, the cause's."""
    while error.__cause__ is not None and isinstance(error, HydraException):
        error = error.__cause__
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ".join(lines) or type(error).__name__


@contextmanager
def readable(*, errors_only: bool) -> Iterator[None]:
    """Bad input ends in one line and exit code 1; a traceback only if not `errors_only`
    (HYDRA_FULL_ERROR=1)."""
    try:
        yield
    except KeyboardInterrupt:
        sys.exit("cpt: interrupted; the same command goes on from here")
    except (ValueError, OSError, HydraException, OmegaConfBaseException) as error:
        if not errors_only:
            raise
        print(f"cpt: {reason(error)}", file=sys.stderr, flush=True)
        # Not sys.exit: the processes of a distributed run must end together, whatever they wait for.
        os._exit(1) if is_one_of_several() else sys.exit(1)
