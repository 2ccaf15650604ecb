"""The command line: a config, composed by Hydra of conf/ and the arguments, and the run or sweep of it."""

import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import NoneType
from typing import Any

import hydra
from hydra._internal import utils
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, OverrideType
from hydra.errors import HydraException
from omegaconf import DictConfig

import cpt.sweeps.launcher  # noqa: F401  (registers the sweep launcher)
from cpt import __version__
from cpt.core.config import CONF
from cpt.core.errors import readable
from cpt.core.output import closing_output
from cpt.core.processes import choose_spins, die_with_parent
from cpt.core.renames import rename_overrides
from cpt.train import train
from cpt.trainer.help import FLAG, describe_options

report_errors = utils.run_and_report


def start() -> None:
    """Does what the arguments say. A `_target_` may name a module in the working directory."""
    die_with_parent()
    sys.path.append(os.getcwd())  # last: no file there hides a library
    utils.run_and_report = run_step  # type: ignore[assignment]
    # The group is there already, as null: for Hydra a plus would choose it twice.
    sys.argv = leave_to_jobs(
        rename_overrides([each.replace("+experiment=", "experiment=") for each in sys.argv])
    )
    with closing_output(), readable():  # --help is not a step of Hydra's
        if "--version" in sys.argv:
            print(f"cpt {__version__}")
        elif FLAG in sys.argv:
            print(describe_options(sys.argv[1:]))
        else:
            check_flags(sys.argv[1:])
            check_choices(sys.argv[1:])
            app()


@hydra.main(version_base="1.3", config_path=str(CONF), config_name="config")
def app(cfg: DictConfig) -> Any:
    os.environ.setdefault("GOMP_SPINCOUNT", str(choose_spins()))  # torch reads it when it is imported
    with readable():  # inside Hydra's own report of an error in a run
        return train(cfg, run_dir=Path(HydraConfig.get().runtime.output_dir))


def run_step(step: Callable[[], Any]) -> Any:
    """Replaces Hydra's function of this kind, which reports in many lines what cannot be composed."""

    def readable_step() -> Any:
        with closing_output(), readable():
            return step()

    return report_errors(readable_step)


def parse_arguments(arguments: Sequence[str]) -> dict[str, Override]:
    """The overrides among the arguments, without those that Hydra will refuse."""
    parsed = {}
    for argument in arguments:
        try:
            if not argument.startswith("-"):
                (parsed[argument],) = OverridesParser.create().parse_overrides([argument])
        except HydraException:
            continue
    return parsed


def leave_to_jobs(arguments: Sequence[str]) -> list[str]:
    """Of a sweep over the choices of a group, the options of that group become sweeps of one value.

    Hydra composes a config for the sweep itself, with the group's default, and sets a fixed option in
    that: `-m method=lora,olora method.lr_multiplier=1` would be refused, since `method=ncl` has no rate."""
    if not {"-m", "--multirun"} & set(arguments):
        return list(arguments)
    parsed = parse_arguments(arguments)
    swept = tuple(f"{each.key_or_group}." for each in parsed.values() if each.is_sweep_override())
    deferred = []
    for argument in arguments:
        name, _, value = argument.partition("=")
        fixed = argument in parsed and not parsed[argument].is_sweep_override()
        deferred.append(
            f"{name}=choice({value})"
            if fixed and value and name.rpartition("@")[2].startswith(swept)
            else argument
        )
    return deferred


def check_flags(arguments: Sequence[str]) -> None:
    """Raises ValueError for a flag that is unknown; an option has no dashes."""
    for given in utils.get_args_parser().parse_known_args(list(arguments))[1]:
        name = given.lstrip("-").partition("=")[0]
        allowed = f"options without dashes, like {name}=VALUE; -m, --config-dir=FOLDER, --cfg=job, --help"
        raise ValueError(f"{given} is invalid: unknown flag. Allowed: {allowed}")


def check_choices(arguments: Sequence[str]) -> None:
    """Raises ValueError for a choice of a group that is not a name, which Hydra reports in many lines."""
    for argument, given in parse_arguments(arguments).items():
        if not (CONF / given.key_or_group).is_dir() or given.type is OverrideType.DEL:
            continue
        value = given.value()
        wrong = (NoneType, int, float, dict, list) if isinstance(value, list) else (NoneType, int, float)
        if any(isinstance(each, wrong) for each in (value if isinstance(value, list) else [value])):
            raise ValueError(
                f"{argument} is invalid. Allowed: a choice of conf/{given.key_or_group}, or a list of them"
            )


if __name__ == "__main__":
    raise SystemExit("cpt: python -m cpt.cli is invalid. Allowed: python run.py, cpt, python -m cpt")
