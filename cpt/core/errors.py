"""Errors that a user can read: one line, a non-zero exit code."""

import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from hydra import errors as of_hydra
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import ConfigCompositionException, HydraException
from omegaconf import errors as of_omegaconf
from yaml import YAMLError

from cpt.core.config import CONF
from cpt.core.processes import is_one_of_several
from cpt.core.schema import unknown_name

RENAMED_GROUPS = {"probe": "benchmark", "schedule": "lr_scheduler"}  # accepted: cpt.core.renames
LOADED = re.compile(r"Could not load '(.+)/([^/']+)'")
TWICE = re.compile(r"Multiple values for (\S+)\. To override a value use 'override \S+: (.*)'")
MERGED = re.compile(r"Cannot merge DictConfig with")
MADE_OF = re.compile(r"Error resolving interpolation '(.*)', possible interpolation keys: (.*)")
NO_DEFAULT = re.compile(r"In '(\S+)': Could not override '([\w/@.]+)'")
DELETED = re.compile(r"Could not delete from config. '(.*)' does not exist")
FAILED_ALLOCATION = re.compile(
    r"out of memory|can't allocate memory|Cannot allocate memory|bad_alloc|can't start new thread"
    r"|could not create a (primitive|memory)"  # oneDNN
)
LESS = "rerun the same command to resume, with more memory or with less use of it: docs/plan.md"


def reason(error: BaseException) -> str:
    """An error's message on one line; of an error inside a Hydra instantiation, the cause's."""
    match error:
        case of_hydra.MissingConfigException(missing_cfg_file=str(path), options=list(options)):
            group, _, name = path.rpartition("/")
            return unknown_name(f"{group}={name}", options)
        case of_hydra.MissingConfigException() if (at := LOADED.search(str(error))) and choices_of(at[1]):
            return unknown_name(f"{at[1]}={at[2]}", choices_of(at[1]))  # of a list of choices
        case of_hydra.OverrideParseException():
            about = ("Error parsing", "See ", "^")  # the argument, Hydra's page, the place in the argument
            lines = [line.strip() for line in error.message.splitlines()]
            why = " ".join(line for line in lines if line and not line.startswith(about))
            return f"{error.override} is invalid: {why}. Allowed: key=value"
        case of_hydra.SearchPathException():
            return f"{' '.join(str(error).splitlines())}. Allowed: an existing folder"
        case ConfigCompositionException(
            __cause__=of_omegaconf.ConfigAttributeError() | of_omegaconf.ConfigKeyError() as cause
        ):
            key, node = str(cause.full_key), cause.parent_node
            section = key.rpartition(".")[0]
            names = [f"{section}.{name}" if section else str(name) for name in node or ()]
            told = unknown_name(key, names)
            return told if not section or told.endswith("?") else f"{told}; to add it: +{key}=VALUE"
        case ConfigCompositionException() if (old := NO_DEFAULT.search(str(error))) and old[
            2
        ] in RENAMED_GROUPS:
            return f"override /{old[2]} in {old[1]} is invalid. Allowed: override /{RENAMED_GROUPS[old[2]]}"
        case ConfigCompositionException() if twice := TWICE.match(str(error)):
            return f"+{twice[1]}={twice[2]} is invalid. Allowed: {twice[1]}={twice[2]}, without +"
        case ConfigCompositionException() if made := MADE_OF.match(str(error)):
            return f"${{{made[1]}}} is invalid: unknown where a choice is made of it. Allowed: {made[2]}"
        case ConfigCompositionException() if gone := DELETED.match(str(error)):
            return f"~{gone[1]} is invalid: there is no {gone[1]}, or it is null. Allowed: {gone[1]}=null"
    while error.__cause__ is not None and isinstance(error, HydraException):
        error = error.__cause__
    match error:
        case of_omegaconf.MissingMandatoryValue(full_key=str(key)):
            return f"{key} is missing. Allowed: {key}=VALUE"
        case of_omegaconf.InterpolationResolutionError(full_key=str(key)):
            return f"{key} is invalid: {str(error).splitlines()[0]}. Allowed: ${{KEY}} of an existing key"
        case of_omegaconf.ConfigTypeError(full_key=str(key)) if MERGED.match(str(error)):
            return f"{key} is invalid: it has keys with values, not a value. Allowed: {key}.NAME=…"
    return " ".join(filter(None, map(str.strip, str(error).splitlines()))) or type(error).__name__


def choices_of(group: str) -> list[str]:
    if GlobalHydra.instance().is_initialized():
        return GlobalHydra.instance().config_loader().get_group_options(group)
    return sorted(path.stem for path in (CONF / group).glob("*.yaml"))


@contextmanager
def readable(code: int = 1) -> Iterator[None]:
    """Bad input ends in one line and an exit code; in a traceback only with HYDRA_FULL_ERROR=1."""
    try:
        yield
    except KeyboardInterrupt:
        sys.exit("cpt: interrupted; run the same command again to continue")
    except BrokenPipeError:  # cpt.core.output
        raise
    except Exception as error:
        foreseen = (ValueError, OSError, HydraException, of_omegaconf.OmegaConfBaseException, YAMLError)
        line = want_of_memory(error) or (reason(error) if isinstance(error, foreseen) else "")
        if not line or os.environ.get("HYDRA_FULL_ERROR"):
            raise
        print(f"cpt: {line}", file=sys.stderr, flush=True)
        # Not sys.exit: the processes of a distributed run must end together, whatever they wait for.
        os._exit(code) if is_one_of_several() else sys.exit(code)


def want_of_memory(error: BaseException | None) -> str:
    """What is said where an allocation has failed, as Python, torch or the system say it, whatever came of it
    on the way up; nothing for any other error. Python says SystemError where it happens within an error."""
    while error is not None:
        if isinstance(error, MemoryError | SystemError) or FAILED_ALLOCATION.search(str(error)):
            return f"memory does not suffice ({reason(error)}); {LESS}"
        error = error.__cause__ or error.__context__
    return ""
