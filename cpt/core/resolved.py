"""Values of a config that each process would resolve for itself: times, random numbers, whatever a resolver
of the user gives. They are resolved once, by the first process that meets them, and handed on: to the jobs of
a sweep as overrides, to the processes that Lightning starts as an environment variable."""

import json
import os
import re
from collections.abc import Mapping
from datetime import datetime
from typing import Any

import psutil
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf, open_dict, read_write

from cpt.core.config import flatten
from cpt.core.exceptions import InvalidOptionError
from cpt.core.naming import put_in_quotes
from cpt.core.processes import is_one_of_several

RUN_FOLDER = "hydra.run.dir"
SWEEP_FOLDER = "hydra.sweep.dir"
JOB_NUMBER = "hydra.job.num"
RESOLVED = "CPT_RESOLVED"  # environment variable: the values of a run, as JSON, by their keys
CALL = re.compile(r"\$\{\s*([\w.]+)\s*:")
# What gives the same in every process of a run: of Hydra, of OmegaConf, of cpt (cpt.core.naming, config).
REPEATABLE = {
    "hydra",
    "python_version",
    "oc.env",
    "oc.select",
    "oc.decode",
    "oc.create",
    "oc.deprecated",
    "oc.dict.keys",
    "oc.dict.values",
    "times",
    "by",
    "built_or_given",
    "choices",
    "variant",
    "tasks_per_node",
    "step_nodes",
}
start: datetime | None = None  # of this program: what ${now:} gives in all configs of a sweep


def resolve_once(config: DictConfig) -> None:
    """Gives all processes of a run the same values of a composed config, and the same folder.

    The first process resolves what would be another value in each process, writes the values into its config,
    and leaves them in an environment variable. A process that Lightning starts takes them from there."""
    fix_time()
    is_started_by_launcher = "LOCAL_RANK" in os.environ  # Lightning, or torchrun, which has no values to pass
    if is_started_by_launcher and RESOLVED in os.environ:
        HydraConfig.instance().set_config(config)  # for ${hydra:…}
        set_values(config, json.loads(os.environ[RESOLVED]))
        return

    values = resolve_values(config)
    values[RUN_FOLDER] = resolve_run_folder(config)
    os.environ[RESOLVED] = json.dumps(values, default=str)


def resolve_values(config: DictConfig) -> dict[str, Any]:
    """Replaces what another process would resolve otherwise by its value; returns these values by key."""
    HydraConfig.instance().set_config(config)  # for ${hydra:…}
    values = find_changing_values(config)
    set_values(config, values)
    return values


def resolve_run_folder(config: DictConfig) -> str:
    """Replaces the pattern of the run's folder by its path, which is returned. The pattern may contain values
    that `resolve_values` has replaced, and ${hydra:…} reads a copy of the config, which is renewed first.
    Raises ValueError for a path with `${`, as of name='\\${x}': Hydra would replace it once more."""
    HydraConfig.instance().set_config(config)
    folder = str(config.hydra.run.dir)
    if "${" in folder:
        raise InvalidOptionError(
            RUN_FOLDER,
            folder,
            reason="${…} in it would be replaced once more",
            allowed="a path without ${ in it",
        )
    set_values(config, {RUN_FOLDER: folder})
    return folder


def fix_time() -> None:
    """Has `${now:}` give the time of this program's start. Hydra's own resolver gives each config another."""
    OmegaConf.register_new_resolver("now", format_start, replace=True)


def format_start(pattern: str) -> str:
    """The start as strftime writes it. The processes of torchrun take the start of the one that started them.
    Raises ValueError where the processes of a run would have different ones."""
    global start
    if start is None:
        by_torchrun = "TORCHELASTIC_RUN_ID" in os.environ and os.environ.get("GROUP_WORLD_SIZE", "1") == "1"
        if is_one_of_several() and not by_torchrun:
            raise ValueError(f"${{now:{pattern}}} differs between the processes of a run on several nodes")
        start = datetime.now()
        if by_torchrun:
            start = datetime.fromtimestamp(psutil.Process(os.getppid()).create_time())
    return start.strftime(pattern)


def is_changing(text: str) -> bool:
    """Whether another process would resolve a text otherwise."""
    return not set(CALL.findall(text)) <= REPEATABLE


def read_unresolved(config: DictConfig, key: str) -> str:
    """A text of a config as it was written, not resolved."""
    parent, _, name = key.rpartition(".")
    section: Any = OmegaConf.to_container(OmegaConf.select(config, parent), resolve=False)
    return str(section[name])


def resolve_sweep_folder(config: DictConfig) -> None:
    """Replaces the folder of a sweep, of which each job would have another, by its name."""
    fix_time()
    HydraConfig.instance().set_config(config)
    if is_changing(read_unresolved(config, SWEEP_FOLDER)):
        set_values(config, {SWEEP_FOLDER: str(config.hydra.sweep.dir)})


def resolve_job(config: DictConfig, number: int, *, sweep: DictConfig) -> list[str]:
    """Replaces, in the composed config of a job, what its process would resolve otherwise by its value.

    Returns the overrides that pass these values and the job's number on to the job's process."""
    fix_time()
    if is_changing(read_unresolved(config, SWEEP_FOLDER)):
        set_values(config, {SWEEP_FOLDER: str(sweep.hydra.sweep.dir)})
    set_values(config, {JOB_NUMBER: number})  # as Hydra's launchers

    values = resolve_values(config)
    resolve_run_folder(config)
    overrides = [format_override(key, value) for key, value in values.items()]
    if "job.num" in str(own_tree(config)):
        overrides.append(f"{JOB_NUMBER}={number}")
    return overrides


def find_changing_values(config: DictConfig) -> dict[str, Any]:
    """The values of a config's leaves that another process would resolve otherwise, by key."""
    values = {}
    for key, raw_value in flatten(own_tree(config)):  # without the keys of Hydra itself
        if is_changing(str(raw_value)):
            value = OmegaConf.select(config, key)
            if OmegaConf.is_config(value):
                value = OmegaConf.to_container(value, resolve=True)
            values[key] = value
    return values


def own_tree(config: DictConfig) -> dict[str, Any]:
    """A composed config as it was written, without Hydra's own part."""
    tree: Any = OmegaConf.to_container(config, resolve=False)
    return {str(name): value for name, value in tree.items() if name != "hydra"}


def set_values(config: DictConfig, values: Mapping[str, Any]) -> None:
    hydra = config.hydra  # which has flags of its own
    with read_write(config), open_dict(config), read_write(hydra), open_dict(hydra):
        for key, value in values.items():
            OmegaConf.update(config, key, value, force_add=True)


def format_override(key: str, value: Any) -> str:
    """`++key=value` in Hydra's grammar."""
    return f"++{key}={format_override_value(value)}"


def format_override_value(value: Any) -> str:
    """A value in the grammar of Hydra's overrides, with texts in quotes."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, list):
        return f"[{','.join(map(format_override_value, value))}]"
    if isinstance(value, Mapping):
        items = [f"{key}: {format_override_value(item)}" for key, item in value.items()]
        return f"{{{','.join(items)}}}"
    if isinstance(value, int | float):
        return str(value)
    return put_in_quotes(str(value))
