"""The site is built without a warning and loads nothing from outside; what programs write is up to date."""

import html.parser
import json
import re
import subprocess
import sys
from importlib.util import find_spec

import pytest

from cpt.core.config import CONF
from tests.conftest import ROOT
from tests.support.site import program

DOCS = ROOT / "docs"
pages, options, choosing, support = map(program, ("pages", "options", "choosing", "support"))
# Pairs of which each is tried again: taken, and refused for units that a model does not tell.
TRIED = [
    ("ncl", "Llama"),
    ("ewc", "T5 v1.1"),
    ("das", "Mixtral"),
    ("hat", "DeBERTa v2"),
    ("mask=mofo", "BERT"),
]
CHOICES = [
    path for group in options.GROUPS for path in sorted((CONF / group).glob("*.yaml")) if path.stem != "none"
]


def told(name: str) -> str:
    return (DOCS / name).read_text(encoding="utf-8")


class Links(html.parser.HTMLParser):
    """What a page loads: scripts, styles, pictures, frames; not what it leads to."""

    def __init__(self) -> None:
        super().__init__()
        self.loads: set[str] = set()

    def handle_starttag(self, tag, attrs):
        given = dict(attrs)
        if tag in ("script", "img", "iframe", "source", "video") and given.get("src"):
            self.loads.add(given["src"])
        if tag == "link" and given.get("rel") not in ("canonical", "next", "prev"):
            self.loads.add(given["href"])


@pytest.mark.slow
@pytest.mark.skipif(
    find_spec("material") is None, reason="the extra `docs` is not installed (mkdocs-material)"
)
def test_the_site_is_built_without_a_warning_and_loads_nothing_from_outside(tmp_path):
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-q"]
    command += ["-f", DOCS / "site" / "mkdocs.yml", "-d", tmp_path / "site"]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    built = list((tmp_path / "site").rglob("*.html"))
    assert {f"{path.stem}.html" for path in DOCS.glob("*.md")} <= {path.name for path in built}
    loaded = set()
    for path in built:
        reader = Links()
        reader.feed(path.read_text(encoding="utf-8"))
        loaded |= reader.loads
    assert loaded and {link for link in loaded if re.match(r"(https?:)?//", link)} == set()
    styles = "".join(path.read_text(encoding="utf-8") for path in (tmp_path / "site").rglob("*.css"))
    assert re.findall(r"(?:url\(|@import )['\"]?(?:https?:)?//[^)]*", styles) == []
    assert not (tmp_path / "site" / "site").exists()


def test_every_page_is_in_the_navigation_once_and_a_new_one_is_told():
    there = {path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md")} | set(pages.OUTSIDE)
    named = [page for group in pages.SECTIONS.values() for page in group]
    assert len(named) == len(set(named))
    nav = pages.make_nav(there | {"new.md"})
    flat = [
        next(iter(each.values())) if isinstance(each, dict) else each
        for s in nav
        for each in next(iter(s.values()))
    ]
    assert sorted(flat) == sorted(there | {"new.md"})
    assert nav[-1] == {pages.MORE: sorted({*there, "new.md"} - set(named))}
    assert pages.make_nav({"index.md"}) == [{"Start": [{pages.TITLES["index.md"]: "index.md"}]}]


@pytest.mark.parametrize(
    ("page", "link", "wanted"),
    [
        ("index.md", "[x](docs/plan.md#a)", "[x](plan.md#a)"),
        ("index.md", "[x](CONTRIBUTING.md#the-loop)", "[x](contributing.md#the-loop)"),
        ("plan.md", "[x](../benchmarks/README.md)", "[x](benchmarks.md)"),
        ("results/m2d2.md", "[x](../../SECURITY.md)", "[x](../security.md)"),
        ("benchmarks.md", "[x](../docs/data.md)", "[x](texts.md)"),
        ("plan.md", "[x](clusters.md)", "[x](clusters.md)"),
        ("plan.md", "[x](https://example.org/docs/a.md)", "[x](https://example.org/docs/a.md)"),
    ],
)
def test_links_between_docs_and_what_lies_outside_lead_to_pages(page, link, wanted):
    assert pages.turn_links(link, page) == wanted


def test_the_figures_for_a_choice_are_those_of_the_results():
    assert told("choosing.md") == choosing.page(), "python docs/site/choosing.py writes it again"


@pytest.mark.campaign
def test_the_page_of_options_is_what_the_program_writes(monkeypatch):
    monkeypatch.delenv("CPT_CACHE", raising=False)
    assert told("options.md") == options.page(), "python docs/site/options.py writes it again"


def test_the_table_of_models_has_every_method_and_is_what_was_found():
    found = json.loads(told("support.json"))
    assert set(found) <= set(support.list_rows())  # what was not tried yet is a dash
    assert {family for cells in found.values() for family in cells} == set(support.FAMILIES)
    assert told("support.md") == support.page(found), "python docs/site/support.py writes it again"
    crashed = [
        line
        for cells in found.values()
        for line in cells.values()
        if re.match(r"\w+(Error|Exception):", line)
    ]
    assert crashed == []


@pytest.fixture(scope="module")
def places(tmp_path_factory):
    root = tmp_path_factory.mktemp("support")
    return {"texts": support.write_texts(root / "texts"), "cache": root / "cache"}


def try_pair(row, family, places, folder):
    return support.attempt(row, family, **places, folder=folder)


@pytest.mark.slow
@pytest.mark.parametrize(("row", "family"), TRIED, ids=lambda value: value)
def test_a_pair_is_what_the_table_of_models_says(row, family, places, no_pictures, tmp_path):
    found = json.loads(told("support.json"))
    assert try_pair(row, family, places, tmp_path / "run") == found[row][family]


@pytest.mark.campaign
@pytest.mark.parametrize("row", support.list_rows())
def test_every_pair_is_what_the_table_of_models_says(row, places, no_pictures, tmp_path):
    found = json.loads(told("support.json")).get(row, {})
    again = {family: try_pair(row, family, places, tmp_path / family) for family in found}
    assert again == found
