"""Which pages the site has and in which order; a hook of mkdocs. Pages of docs/ that are named here and
not there are left out, those that are there and not named stand at the end under *More*; both are told.

What lies outside docs/ (README, CONTRIBUTING, …) becomes a page too, and links to it lead there."""

import logging
import re
from pathlib import Path
from typing import Any

log = logging.getLogger("mkdocs.hooks.pages")
ROOT = Path(__file__).resolve().parents[2]
# Pages that are files beside docs/, by the page's name.
OUTSIDE = {
    "index.md": "README.md",
    "contributing.md": "CONTRIBUTING.md",
    "security.md": "SECURITY.md",
    "changelog.md": "CHANGELOG.md",
    "benchmarks.md": "benchmarks/README.md",
}
SECTIONS: dict[str, tuple[str, ...]] = {
    "Start": ("index.md", "walk.md", "examples.md", "running.md"),
    "What there is": ("catalogue.md", "choosing.md", "support.md", "options.md"),
    "Text": ("texts.md", "orders.md", "replay.md", "tasks.md"),
    "Learning": (
        "schedules.md",
        "parts.md",
        "monitoring.md",
        "plan.md",
        "budget.md",
        "advise.md",
        "resuming.md",
    ),
    "Measuring": ("evaluation.md", "endtasks.md", "probes.md", "protection.md"),
    "Many runs": ("sweeps.md", "comparison.md", "wandb.md", "clusters.md"),
    "Handing on": ("gate.md", "card.md", "contents.md"),
    "Your own": ("extending.md", "callbacks.md", "contributing.md"),
    "What was found": (
        *("fidelity.md", "reliability.md", "methods.md", "results.md"),
        *(
            "results/comparison.md",
            "results/standard_cl.md",
            "results/m2d2.md",
            "performance.md",
            "benchmarks.md",
        ),
    ),
    "The project": ("security.md", "changelog.md"),
}
TITLES = {
    "index.md": "What it is",
    "contributing.md": "Every hook, and how things are added",
    "results/comparison.md": "Six domains: the comparison",
    "results/standard_cl.md": "Four tasks: the comparison",
    "results/m2d2.md": "120 fields: the comparison",
}
MORE = "More"
STYLE = """
.md-grid { max-width: 76rem; }
.md-typeset table:not([class]) { font-size: .62rem; }
.md-typeset table:not([class]) th { min-width: 0; padding: .5em .7em; }
.md-typeset table:not([class]) td { padding: .45em .7em; }
.md-typeset table:not([class]) td:first-child code { white-space: nowrap; word-break: normal; }
"""


def on_config(config: Any) -> Any:
    there = {path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md")}
    config["nav"] = make_nav(there | set(OUTSIDE))
    return config


def make_nav(there: set[str]) -> list[dict[str, list[Any]]]:
    """The navigation over the pages that there are."""
    named = {page for pages in SECTIONS.values() for page in pages}
    if missing := sorted(named - there):
        log.info("named in docs/site/pages.py and not there: %s", ", ".join(missing))
    sections = [(title, [page for page in pages if page in there]) for title, pages in SECTIONS.items()]
    if rest := sorted(there - named):
        log.info("not named in docs/site/pages.py, under %s: %s", MORE, ", ".join(rest))
        sections.append((MORE, rest))
    return [{title: [entry(page) for page in pages]} for title, pages in sections if pages]


def entry(page: str) -> Any:
    return {TITLES[page]: page} if page in TITLES else page


def on_files(files: Any, config: Any) -> Any:
    from mkdocs.structure.files import File

    for page, source in OUTSIDE.items():
        files.append(File.generated(config, page, abs_src_path=str(ROOT / source)))
    files.append(File.generated(config, "site.css", content=STYLE))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    return turn_links(markdown, page.file.src_uri)


def turn_links(markdown: str, page: str) -> str:
    """Links as the site has them: a file that became a page is that page, docs/ is the site's root."""
    source = OUTSIDE.get(page)
    folder = (ROOT / source if source else ROOT / "docs" / page).parent

    def turned(found: re.Match[str]) -> str:
        target, anchor = found[1], found[2] or ""
        path = (folder / target).resolve()
        name = path.relative_to(ROOT).as_posix() if path.is_relative_to(ROOT) else target
        pages = {outside: own for own, outside in OUTSIDE.items()}
        if name in pages:
            return f"]({up(page)}{pages[name]}{anchor})"
        if name.startswith("docs/") and source:
            return f"]({name.removeprefix('docs/')}{anchor})"
        if name == "benchmarks":
            return f"]({up(page)}benchmarks.md{anchor})"
        return found[0]

    return re.sub(r"\]\(([^)#:\s]+)(#[^)\s]*)?\)", turned, markdown)


def up(page: str) -> str:
    return "../" * page.count("/")
