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
    blocks = []
    for place in list_sections(cfg):
        if not groups or place.split(".")[0] in groups:
            lines = []
            for key, value, told, allowed in list_options(cfg, place):
                lines += [f"{key}={value}", f"    {told}" + (f"; allowed: {allowed}" if allowed else "")]
            blocks += ["\n".join(lines)] * bool(lines)
    return "\n\n".join(blocks)


def list_sections(cfg: DictConfig, place: str = "") -> Iterator[str]:
    """The sections of a config that have options, each followed by those within it."""
    node = OmegaConf.select(cfg, place) if place else cfg
    if isinstance(node, DictConfig):
        if place in FIXED or "_target_" in node:
            yield place
        for name in map(str, node):
            if not OmegaConf.is_missing(node, name):
                yield from list_sections(cfg, f"{with_dot(place)}{name}")


def list_options(cfg: DictConfig, place: str) -> Iterator[tuple[str, str, str, str]]:
    """Of each option of a section its key, its value as one gives it on the command line, its help and what
    is allowed; nothing of a section whose class has no Options."""
    node = OmegaConf.select(cfg, place) if place else cfg
    kinds, target = FIXED.get(place), node.get("_target_")
    if kinds is None:
        kind = KNOWN.get(target) or (options_of(target, place=place) if target else None)
        kinds = (kind,) if kind else ()
    for each in (each for kind in kinds for each in fields(kind)):
        if each.name in node and not isinstance(node._get_node(each.name), DictConfig):
            shown = "???"
            if not OmegaConf.is_missing(node, each.name):
                value = node[each.name]
                shown = show(list(value) if OmegaConf.is_list(value) else value)
            rule = each.metadata["rule"]
            key, allowed = f"{with_dot(place)}{each.name}", rule.allowed if rule else ""
            yield key, shown, each.metadata["help"], allowed
