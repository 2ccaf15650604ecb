"""Writes docs/options.md and docs/options/GROUP.md, the reference of all options, from their types and conf/.

`python docs/site/options.py` writes the pages; tests/test_site.py fails if they are out of date."""

import os
import sys
import textwrap
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

os.environ.pop("CPT_CACHE", None)  # a default of the page, and not this machine's
DOCS = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(DOCS.parent))

from hydra import compose, initialize_config_dir  # noqa: E402
from omegaconf import DictConfig  # noqa: E402

import cpt.core.naming  # noqa: E402, F401  (registers the resolvers)
from cpt.core.config import CONF  # noqa: E402
from cpt.trainer.help import REQUIRED, describe_choice, list_options, list_sections  # noqa: E402

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
MIN_SHARING = 3  # choices from which on equal rows are in one table
INTRODUCTION = """# Options

After this page you can find each option of a run, with its default, meaning and allowed values.
Options of the groups are on pages of their own. Each option can be set on the command line
(`python run.py trainer.steps=500`) or in a YAML file ([extend](extend.md)).
`python run.py method=das --options` prints the same tables for the choices of a command, of which
some have more options, like `endtask=das6`. Not listed: `init_from` ([resume](resume.md)),
`method.lr_multiplier` (the factor on `model.lr` for modules that a method adds), the options of
`hydra.launcher` and `hydra.sweeper` ([sweeps](sweeps.md), [tuning](tune.md)), `callbacks`
([extend](extend.md)), and the entries of `domains.catalogue` and `domains.packages`
([data](data.md)).

Required options come first, in bold, with the value `???`. An empty *allowed* cell means that the
library checks the value.
`python docs/site/options.py` generates these pages.

"""


@dataclass
class ChoicePage:
    """What the page of a group says of one choice."""

    name: str
    rows: list[str]  # of the tables: one for each option
    shared_keys: list[str] = field(
        default_factory=list
    )  # of rows that several choices have, which are elsewhere


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


def rows(cfg: DictConfig, section: str) -> Iterator[str]:
    """A row for each option of a section, bold for a required one."""
    for option in list_options(cfg, section):
        key = f"**`{option.key}`**" if option.is_required else f"`{option.key}`"
        value = option.value.replace("|", "&#124;") or '""'
        yield f"| {key} | `{value}` | {escape(option.description)} | {escape(option.allowed)} |"


def key_of(row: str) -> str:
    """The option of a row."""
    return row.split("`")[1]


def table(table_rows: list[str]) -> list[str]:
    return ["| option | default | meaning | allowed |", "| :-- | :-- | :-- | :-- |", *table_rows, ""]


def within(cfg: DictConfig, group: str) -> list[str]:
    """The rows of a group's sections, one after another."""
    sections = [section for section in list_sections(cfg) if section.split(".")[0] == group]
    return [row for section in sections for row in rows(cfg, section)]


def index_page(cfg: DictConfig) -> str:
    """The list of pages, and the options of a run that are in no group."""
    lines = ["| group | page |", "| :-- | :-- |"]
    lines += [f"| `{group}` | [{title}](options/{group}.md) |" for group, (title, _) in GROUPS.items()]
    sections = [section for section in list_sections(cfg) if section.split(".")[0] not in GROUPS]
    lines += ["", "## Options in no group", ""]
    lines += table([row for section in sections for row in rows(cfg, section)])
    links = "[Commands](cli.md) · [Config groups](extend.md) · [Glossary](glossary.md)"
    return INTRODUCTION + "\n".join([*lines, "## See also", "", links]) + "\n"


def choice_page(group: str, name: str) -> ChoicePage:
    """The rows of a choice, of those options alone that are the group's."""
    section = {"routing": "method", "strategy": "trainer"}.get(group, group)
    *others, chosen = SET_BY.get(group, group).split(" ")
    cfg = composed(*others, f"{chosen}={name}", *NEEDED.get(group, []))
    keys = {
        "routing": ("method.routing.",),
        "strategy": ("trainer.strategy", "trainer.reshard"),
        "mask": (f"mask.{name}.",),
    }.get(group, ("",))
    return ChoicePage(name, [row for row in within(cfg, section) if key_of(row).startswith(keys)])


def take_shared_rows(pages: list[ChoicePage]) -> list[str]:
    """The rows that are the same in several choices, which are taken out of these. Required options stay
    where they are; of one with several defaults, the most frequent row is taken."""
    counts = Counter(row for page in pages for row in page.rows if REQUIRED not in row)
    rows_by_key = {key_of(row): row for row, count in reversed(counts.most_common()) if count >= MIN_SHARING}
    shared_rows = [row for row in counts if rows_by_key.get(key_of(row)) == row]
    for page in pages:
        page.shared_keys = [key_of(row) for row in page.rows if row in shared_rows]
        page.rows = [row for row in page.rows if row not in shared_rows]
    return shared_rows


def choice_section(group: str, page: ChoicePage) -> list[str]:
    """The lines of a choice: what it is, its own options, and the names of those that it shares."""
    lines = [f"## `{group}={page.name}`", ""]
    description = describe_choice(CONF / group / f"{page.name}.yaml")
    if description:
        lines += [*textwrap.wrap(escape(description), 100), ""]
    if page.rows:
        lines += table(page.rows)
    if page.shared_keys:
        keys = ", ".join(f"`{key}`" for key in page.shared_keys)
        lines += [*textwrap.wrap(f"[Shared options](#shared-options): {keys}.", 100), ""]
    return lines


def group_page(group: str) -> str:
    """The options of a group, by choice, after those that several choices share; choices without options are
    in one line."""
    title, guide = GROUPS[group]
    pages = [choice_page(group, name) for name in choices(group)]
    empty = [f"`{group}={page.name}`" for page in pages if not page.rows]
    pages = [page for page in pages if page.rows]

    about = f"After this page you can set the options of `{group}` ([guide](../{guide}.md))."
    lines = [f"# {title}: options", "", about, ""]
    if len(pages) > 3:
        links = " · ".join(f"[{page.name}](#{group}{page.name})" for page in pages)
        lines += [*textwrap.wrap(links, 100), ""]
    shared_rows = take_shared_rows(pages)
    if shared_rows:
        lines += ["## Shared options", "", f"The same in {MIN_SHARING} choices or more, which name them.", ""]
        lines += table(shared_rows)
    for page in pages:
        has_heading = len(pages) > 1 or group not in ALIKE
        lines += choice_section(group, page) if has_heading else table(page.rows)
    if empty:
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
