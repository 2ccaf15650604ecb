"""`--options`: what a run may be told, with what it is told where nothing is said."""

from collections.abc import Iterator, Sequence
from dataclasses import fields
from pathlib import Path

from hydra import compose, initialize_config_dir
from hydra._internal.utils import get_args_parser
from omegaconf import DictConfig, OmegaConf

from cpt.adapters.options import PartsOptions
from cpt.core.naming import CONFIG
from cpt.core.options import Options, options_of, with_dot
from cpt.core.places import CONF
from cpt.core.rules import show
from cpt.data.options import DataOptions
from cpt.data.sources.base import HeldOut
from cpt.evaluation.finetune_tasks import FinetuneOptions, FinetuneProtocol
from cpt.evaluation.monitor import MonitorOptions
from cpt.evaluation.options import EvalOptions
from cpt.models.options import BaseOptions, Freeze, ModelOptions
from cpt.optim.options import KNOWN
from cpt.trainer.options import LoggerOptions, RunOptions, TrainerOptions

FLAG = "--options"
# Sections whose options are the same whatever is chosen.
FIXED: dict[str, tuple[type[Options], ...]] = {
    "": (RunOptions,),
    "freeze": (Freeze,),
    "eval": (EvalOptions,),
    "monitor": (MonitorOptions,),
    "data": (DataOptions,),
    "parts": (PartsOptions,),
    "model": (ModelOptions,),
    "model.base": (BaseOptions,),
    "domains.held_out": (HeldOut,),
    "trainer": (TrainerOptions,),
    "endtask": (FinetuneProtocol, FinetuneOptions),
    "logger": (LoggerOptions,),
}


def describe_options(arguments: Sequence[str]) -> str:
    """The options of the groups that the command line chooses, or of all where it chooses none: each with
    its value, its help and what is allowed. Raises HydraException for a command line that cannot be
    composed."""
    given = get_args_parser().parse_args([each for each in arguments if each != FLAG])
    added = [f"hydra.searchpath=[file://{Path(given.config_dir).absolute()}]"] if given.config_dir else []
    with initialize_config_dir(str(CONF), version_base="1.3"):
        cfg = compose(CONFIG, overrides=[*given.overrides, *added])
    chosen = [each.lstrip("+~").partition("=")[0].partition("@")[0] for each in given.overrides]
    groups = [each for each in chosen if each in cfg]
    blocks = (
        describe_section(cfg, place)
        for place in list_sections(cfg)
        if not groups or place.split(".")[0] in groups
    )
    return "\n\n".join(filter(None, map("\n".join, blocks)))


def list_sections(cfg: DictConfig) -> Iterator[str]:
    """The sections of a config that have options, each followed by those within it."""
    yield ""
    for name in cfg:
        yield from sections_within(cfg, str(name))


def sections_within(cfg: DictConfig, place: str) -> Iterator[str]:
    node = OmegaConf.select(cfg, place)
    if isinstance(node, DictConfig):
        if place in FIXED or "_target_" in node:
            yield place
        for name in node:
            if not OmegaConf.is_missing(node, name):
                yield from sections_within(cfg, f"{place}.{name}")


def describe_section(cfg: DictConfig, place: str) -> Iterator[str]:
    """Lines for each option of a section: what it is now, what it means, what is allowed."""
    for key, value, told, allowed in list_options(cfg, place):
        yield f"{key}={value}"
        yield f"    {told}" + (f"; allowed: {allowed}" if allowed else "")


def list_options(cfg: DictConfig, place: str) -> Iterator[tuple[str, str, str, str]]:
    """Of each option of a section its key, its value as one gives it, its help and what is allowed."""
    node = OmegaConf.select(cfg, place) if place else cfg
    for kind in kinds_of(node, place):
        for each in fields(kind):
            if each.name in node and not isinstance(node._get_node(each.name), DictConfig):
                rule = each.metadata["rule"]
                key, value = f"{with_dot(place)}{each.name}", value_of(node, each.name)
                yield key, value, each.metadata["help"], rule.allowed if rule else ""


def value_of(node: DictConfig, name: str) -> str:
    """A value as one gives it on the command line."""
    if OmegaConf.is_missing(node, name):
        return "???"
    value = node[name]
    return show(list(value) if OmegaConf.is_list(value) else value)


def kinds_of(node: DictConfig, place: str) -> tuple[type[Options], ...]:
    """The Options of a section; none where its class has none."""
    if place in FIXED:
        return FIXED[place]
    target = node.get("_target_")
    kind = KNOWN.get(target) or (options_of(target, place=place) if target else None)
    return (kind,) if kind else ()
