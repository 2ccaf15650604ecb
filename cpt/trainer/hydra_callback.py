"""What Hydra calls before it makes a folder for a run."""

from contextlib import suppress
from pathlib import Path
from typing import Any

from hydra.experimental.callback import Callback
from omegaconf import DictConfig, open_dict, read_write
from omegaconf.errors import InterpolationToMissingValueError, MissingMandatoryValue

from cpt.core.errors import readable_errors
from cpt.core.exceptions import InvalidOptionError
from cpt.core.resolved import resolve_once, resolve_sweep_folder
from cpt.core.secrets import redact_file
from cpt.trainer.help import explaining_missing
from cpt.trainer.read_config import read_sections

HYDRA_FILES = ("config.yaml", "hydra.yaml", "overrides.yaml")


class ConfigCheck(Callback):
    """Rejects an invalid config before a folder is made for it."""

    def on_run_start(self, config: DictConfig, **kwargs: Any) -> None:
        with readable_errors():
            check_working_folder(config)
            resolve_once(config)
            with explaining_missing(config):
                read_sections(config)
        if config.get("plan"):
            write_no_files(config)

    def on_job_start(self, config: DictConfig, **kwargs: Any) -> None:
        """Hides secrets in the files that Hydra has just written."""
        if config.hydra.output_subdir is not None:
            folder = Path(config.hydra.runtime.output_dir) / config.hydra.output_subdir
            for name in HYDRA_FILES:
                redact_file(folder / name)

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        with readable_errors():
            check_working_folder(config)
            resolve_sweep_folder(config)
            with suppress(MissingMandatoryValue, InterpolationToMissingValueError):  # jobs may have it
                read_sections(config)
            if config.get("plan"):
                raise InvalidOptionError(
                    "plan", config.plan, reason="it is for one run", allowed="without --multirun"
                )


def write_no_files(config: DictConfig) -> None:
    """Has Hydra write neither its files nor a log file. Where JSON is printed, log lines go to stderr."""
    with read_write(config.hydra), open_dict(config.hydra):
        config.hydra.output_subdir = None
        config.hydra.job_logging.root.handlers = ["console"]
        config.hydra.job_logging.handlers.pop("file", None)
        if config.plan == "json":
            config.hydra.job_logging.handlers.console.stream = "ext://sys.stderr"


def check_working_folder(config: DictConfig) -> None:
    """Raises ValueError for a run that would work in its own folder."""
    if config.hydra.job.chdir:
        raise InvalidOptionError(
            "hydra.job.chdir",
            True,
            reason=(
                "relative paths (domains.root, cache_dir, hydra.run.dir) are those of the folder of the start"
            ),
            allowed="false",
        )
