"""Writes docs/options.md and docs/options/GROUP.md, the reference of all options, from their types and conf/.

`python docs/site/options.py` writes the pages; tests/test_site.py fails if they are out of date."""

import os
import sys
import textwrap
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

INDEX, PAGES = DOCS / "options.md", DOCS / "options"
# The pages in their order, with their titles and the guide of each.
GROUPS = {
    "method": ("Methods", "methods"),
    "mask": ("Gradient masks", "methods"),
    "replay": ("Replay", "replay"),
    "loss": ("Token weights", "methods"),
    "routing": ("Routing of per-domain modules", "per-domain-modules"),
    "domains": ("Data", "data"),
    "model": ("Model", "models"),
    "optim": ("Optimizer", "optimizers"),
    "lr_scheduler": ("Learning-rate schedule", "schedules"),
    "trainer": ("Training", "distributed"),
    "strategy": ("Devices", "distributed"),
    "endtask": ("Downstream tasks", "downstream-tasks"),
    "answers": ("Task answers", "tasks"),
    "chats": ("Held-out chats", "chats"),
    "divergence": ("Divergence from the base", "forgetting-control"),
    "benchmark": ("lm-evaluation-harness", "lm-eval"),
    "budget": ("Forgetting budget", "forgetting-control"),
    "logger": ("Loggers", "tracking"),
}
# Groups whose choices have the same options: those of one choice, or of one of each kind, are shown.
ALIKE = {
    "routing": ["posterior"],
    "model": ["hf", "tiny_modernbert"],  # a checkpoint; a model that the run pre-trains
    "trainer": ["default"],
    "endtask": ["texts"],
    "answers": ["default"],
    "chats": ["default"],
    "divergence": ["base"],
    "benchmark": ["lm_eval"],
}
SET_BY = {
    "routing": "method=demix routing@method.routing",
    "strategy": "strategy",
}  # groups whose options are in another section
NEEDED = {"benchmark": ["model=tiny_gpt2"]}
INTRODUCTION = """# Options

After this page you can find the options of a run, with its default, meaning and allowed values.
Options of the groups are on pages of their own. Each option can be set on the command line
(`python run.py trainer.steps=500`) or in a YAML file ([extend](extend.md)).
`python run.py method=das --options` prints the same tables for the choices of a command, of which
some have more options, like `endtask=das6`. Not listed: `init_from` ([resume](resume.md)),
`method.lr_multiplier`, by which methods with added modules multiply `model.lr`, the options of
`hydra.launcher` and `hydra.sweeper` ([sweeps](sweeps.md), [tuning](tune.md)), `callbacks`
([extend](extend.md)), and the entries of `domains.catalogue` and `domains.packages`
([data](data.md)).

`???` marks a required value. An empty *allowed* cell means that the library checks the value.
`python docs/site/options.py` generates these pages.

"""


def composed(*overrides: str) -> DictConfig:
    return compose("config", overrides=list(overrides))


def choices(group: str) -> list[str]:
    """The names of a group's choices, without the one that stands for nothing."""
    if group in ALIKE:
        return ALIKE[group]
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
    return ["| option | default | meaning | allowed |", "| :-- | :-- | :-- | :-- |", *found, ""]


def within(cfg: DictConfig, group: str) -> list[str]:
    """The rows of a group's sections, one after another."""
    return [row for place in list_sections(cfg) if place.split(".")[0] == group for row in rows(cfg, place)]


def index_page(cfg: DictConfig) -> str:
    """The list of pages, and the options of a run that are in no group."""
    lines = ["| group | page |", "| :-- | :-- |"]
    lines += [f"| `{group}` | [{title}](options/{group}.md) |" for group, (title, _) in GROUPS.items()]
    places = [place for place in list_sections(cfg) if place.split(".")[0] not in GROUPS]
    lines += ["", "## Options in no group", ""]
    lines += table([row for place in places for row in rows(cfg, place)])
    links = "[Commands](cli.md) · [Config groups](extend.md) · [Glossary](glossary.md)"
    return INTRODUCTION + "\n".join([*lines, "## See also", "", links]) + "\n"


def group_page(group: str) -> str:
    """The options of a group, by choice; choices without options are in one line."""
    title, guide = GROUPS[group]
    sections: dict[str, list[str]] = {}
    place = {"routing": "method", "strategy": "trainer"}.get(group, group)
    for name in choices(group):
        *others, chosen = SET_BY.get(group, group).split(" ")
        found = within(composed(*others, f"{chosen}={name}", *NEEDED.get(group, [])), place)
        if group == "routing":
            found = [row for row in found if row.startswith("| `method.routing.")]
        elif group == "strategy":
            found = [row for row in found if row.startswith(("| `trainer.strategy`", "| `trainer.reshard"))]
        elif group == "mask":
            found = [row for row in found if row.startswith(f"| `mask.{name}.")]
        sections[name] = found
    shown = [name for name, found in sections.items() if found]
    about = f"After this page you can set the options of `{group}` ([guide](../{guide}.md))."
    lines = [f"# {title}: options", "", about, ""]
    if len(shown) > 1:
        links = " · ".join(f"[{name}](#{group}{name})" for name in shown)
        lines += [*textwrap.wrap(links, 100), ""] if len(shown) > 3 else []
    for name in shown:
        heading = [f"## `{group}={name}`", ""] if len(shown) > 1 or group not in ALIKE else []
        lines += [*heading, *table(sections[name])]
    if empty := [f"`{group}={name}`" for name, found in sections.items() if not found]:
        lines += [*textwrap.wrap(f"Without options: {', '.join(empty)}.", 100), ""]
    links = f"[All options](../options.md) · [Guide](../{guide}.md)"
    return "\n".join([*lines, "## See also", "", links]) + "\n"


def pages() -> dict[Path, str]:
    """All pages by file, as the options are now."""
    with initialize_config_dir(str(CONF), version_base="1.3"):
        return {INDEX: index_page(composed()), **{PAGES / f"{g}.md": group_page(g) for g in GROUPS}}


if __name__ == "__main__":
    PAGES.mkdir(exist_ok=True)
    for file, text in pages().items():
        file.write_text(text, encoding="utf-8")
        print(file.relative_to(DOCS))
