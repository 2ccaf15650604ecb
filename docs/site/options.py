"""Every option with its default, its help and what is allowed: `docs/options.md`, from the typed
options and conf/.

`python docs/site/options.py` writes the page; `tests/test_site.py` says where it is not what the
options are now."""

import os
import sys
from collections.abc import Iterator
from pathlib import Path

os.environ.pop("CPT_CACHE", None)  # a default of the page, and not this machine's
DOCS = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(DOCS.parent))

from hydra import compose, initialize_config_dir  # noqa: E402
from omegaconf import DictConfig  # noqa: E402

import cpt.core.naming  # noqa: E402, F401  (registers the resolvers)
from cpt.core.config import CONF  # noqa: E402
from cpt.trainer.help import list_options, list_sections  # noqa: E402

PAGE = DOCS / "options.md"
# Groups in the order of the page; of those that are alike in all choices the default's options are shown.
GROUPS = {
    "method": "How a domain is learned",
    "mask": "What scales a step, under any method",
    "replay": "What is mixed into the batches",
    "domains": "Where text comes from",
    "model": "The model",
    "optim": "The optimizer",
    "lr_scheduler": "Learning rates",
    "trainer": "Budget, batch, precision, machine",
    "strategy": "Processes",
    "routing": "Which part scores a text whose domain is not known",
    "endtask": "End tasks",
    "answers": "What tasks are asked",
    "probe": "The lm-evaluation-harness",
    "logger": "Loggers",
    "callbacks": "Callbacks",
}
ALIKE = {
    "routing": "posterior",
    "model": "tiny_modernbert",
    "trainer": "default",
    "endtask": "texts",
    "answers": "default",
}
SET_BY = {
    "routing": "method=demix routing@method.routing",
    "strategy": "strategy",
}  # a group that stands elsewhere
NEEDED = {"probe": ["benchmark.tasks=[hellaswag]"]}
INTRODUCTION = """# Every option

Made by `python docs/site/options.py` from the typed options: what stands here is what a run checks
before it reads any text. The same for what you have chosen: `python run.py method=das --options`. `???`
must be given; an empty cell means that the library behind it decides what is allowed. Anything is set
on the command line (`python run.py trainer.steps=500`) or in a YAML of your own ([your own
configs](extend.md)).

"""


def composed(*overrides: str) -> DictConfig:
    return compose("config", overrides=list(overrides))


def choices(group: str) -> list[str]:
    """The names of a group's choices, without the one that stands for nothing."""
    if group in ALIKE:
        return [ALIKE[group]]
    return sorted(path.stem for path in (CONF / group).glob("*.yaml") if path.stem != "none")


def escape(text: str) -> str:
    """Text that may stand in a cell of a table."""
    return text.replace("|", "&#124;").replace("<", "&lt;").replace("*", "\\*").replace("_", "\\_")


def rows(cfg: DictConfig, place: str) -> Iterator[str]:
    """A row for each option of a section."""
    for key, value, *told in list_options(cfg, place):
        shown = value.replace("|", "&#124;") or '""'
        yield f"| `{key}` | `{shown}` | " + " | ".join(map(escape, told)) + " |"


def table(found: list[str]) -> list[str]:
    return ["| option | default | what it means | allowed |", "| :-- | :-- | :-- | :-- |", *found, ""]


def within(cfg: DictConfig, group: str) -> list[str]:
    """The rows of a group's sections, one after another."""
    return [row for place in list_sections(cfg) if place.split(".")[0] == group for row in rows(cfg, place)]


def general_options(cfg: DictConfig) -> Iterator[str]:
    """The options of a run that belong to no group."""
    yield "## A run\n"
    places = [place for place in list_sections(cfg) if place.split(".")[0] not in GROUPS]
    yield from table([row for place in places for row in rows(cfg, place)])


def group_options(group: str, title: str) -> Iterator[str]:
    """The options of a group, choice by choice; choices that have none in one line."""
    yield f"## {title}: `{group}`\n"
    empty: list[str] = []
    place = {"routing": "method", "strategy": "trainer"}.get(group, group)
    for name in choices(group):
        chosen = SET_BY.get(group, group).split(" ")
        cfg = composed(*chosen[:-1], f"{chosen[-1]}={name}", *NEEDED.get(group, []))
        found = within(cfg, place)
        if group == "routing":
            found = [row for row in found if row.startswith("| `method.routing.")]
        elif group == "strategy":
            found = [row for row in found if row.startswith(("| `trainer.strategy`", "| `trainer.reshard"))]
        elif group == "mask":
            found = [row for row in found if row.startswith(f"| `mask.{name}.")]
        if found:
            yield f"### `{group}={name}`\n" if group not in ALIKE else ""
            yield from table(found)
        else:
            empty.append(f"`{group}={name}`")
    if empty:
        yield f"Without options of cpt: {', '.join(empty)}.\n"


def page() -> str:
    """`docs/options.md` as the options are now."""
    with initialize_config_dir(str(CONF), version_base="1.3"):
        lines = list(general_options(composed()))
        for group, title in GROUPS.items():
            lines += group_options(group, title)
    return INTRODUCTION + "\n".join(lines).rstrip().replace("\n\n\n", "\n\n") + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    print(PAGE)
