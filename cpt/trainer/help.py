"""`--options`: the options of a run with help and defaults."""

from collections.abc import Iterator, Sequence
from dataclasses import fields
from pathlib import Path

from hydra import compose, initialize_config_dir
from hydra._internal.utils import get_args_parser
from omegaconf import DictConfig, OmegaConf

from cpt.adapters.options import ModulesOptions
from cpt.core.config import CONF
from cpt.core.exceptions import format_value
from cpt.core.naming import CONFIG
from cpt.core.schema import Options, allowed, join, option_types
from cpt.core.sections import options_class, to_python
from cpt.data.options import DataOptions
from cpt.data.sources.base import HeldOut
from cpt.evaluation.finetune_tasks import FinetuneOptions, FinetuneProtocol
from cpt.evaluation.monitor import MonitorOptions
from cpt.evaluation.options import EvalOptions
from cpt.models.options import Freeze, ModelOptions, PretrainingOptions
from cpt.optim.options import KINDS
from cpt.trainer.options import ExportOptions, LoggerOptions, RunOptions, TrainerOptions

FLAG = "--options"
# Sections whose options are the same whatever is chosen.
FIXED_SECTIONS: dict[str, tuple[type[Options], ...]] = {
    "": (RunOptions,),
    "freeze": (Freeze,),
    "eval": (EvalOptions,),
    "monitor": (MonitorOptions,),
    "data": (DataOptions,),
    "export": (ExportOptions,),
    "modules": (ModulesOptions,),
    "model": (ModelOptions,),
    "model.pretraining": (PretrainingOptions,),
    "domains.held_out": (HeldOut,),
    "trainer": (TrainerOptions,),
    "endtask": (FinetuneProtocol, FinetuneOptions),
    "logger": (LoggerOptions,),
}


def describe_options(arguments: Sequence[str]) -> str:
    """The options of the groups that the command line chooses, or of all where it chooses none."""
    parsed = get_args_parser().parse_args([argument for argument in arguments if argument != FLAG])
    overrides = list(parsed.overrides)
    if parsed.config_dir:
        overrides.append(f"hydra.searchpath=[file://{Path(parsed.config_dir).absolute()}]")
    with initialize_config_dir(str(CONF), version_base="1.3"):
        cfg = compose(CONFIG, overrides=overrides)

    chosen_groups = {group_of(override) for override in parsed.overrides} & set(cfg)
    blocks = []
    for section in list_sections(cfg):
        if not chosen_groups or section.split(".")[0] in chosen_groups:
            lines = [format_option(*option) for option in list_options(cfg, section)]
            blocks.append("\n".join(lines))
    return "\n\n".join(filter(None, blocks))


def group_of(override: str) -> str:
    """The config group, or the key, that an override is of: `+model@x=hf` is of `model`."""
    return override.lstrip("+~").partition("=")[0].partition("@")[0]


def format_option(key: str, value: str, description: str, allowed_values: str) -> str:
    text = f"{key}={value}\n    {description}"
    if allowed_values:
        text += f"; allowed: {allowed_values}"
    return text


def list_sections(cfg: DictConfig, section: str = "") -> Iterator[str]:
    """The sections of a config that have options, each followed by those within it."""
    node = OmegaConf.select(cfg, section) if section else cfg
    if not isinstance(node, DictConfig):
        return
    if section in FIXED_SECTIONS or "_target_" in node:
        yield section
    for name in node:
        if not OmegaConf.is_missing(node, name):
            yield from list_sections(cfg, join(section, str(name)))


def options_at(cfg: DictConfig, section: str) -> Sequence[type[Options]]:
    """The Options of a section; none where its class has none."""
    if section in FIXED_SECTIONS:
        return FIXED_SECTIONS[section]
    target = OmegaConf.select(cfg, join(section, "_target_"))
    if target in KINDS:
        return [KINDS[target].options]
    kind = options_class(target, section=section) if target else None
    return [] if kind is None else [kind]


def list_options(cfg: DictConfig, section: str) -> Iterator[tuple[str, str, str, str]]:
    """Of each option of a section its key, its value as one gives it, its help and what is allowed."""
    node = OmegaConf.select(cfg, section) if section else cfg
    for kind in options_at(cfg, section):
        for field in fields(kind):
            if field.name not in node.keys() or is_section(node, field.name):  # noqa: SIM118
                # `in node` is false for a value that is missing (`???`), `in node.keys()` is not.
                continue
            is_required = OmegaConf.is_missing(node, field.name)
            value = "???" if is_required else format_value(to_python(node[field.name]))
            allowed_values = allowed(option_types(kind)[field.name])
            yield join(section, field.name), value, field.metadata["help"], allowed_values


def is_section(node: DictConfig, name: str) -> bool:
    """Whether a value of a config is a section of its own: a mapping with entries."""
    value = node._get_node(name)
    return isinstance(value, DictConfig) and not value._is_missing() and len(value) > 0
