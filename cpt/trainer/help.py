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
    given = get_args_parser().parse_args([each for each in arguments if each != FLAG])
    added = [f"hydra.searchpath=[file://{Path(given.config_dir).absolute()}]"] if given.config_dir else []
    with initialize_config_dir(str(CONF), version_base="1.3"):
        cfg = compose(CONFIG, overrides=[*given.overrides, *added])
    chosen = {each.lstrip("+~").partition("=")[0].partition("@")[0] for each in given.overrides} & set(cfg)
    blocks = [
        "\n".join(
            f"{key}={value}\n    {meant}" + f"; allowed: {words}" * bool(words)
            for key, value, meant, words in list_options(cfg, place)
        )
        for place in list_sections(cfg)
        if not chosen or place.split(".")[0] in chosen
    ]
    return "\n\n".join(filter(None, blocks))


def list_sections(cfg: DictConfig, place: str = "") -> Iterator[str]:
    """The sections of a config that have options, each followed by those within it."""
    node = OmegaConf.select(cfg, place) if place else cfg
    if isinstance(node, DictConfig):
        if place in FIXED or "_target_" in node:
            yield place
        for name in node:
            if not OmegaConf.is_missing(node, name):
                yield from list_sections(cfg, join(place, str(name)))


def options_at(cfg: DictConfig, place: str) -> Sequence[type[Options]]:
    """The Options of a section; none where its class has none."""
    target = OmegaConf.select(cfg, join(place, "_target_"))
    kind = KNOWN.get(target) or (options_class(target, place=place) if target else None)
    return FIXED.get(place) or ([] if kind is None else [kind])


def list_options(cfg: DictConfig, place: str) -> Iterator[tuple[str, str, str, str]]:
    """Of each option of a section its key, its value as one gives it, its help and what is allowed."""
    section = OmegaConf.select(cfg, place) if place else cfg
    for kind in options_at(cfg, place):
        for field in fields(kind):
            # `in section` is false for a value that is missing (`???`), `in section.keys()` is not
            node = section._get_node(field.name) if field.name in section.keys() else None  # noqa: SIM118
            is_section = isinstance(node, DictConfig) and not node._is_missing() and len(node) > 0
            if node is None or is_section:
                continue
            is_required = OmegaConf.is_missing(section, field.name)
            value = "???" if is_required else format_value(to_python(section[field.name]))
            words = allowed(option_types(kind)[field.name])
            yield join(place, field.name), value, field.metadata["help"], words
