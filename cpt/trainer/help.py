"""`--options`: the options of a run with help and defaults. `GROUP=?`: the choices of a config group."""

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path

from hydra import compose, initialize_config_dir
from hydra._internal.utils import get_args_parser
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import MissingMandatoryValue

from cpt.adapters.options import ModulesOptions
from cpt.core.config import CONF
from cpt.core.errors import CONFIG_GROUPS
from cpt.core.exceptions import InvalidOptionError, format_value
from cpt.core.naming import CONFIG
from cpt.core.schema import Options, describe_allowed, join, list_option_types
from cpt.core.sections import find_class_options, to_python
from cpt.data.sources.base import HeldOut
from cpt.evaluation.finetune_tasks import FinetuneOptions, FinetuneProtocol
from cpt.evaluation.monitor import MonitorOptions
from cpt.evaluation.options import EvalOptions
from cpt.models.options import Freeze, ModelOptions, PretrainingOptions
from cpt.optim.options import KINDS
from cpt.trainer.options import ExportOptions, LoggerOptions, RunOptions, TrainerOptions

FLAG = "--options"
COMMAND = re.compile(r":? python ")
SENTENCE_END = re.compile(r"(?<!et al)\. ")
REQUIRED = "???"  # OmegaConf's sign for a value that has to be given
# Sections whose options are the same whatever is chosen.
FIXED_SECTIONS: dict[str, tuple[type[Options], ...]] = {
    "": (RunOptions,),
    "freeze": (Freeze,),
    "eval": (EvalOptions,),
    "monitor": (MonitorOptions,),
    "export": (ExportOptions,),
    "modules": (ModulesOptions,),
    "model": (ModelOptions,),
    "model.pretraining": (PretrainingOptions,),
    "domains.held_out": (HeldOut,),
    "trainer": (TrainerOptions,),
    "endtask": (FinetuneProtocol, FinetuneOptions),
    "logger": (LoggerOptions,),
}


@dataclass(frozen=True, kw_only=True)
class OptionHelp:
    """What the help says of an option."""

    key: str
    value: str  # as it is written on the command line; REQUIRED for one that has to be given
    description: str
    allowed: str  # empty where a library checks the value

    @property
    def is_required(self) -> bool:
        return self.value == REQUIRED


def describe_options(arguments: Sequence[str]) -> str:
    """The options of the groups that the command line chooses, or of all where it chooses none. Raises
    InvalidOptionError for several values of one key, as a sweep has them."""
    parsed = get_args_parser().parse_args([argument for argument in arguments if argument != FLAG])
    overrides = list(parsed.overrides)
    for override in OverridesParser.create().parse_overrides(overrides):
        if override.is_sweep_override():
            raise InvalidOptionError(
                override.key_or_group,
                override.get_value_string(),
                context=f"with {FLAG}",
                reason="the options of one run are shown",
                allowed="one value",
            )
    if parsed.config_dir:
        overrides.append(f"hydra.searchpath=[file://{Path(parsed.config_dir).absolute()}]")
    with initialize_config_dir(str(CONF), version_base="1.3"):
        cfg = compose(CONFIG, overrides=overrides)

    chosen_groups = {parse_group(override) for override in parsed.overrides} & set(cfg)
    blocks = []
    for section in list_sections(cfg):
        if not chosen_groups or section.split(".")[0] in chosen_groups:
            lines = [format_option(option) for option in list_options(cfg, section)]
            blocks.append("\n".join(lines))
    return "\n\n".join(filter(None, blocks))


def is_question(argument: str) -> bool:
    """Whether an argument asks for the choices of a config group: `method=?`, `routing@method.routing=?`."""
    group, equals, value = argument.partition("=")
    return bool(equals) and value == "?" and "." not in group.partition("@")[0]


def describe_choices(arguments: Sequence[str]) -> str:
    """All choices of the config groups that the command line asks for, each with what its file says of it.
    Raises ValueError for a group that does not exist."""
    parsed = get_args_parser().parse_args(list(arguments))
    folders = [CONF]
    if parsed.config_dir:
        folders.append(Path(parsed.config_dir))

    blocks = []
    for argument in filter(is_question, parsed.overrides):
        group = parse_group(argument)
        files: dict[str, Path] = {}
        for folder in folders:
            files.update((path.stem, path) for path in (folder / group).glob("*.yaml"))
        if not files:
            raise InvalidOptionError(
                group, "?", reason=f"{group} is no group of choices", allowed=", ".join(CONFIG_GROUPS)
            )
        width = max(map(len, files))
        lines = [f"{name:{width}}  {describe_choice(files[name])}".rstrip() for name in sorted(files)]
        blocks.append("\n".join(lines))
    return "\n\n".join(blocks)


def describe_choice(path: Path) -> str:
    """The first sentence of the comment that a choice's file begins with, up to a command; empty without
    one."""
    comment_lines = []
    for line in path.read_text(encoding="utf-8").splitlines():
        if not line.startswith("#"):
            break
        if not line.startswith("# @package"):
            comment_lines.append(line.lstrip("# "))
    text = " ".join(comment_lines)
    end = SENTENCE_END.search(text)
    sentence = text if end is None else f"{text[: end.start()]}."
    return COMMAND.split(sentence)[0]


def parse_group(override: str) -> str:
    """The config group, or the key, that an override is of: `+model@x=hf` is of `model`."""
    return override.lstrip("+~").partition("=")[0].partition("@")[0]


def format_option(option: OptionHelp) -> str:
    mark = "  (required)" if option.is_required else ""
    text = f"{option.key}={option.value}{mark}\n    {option.description}"
    if option.allowed:
        text += f"; allowed: {option.allowed}"
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


def list_options_at(cfg: DictConfig, section: str) -> Sequence[type[Options]]:
    """The Options of a section; none where its class has none."""
    if section in FIXED_SECTIONS:
        return FIXED_SECTIONS[section]
    target = OmegaConf.select(cfg, join(section, "_target_"))
    if target in KINDS:
        return [KINDS[target].options]
    kind = find_class_options(target, section=section) if target else None
    return [] if kind is None else [kind]


@contextmanager
def explaining_missing(cfg: DictConfig) -> Iterator[None]:
    """Turns the error for a required option without a value into a ValueError with the option's
    description."""
    try:
        yield
    except MissingMandatoryValue as error:
        section, _, name = str(error.full_key).rpartition(".")
        for kind in list_options_at(cfg, section):
            for field in fields(kind):
                if field.name == name:
                    key = join(section, name)
                    raise ValueError(
                        f"{key} is missing: {field.metadata['help']}. Allowed: {key}=VALUE"
                    ) from error
        raise


def list_options(cfg: DictConfig, section: str) -> list[OptionHelp]:
    """The options of a section, the required ones first."""
    node = OmegaConf.select(cfg, section) if section else cfg
    options = []
    for kind in list_options_at(cfg, section):
        for field in fields(kind):
            if field.name not in node.keys() or is_section(node, field.name):  # noqa: SIM118
                # `in node` is false for a value that is missing (`???`), `in node.keys()` is not.
                continue
            is_required = OmegaConf.is_missing(node, field.name)
            options.append(
                OptionHelp(
                    key=join(section, field.name),
                    value=REQUIRED if is_required else format_value(to_python(node[field.name])),
                    description=field.metadata["help"],
                    allowed=describe_allowed(list_option_types(kind)[field.name]),
                )
            )
    return sorted(options, key=lambda option: not option.is_required)


def is_section(node: DictConfig, name: str) -> bool:
    """Whether a value of a config is a section of its own: a mapping with entries."""
    if OmegaConf.is_missing(node, name) or OmegaConf.is_interpolation(node, name):
        return False
    value = node[name]
    return isinstance(value, DictConfig) and len(value) > 0
