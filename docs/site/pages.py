"""The pages of the site and their order; a hook of mkdocs. Pages missing in docs/ are left out, pages missing
here are at the end under *More*; both are logged. README, CONTRIBUTING and the like become pages too."""

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
    "Start": (
        "index.md",
        "why.md",
        "installation.md",
        "tutorial.md",
        "reading-results.md",
        "troubleshooting.md",
        "glossary.md",
    ),
    "Train": (
        "data.md",
        "models.md",
        "methods.md",
        "replay.md",
        "per-domain-modules.md",
        "optimizers.md",
        "schedules.md",
        "tasks.md",
        "forgetting-control.md",
        "plan.md",
        "large-models.md",
        "distributed.md",
    ),
    "Evaluate": (
        "chats.md",
        "downstream-tasks.md",
        "lm-eval.md",
        "compare.md",
        "sweeps.md",
        "tune.md",
        "tracking.md",
        "reproduce.md",
    ),
    "Operate": ("operation.md", "resume.md", "release.md"),
    "Reference": (
        "cli.md",
        "files.md",
        "support.md",
        "fidelity.md",
        "python-api.md",
        "extend.md",
        "options.md",
        *(
            f"options/{group}.md"
            for group in (
                *("method", "mask", "replay", "loss", "routing", "domains", "model", "optim"),
                *("lr_scheduler", "trainer", "strategy", "endtask", "answers", "chats"),
                *("divergence", "benchmark", "budget", "logger"),
            )
        ),
    ),
    "Studies": (
        "studies/real-encoder.md",
        "studies/default-domains.md",
        "studies/das6.md",
        "studies/standard-cl.md",
        "studies/m2d2.md",
        "studies/protection.md",
        "studies/divergence.md",
        "studies/performance.md",
        "studies/fault-tolerance.md",
        "benchmarks.md",
    ),
    "Project": ("contributing.md", "security.md", "changelog.md"),
}
OPTION_PAGES = "options/"  # a section of their own below Reference, whose first page is options.md
TITLES = {"index.md": "Overview", "contributing.md": "Contributing"}
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
    return [{title: make_section(pages)} for title, pages in sections if pages]


def make_section(pages: list[str]) -> list[Any]:
    """The entries of a section; the pages of options are a section below it."""
    entries: list[Any] = [entry(page) for page in pages if not page.startswith(OPTION_PAGES)]
    options = [entry(page) for page in pages if page.startswith(OPTION_PAGES)]
    if options:
        entries.remove("options.md")
        entries.append({"Options": ["options.md", *options]})
    return entries


def entry(page: str) -> Any:
    """A page of the navigation, with a title where its own heading is not the one that is shown."""
    if page.startswith(OPTION_PAGES):
        return {page.removeprefix(OPTION_PAGES).removesuffix(".md"): page}
    return {TITLES[page]: page} if page in TITLES else page


def on_files(files: Any, config: Any) -> Any:
    from mkdocs.structure.files import File

    for page, source in OUTSIDE.items():
        files.append(File.generated(config, page, abs_src_path=str(ROOT / source)))
    files.append(File.generated(config, "site.css", content=STYLE))
    worker = (ROOT / "docs" / "site" / "iframe-worker.js").read_text(encoding="utf-8")
    files.append(File.generated(config, "iframe-worker.js", content=worker))
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
