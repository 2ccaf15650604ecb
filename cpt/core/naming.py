"""What a run is called: its folder, and what tells it from others of its method. Numbers are written in one
way: `optim.lr=1e-3` as `0.001`."""

import functools
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import ListConfig, OmegaConf

import cpt.core.overrides  # noqa: F401  (mappings of the command line)
from cpt.core.config import convert_to_canonical, digest, is_execution_key
from cpt.core.secrets import redact
from cpt.core.slurm import count_tasks_per_node, step_nodes

CONFIG = "config"  # the primary config, of our own conf/ and of a user's
# Options that are shown by themselves, and where text lies: they are not part of a run's variant.
OUTSIDE_VARIANT = (
    "method",
    "mask",
    "replay",
    "domains",
    "domains.root",
    "model",
    "order",
    "seed",
    "experiment",
)
UNSAFE = re.compile(r"[^A-Za-z0-9.+-]+")
PLAIN = re.compile(r"[\w./+@-]+", re.ASCII)  # what needs no quotes, unless it is a number or the like
PATTERNS_OPTION = "optim.lr_multipliers"  # a mapping with regular expressions as keys
HYDRA_ESCAPE = re.compile(r"\\([\\()\[\]{}:=, ])")  # a character that Hydra has another use for, escaped
LONGEST = 160  # characters of a folder's name; file systems take 255
LONGEST_TAG = 64  # characters, W&B's own limit


def name_run(overrides: Sequence[str], method: str, order: Any, seed: int, *, num_path_parts: int = 1) -> str:
    """The run folder's name: method, order, seed and what else was chosen. A path is named by its last part,
    or by as many parts as are asked for."""
    parts = [method, f"order-{order}", f"seed-{seed}"]
    for key, value in sorted(list_choices(list_typed_overrides(overrides)).items()):
        if key not in ("method", "order", "seed", "hydra"):
            short_value = shorten_path(value, num_parts=num_path_parts) if "/" in value else value
            parts.append(f"{key}-{short_value}")

    name = "_".join(make_safe(part) for part in parts)
    if len(name) > LONGEST:
        name = f"{name[:LONGEST]}-{digest(parts)[:8]}"
    return name


def make_safe(part: str) -> str:
    """A part of a folder's name in safe characters; with a hash if it is not ASCII."""
    safe = UNSAFE.sub(".", part).strip(".")
    return safe if part.isascii() else f"{safe}-{digest(part)[:6]}"


def shorten_path(value: str, *, num_parts: int) -> str:
    """The last parts of a path, with dots between them; for an exported model also its run."""
    path = Path(value)
    if path.name == "model":
        num_parts = max(2, num_parts)
    return ".".join(path.parts[-num_parts:])


@dataclass(frozen=True)
class RunIdentity:
    """What the name of a run's folder is made of: the arguments of `name_run`."""

    overrides: Sequence[str]
    method: str
    order: Any
    seed: int

    def name(self, *, num_path_parts: int = 1) -> str:
        return name_run(self.overrides, self.method, self.order, self.seed, num_path_parts=num_path_parts)

    def num_path_parts(self) -> int:
        """The parts of the longest path among the choices; 1 without a path."""
        values = list_choices(tuple(self.overrides)).values()
        return max((len(Path(value).parts) for value in values if "/" in value), default=1)


def distinguish_runs(runs: Sequence[RunIdentity]) -> list[str]:
    """Distinct names for runs that have one name: with the fewest parts of their paths that differ, else with
    a hash of the choices."""
    for num_path_parts in range(2, max(run.num_path_parts() for run in runs) + 1):
        names = [run.name(num_path_parts=num_path_parts) for run in runs]
        if len(set(names)) == len(runs):
            return names
    return [f"{run.name()}-{digest(list(run.overrides))[:8]}" for run in runs]


def variant() -> str:
    """The label `key=value; key=value` of a run among others of its method, model, order and seed: the other
    overrides of its command that decide the result. Empty outside of a Hydra job."""
    if not HydraConfig.initialized():
        return ""
    return describe_variant(HydraConfig.get().overrides.task)


def describe_variant(overrides: Sequence[str]) -> str:
    """The label `key=value; key=value` of a job, of those of its overrides that decide the result and are not
    shown by themselves."""
    choices = []
    for key, value in sorted(list_choices(list_typed_overrides(overrides)).items()):
        if key not in OUTSIDE_VARIANT:
            short_key = key.removeprefix("routing@").removeprefix("method.")
            if key == PATTERNS_OPTION:
                value = restore_patterns(value)
            choices.append(f"{short_key}={value}")
    return "; ".join(choices)


def restore_patterns(value: str) -> str:
    r"""Regular expressions as they are typed in quotes, without what `cpt.cli` makes of them for Hydra.

    >>> print(restore_patterns(r"{layers[.]0: 0.5, \Aembed: 0.1}"))
    {layers[.]0: 0.5, ^embed: 0.1}
    """
    return re.sub(r"\\A", "^", value)


def unescape(value: str) -> str:
    """A value without the backslashes before characters that are special to Hydra."""
    return HYDRA_ESCAPE.sub(r"\1", value)


def list_typed_overrides(overrides: Sequence[str]) -> tuple[str, ...]:
    """Overrides as they were typed, also out of Hydra's config, which would resolve `${oc.env:NAME}`."""
    if isinstance(overrides, ListConfig):
        return tuple(map(str, OmegaConf.to_container(overrides, resolve=False)))  # type: ignore[arg-type]
    return tuple(overrides)


def quote(text: str) -> str:
    """A text as Hydra takes it on the command line: in quotes where it would read something else.

    >>> print(quote("law"), quote("3.10"), quote("a,b"), quote("null"))
    law "3.10" "a,b" "null"
    """
    if PLAIN.fullmatch(text):
        override = OverridesParser.create().parse_override(f"key={text}")
        if isinstance(override.value(), str):
            return text
    return put_in_quotes(text)


def quote_list(texts: Iterable[str]) -> str:
    """A list of texts as Hydra takes it, like `[law,"3.10"]`."""
    return f"[{','.join(map(quote, texts))}]"


def put_in_quotes(text: str) -> str:
    """A text in double quotes of Hydra's grammar, in which a backslash counts only before such a quote, and
    with `${` as OmegaConf takes it for text. In a shell it is most often within single quotes."""
    escaped = re.sub(r'(\\*)"', r'\1\1\\"', text.replace("${", r"\${"))
    escaped = re.sub(r"(\\+)\Z", r"\1\1", escaped)
    return f'"{escaped}"'


@functools.lru_cache  # the config asks again wherever a name is interpolated
def list_choices(overrides: tuple[str, ...]) -> dict[str, str]:
    """The values of the overrides that decide the result, by key, without secrets; the last one counts of an
    option that is given twice. The dict is cached: it must not be changed."""
    choices = {}
    for override in OverridesParser.create().parse_overrides(list(overrides)):
        key = override.get_key_element().lstrip("+~")
        value = override.value()
        if not is_execution_key(key) and not key.startswith("hydra."):
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            text = str(override.input_line).partition("=")[2]

            if is_number:
                text = str(convert_to_canonical("", value))
            elif isinstance(value, dict | list):
                # As a sweep hands it to its jobs: else a run and the job of a sweep had different labels.
                text = unescape(override.get_value_element_as_str())
            choices[key] = redact(text, key)
    return choices


# A value for models built here, another for given checkpoints.
OmegaConf.register_new_resolver(
    "built_or_given",
    lambda checkpoint, if_built, if_given: if_built if checkpoint is None else if_given,
    replace=True,
)
# A default that depends on another option: ${by:${method.rule},{ties:1},0.5}, the last for all other choices.
OmegaConf.register_new_resolver(
    "by", lambda choice, values, default: values.get(choice, default), replace=True
)
OmegaConf.register_new_resolver("choices", name_run, replace=True)
# Of `trainer` under srun, as torchrun's environment variables are.
OmegaConf.register_new_resolver("tasks_per_node", count_tasks_per_node, replace=True)
OmegaConf.register_new_resolver("step_nodes", step_nodes, replace=True)
OmegaConf.register_new_resolver("variant", variant, replace=True)
