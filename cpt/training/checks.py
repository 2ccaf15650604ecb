"""A config checked value by value: before the run has a folder, before any text is read, without torch."""

import inspect
import os
import re
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from functools import cache
from pkgutil import resolve_name
from typing import Any

from hydra.experimental.callback import Callback
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import InterpolationToMissingValueError

from cpt.core.config import FOR_OTHERS
from cpt.core.errors import readable, reason, unknown
from cpt.core.places import CONF
from cpt.core.values import Rules, is_text, shown
from cpt.training.method_rules import MASKS, METHODS, ROUTING, TOGETHER
from cpt.training.run_rules import CLOSED, PASSED, REFUSED, RULES, SCHEDULE, TRAINER

ELSEWHERE = ("strategy", "experiment", "hydra")  # groups whose values stand in other places of the config
FLAGS = ("csv", "wandb", "mode", "project", "entity")  # of logger; every other key is a logger
GIVEN = ("_target_", "_partial_", "_convert_", "_recursive_", *FOR_OTHERS)  # of a choice, not its arguments
SOURCES = ("domains", "replay", "schedule")  # choices whose classes need no torch


class Checked(Callback):
    """Hydra's callback that ends a wrong start in one line, before there is a folder of it."""

    def on_run_start(self, config: DictConfig, **kwargs: Any) -> None:
        with readable(errors_only=not os.environ.get("HYDRA_FULL_ERROR")):
            check(config)

    on_multirun_start = on_run_start


def check(cfg: DictConfig) -> None:
    """Raises ValueError for a key that there is not and for a value that may not be; what is missing (`???`)
    is not looked at."""
    check_top(cfg)
    check_values(cfg, RULES)
    for section in CLOSED:
        check_known(
            cfg, section, own=[key.removeprefix(f"{section}.") for key in RULES if below(key, section)]
        )
    check_trainer(cfg)
    check_choices(cfg)
    for section in SOURCES:
        check_arguments(section, found(cfg, section))
    check_places(found(cfg, "callbacks"), "callbacks", flags=())
    check_places(found(cfg, "logger"), "logger", flags=FLAGS)


def check_top(cfg: DictConfig) -> None:
    """The keys of the config are those of conf/config.yaml and its groups."""
    known = top_level()
    for key in cfg:
        if key not in known and key not in ELSEWHERE and not is_referenced(cfg, key):
            raise ValueError(unknown(str(key), known, whole=", ".join(known)))
    if missing := [key for key in known if key not in cfg and not OmegaConf.is_missing(cfg, key)]:
        raise ValueError(f"{missing[0]} is missing; allowed: {missing[0]}=…, one of conf/{missing[0]}")


@cache
def top_level() -> tuple[str, ...]:
    """The names that a composed config has."""
    text = OmegaConf.load(CONF / "config.yaml")
    groups = [name for each in text.pop("defaults") if each != "_self_" for name in each]
    return tuple(key for key in (*text, *groups) if key not in ELSEWHERE and " " not in key)


def is_referenced(cfg: DictConfig, key: Any) -> bool:
    """Whether another value is made of it, so that it has an effect."""
    return re.search(rf"\$\{{(oc\.select:)?{re.escape(str(key))}\b", OmegaConf.to_yaml(cfg)) is not None


def check_values(cfg: DictConfig, rules: Rules, *, prefix: str = "") -> None:
    for key, rule in rules.items():
        with suppress(InterpolationToMissingValueError):  # made of a value that each job of a sweep has
            if is_given(cfg, prefix + key):
                rule.check(prefix + key, plain(OmegaConf.select(cfg, prefix + key)))


def is_given(cfg: DictConfig, key: str) -> bool:
    parent, _, name = key.rpartition(".")
    node = OmegaConf.select(cfg, parent) if parent else cfg
    return isinstance(node, DictConfig) and name in node and not OmegaConf.is_missing(node, name)


def found(cfg: DictConfig, key: str) -> Any:
    """A value, or nothing."""
    return OmegaConf.select(cfg, key) if is_given(cfg, key) else None


def plain(value: Any) -> Any:
    """A value in Python's own types; what stands in mappings as it is written."""
    if not OmegaConf.is_config(value):
        return value
    return OmegaConf.to_container(value, resolve=OmegaConf.is_list(value))


def below(key: str, section: str) -> bool:
    return key.startswith(f"{section}.") and "." not in key.removeprefix(f"{section}.")


def check_known(cfg: DictConfig, section: str, *, own: Iterable[str]) -> None:
    """The keys of a section are those that there are."""
    node, allowed = found(cfg, section), list(own)
    for key in node if isinstance(node, DictConfig) else ():
        if key not in allowed and not is_referenced(cfg, f"{section}.{key}"):
            raise ValueError(unknown(f"{section}.{key}", [f"{section}.{name}" for name in allowed]))


def check_trainer(cfg: DictConfig) -> None:
    """What the trainer group does not list goes to lightning.Trainer, if that has it and cpt leaves it be."""
    given, own = found(cfg, "trainer"), [key.removeprefix("trainer.") for key in TRAINER]
    for name in given if isinstance(given, DictConfig) else ():
        if name in REFUSED:
            raise ValueError(f"trainer.{name}={shown(plain(given[name]))} is not taken: {REFUSED[name]}")
        if name not in own and name not in PASSED and not is_referenced(cfg, f"trainer.{name}"):
            check_lightning(str(name), own)


def check_lightning(name: str, own: Iterable[str]) -> None:
    from lightning import Trainer  # seconds, which only a name that is new here has to wait for

    theirs = set(inspect.signature(Trainer).parameters) - REFUSED.keys()
    if name not in theirs:
        names = sorted(f"trainer.{each}" for each in {*own, *theirs})
        raise ValueError(
            unknown(
                f"trainer.{name}", names, whole="what conf/trainer lists, and what lightning.Trainer takes"
            )
        )


def check_choices(cfg: DictConfig) -> None:
    """The options of cpt's own methods, masks, routings and schedules; of others nothing is known here."""
    for section, table in (("method", METHODS), ("mask", MASKS), ("method.mask", MASKS)):
        if is_own(found(cfg, section)):
            check_values(cfg, table.get(found(cfg, f"{section}.name"), {}), prefix=f"{section}.")
    for section, rules in (("method.routing", ROUTING), ("schedule", SCHEDULE)):
        if is_own(found(cfg, section)):
            check_values(cfg, rules, prefix=f"{section}.")
    name = found(cfg, "method.name")
    if is_own(found(cfg, "method")) and name in TOGETHER:
        agrees, wrong = TOGETHER[name]
        if not agrees(cfg.method):
            raise ValueError(wrong.format(**{key: shown(value) for key, value in cfg.method.items()}))


def is_own(options: Any) -> bool:
    """Whether what is chosen is one of cpt's."""
    return isinstance(options, DictConfig) and str(options.get("_target_")).startswith("cpt.")


def check_arguments(section: str, options: Any, *, given_by_cpt: Iterable[str] = ()) -> None:
    """The options of a choice are arguments of its class or function, apart from those that cpt gives."""
    if not isinstance(options, DictConfig) or not is_text(options.get("_target_")):
        return
    allowed = arguments(target(section, options))
    if allowed is None:
        return
    names = [name for name in allowed if name not in given_by_cpt and name not in ("step", "steps")]
    for key in options:
        if key not in GIVEN and key not in names:
            raise ValueError(unknown(f"{section}.{key}", [f"{section}.{name}" for name in names]))


def target(section: str, options: Mapping[str, Any]) -> Callable[..., Any]:
    """The class or function of a choice; raises ValueError where there is none."""
    try:
        return resolve_name(options["_target_"])
    except Exception as error:  # whatever a module raises while it is read in
        raise ValueError(f"{section}._target_={options['_target_']}: {reason(error)}") from error


def arguments(made_by: Callable[..., Any]) -> list[str] | None:
    """The names that a function takes, or a class with those that it hands on to the class above; None where
    it takes any, or does not say (built-in types)."""
    makers = [kind.__init__ for kind in made_by.__mro__] if inspect.isclass(made_by) else [made_by]
    names: list[str] = []
    for maker in makers:
        try:
            taken = inspect.signature(maker).parameters.values()
        except ValueError:
            return None
        names += [each.name for each in taken if each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY)]
        if not any(each.kind is each.VAR_KEYWORD for each in taken):
            return [name for name in dict.fromkeys(names) if name != "self"]
    return None


def check_places(options: Any, place: str, *, flags: Iterable[str]) -> None:
    """Every entry but the flags says which class it is, or is null."""
    for name in options if isinstance(options, DictConfig) else ():
        entry = plain(options[name])
        if name in flags or entry is None:
            continue
        if not isinstance(entry, Mapping) or not is_text(entry.get("_target_")):
            raise ValueError(
                f"{place}.{name}={shown(entry)} has no class; allowed: null, or "
                f"+{place}.{name}._target_=module.Class, and what that class takes"
            )
