"""The site is built without a warning and loads nothing from outside; what programs write is up to date."""

import html.parser
import json
import re
import subprocess
import sys
from importlib.util import find_spec

import pytest

from tests.conftest import ROOT
from tests.support.site import program

DOCS = ROOT / "docs"
pages, options, choosing, support = map(program, ("pages", "options", "choosing", "support"))
# Pairs of which each is tried again: taken, and refused for units that a model does not tell.
TRIED = [("ncl", "Llama"), ("ewc", "T5 v1.1"), ("das", "Mixtral"), ("mask=mofo", "BERT")]
EVERY = [pytest.param(row, "", marks=pytest.mark.campaign) for row in support.list_rows()]


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
@pytest.mark.skipif(find_spec("material") is None, reason="needs mkdocs-material, of the extra docs")
def test_the_site_is_built_without_a_warning_and_loads_nothing_from_outside(tmp_path):
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-q"]
    command += ["-f", DOCS / "site" / "mkdocs.yml", "-d", tmp_path / "site"]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    built = list((tmp_path / "site").rglob("*.html"))
    assert {f"{path.stem}.html" for path in DOCS.glob("*.md")} <= {path.name for path in built}
    reader = Links()
    for path in built:
        reader.feed(path.read_text(encoding="utf-8"))
    assert reader.loads and {link for link in reader.loads if re.match(r"(https?:)?//", link)} == set()
    styles = "".join(path.read_text(encoding="utf-8") for path in (tmp_path / "site").rglob("*.css"))
    assert re.findall(r"(?:url\(|@import )['\"]?(?:https?:)?//[^)]*", styles) == []


def test_every_page_is_in_the_navigation_once_a_new_one_is_told_and_links_lead_to_pages():
    there = {path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md")} | set(pages.OUTSIDE)
    named = [page for group in pages.SECTIONS.values() for page in group]
    assert len(named) == len(set(named))
    nav = pages.make_nav(there | {"new.md"})
    groups = [each for section in nav for each in next(iter(section.values()))]
    flat = [next(iter(each.values())) if isinstance(each, dict) else each for each in groups]
    assert sorted(flat) == sorted(there | {"new.md"})
    assert nav[-1] == {pages.MORE: sorted({*there, "new.md"} - set(named))}
    for page, link, wanted in (
        ("index.md", "docs/plan.md#a", "plan.md#a"),
        ("plan.md", "../benchmarks/README.md", "benchmarks.md"),
        ("studies/m2d2.md", "../../SECURITY.md", "../security.md"),
        ("plan.md", "https://example.org/docs/a.md", "https://example.org/docs/a.md"),
    ):
        assert pages.turn_links(f"[x]({link})", page) == f"[x]({wanted})"


def test_what_programs_write_is_up_to_date():
    assert told("methods.md") == choosing.page(), "python docs/site/choosing.py writes it again"
    found = json.loads(told("support.json"))
    assert set(found) <= set(support.list_rows())  # what was not tried yet is a dash
    assert {family for cells in found.values() for family in cells} == set(support.FAMILIES)
    assert told("support.md") == support.page(found), "python docs/site/support.py writes it again"
    lines = [line for cells in found.values() for line in cells.values()]
    assert [line for line in lines if re.match(r"\w+(Error|Exception):", line)] == []


@pytest.mark.campaign
def test_the_page_of_options_is_what_the_program_writes(monkeypatch):
    monkeypatch.delenv("CPT_CACHE", raising=False)
    assert told("options.md") == options.page(), "python docs/site/options.py writes it again"


@pytest.fixture(scope="module")
def places(tmp_path_factory):
    root = tmp_path_factory.mktemp("support")
    return {"texts": support.write_texts(root / "texts"), "cache": root / "cache"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("row", "family"),
    [*TRIED, *(pytest.param(r, "", marks=pytest.mark.campaign) for r in support.list_rows())],
)
def test_a_pair_is_what_the_table_of_models_says(row, family, places, no_pictures, tmp_path):
    found = json.loads(told("support.json")).get(row, {})
    for name in [family] if family else found:
        assert support.attempt(row, name, **places, folder=tmp_path / name) == found[name]
