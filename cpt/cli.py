"""The command line: a config, composed by Hydra of conf/ and the arguments, and the run or sweep of it."""

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hydra
from hydra._internal import utils
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

import cpt.sweeps.launcher  # noqa: F401  (registers the sweep launcher)
from cpt.core.config import CONF
from cpt.core.output import closing_output
from cpt.core.processes import choose_spins, die_with_parent
from cpt.sweeps.arguments import check_choices, leave_to_jobs
from cpt.trainer.help import FLAG, describe_options
from cpt.trainer.plan import readable_errors

report_errors = utils.run_and_report


def start() -> None:
    """Does what the arguments say. A `_target_` may name a module in the working directory, which is searched
    last: no file there hides a library."""
    die_with_parent()
    sys.path.append(os.getcwd())
    utils.run_and_report = run_step
    # The group is there already, as null: for Hydra a plus would choose it twice.
    sys.argv = leave_to_jobs([each.replace("+experiment=", "experiment=") for each in sys.argv])
    with closing_output(), readable_errors():  # --help is not a step of Hydra's
        if FLAG in sys.argv:
            print(describe_options(sys.argv[1:]))
        else:
            check_choices(sys.argv[1:])
            app()


@hydra.main(version_base="1.3", config_path=str(CONF), config_name="config")
def app(cfg: DictConfig) -> Any:
    os.environ.setdefault("GOMP_SPINCOUNT", str(choose_spins()))  # torch reads it when it is imported
    from cpt.train import train  # not before the config is checked

    with readable_errors():  # inside Hydra's own report of an error in a run
        return train(cfg, run_dir=Path(HydraConfig.get().runtime.output_dir))


def run_step(step: Callable[[], Any]) -> Any:
    """Replaces Hydra's function of this kind, which reports in many lines what cannot be composed."""

    def readable_step() -> Any:
        with closing_output(), readable_errors():
            return step()

    return report_errors(readable_step)
