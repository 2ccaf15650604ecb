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
        "continue-a-chat-model.md",
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
        "compare-your-method.md",
        "sweeps.md",
        "tune.md",
        "tracking.md",
        "reproduce.md",
    ),
    "Operate": ("operation.md", "resume.md", "release.md", "serving.md"),
    "Reference": (
        "cli.md",
        "files.md",
        "support.md",
        "fidelity.md",
        *(
            f"fidelity/{family}.md"
            for family in (
                *("training", "masks", "regularization", "replay"),
                *("lora", "modules", "tasks"),
            )
        ),
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
        "studies/real-decoder.md",
        "studies/real-encoder.md",
        "studies/default-domains.md",
        "studies/das6.md",
        "studies/standard-cl.md",
        "studies/m2d2.md",
        "studies/protection.md",
        "studies/self-distillation.md",
        "studies/divergence.md",
        "studies/performance.md",
        "studies/fault-tolerance.md",
        "benchmarks.md",
    ),
    "Project": ("contributing.md", "security.md", "changelog.md"),
}
FOLDERS = {
    "options": "Options",
    "fidelity": "Fidelity",
}  # sections below Reference; NAME.md is the first page
FIDELITY_TITLES = {
    "training": "Training and measurement",
    "masks": "Masks, projections",
    "regularization": "Regularization, averaging",
    "replay": "Replay",
    "lora": "LoRA",
    "modules": "Adapters, growth, experts",
    "tasks": "Supervised tasks",
}
TITLES = {"index.md": "Overview", "contributing.md": "Contributing"}
MORE = "More"
CODE = re.compile(r"(```.*?^```|`[^`\n]+`)", re.DOTALL | re.MULTILINE)
# As GitHub reads them: a block has two dollar signs, and neither side of an inline equation a blank.
EQUATION = re.compile(
    r"\$\$(?P<block>.+?)\$\$|(?<![\w$])\$(?P<inline>[^\s$][^$\n]*?)(?<!\s)\$(?![\w$])", re.DOTALL
)
TEST_NAME = re.compile(r"`((?:tests/[\w/]+\.py|test_\w+))`")  # of a table: a word with the name to point at
STYLE = """
.md-grid { max-width: 76rem; }
math[display="block"] { margin: 1em 0; }
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
    """The entries of a section; the pages of a folder of FOLDERS are a section below it."""
    entries: list[Any] = []
    for page in pages:
        folder = page.partition("/")[0]
        if folder in FOLDERS:
            continue
        name = page.removesuffix(".md")
        if name in FOLDERS:
            inner = [entry(inner_page) for inner_page in pages if inner_page.startswith(f"{name}/")]
            entries.append({FOLDERS[name]: [{"Overview": page}, *inner]})
        else:
            entries.append(entry(page))
    return entries


def entry(page: str) -> Any:
    """A page of the navigation, with a title where its own heading is not the one that is shown."""
    folder, _, name = page.rpartition("/")
    if folder == "options":
        return {name.removesuffix(".md"): page}
    if folder == "fidelity":
        return {FIDELITY_TITLES.get(name.removesuffix(".md"), name): page}
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
    name = page.file.src_uri
    if name.startswith("fidelity/"):
        markdown = TEST_NAME.sub(r'<abbr title="\1">test</abbr>', markdown)
    return turn_links(turn_equations(markdown), name)


def turn_equations(markdown: str) -> str:
    """Equations between dollar signs as MathML, which browsers show without a script; code is left alone."""
    parts = CODE.split(markdown)
    for number in range(0, len(parts), 2):  # between them is code
        parts[number] = EQUATION.sub(turn_equation, parts[number])
    return "".join(parts)


def turn_equation(found: re.Match[str]) -> str:
    from latex2mathml.converter import convert

    if found["block"] is not None:
        return convert(found["block"].strip(), display="block").replace("\n", " ")
    return convert(found["inline"], display="inline").replace("\n", " ")


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
