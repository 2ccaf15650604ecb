"""What programs write of the site is up to date; .ci/run builds it."""

import importlib
import importlib.util
import json
import re
from importlib.util import find_spec
from types import ModuleType

import pytest

from tests.conftest import ROOT

DOCS = ROOT / "docs"


def program(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"docs_site_{name}", DOCS / "site" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


PROGRAMS = ("options", "choosing", "scores", "support", "optimizers", "pictures", "campaigns")
options, choosing, scores, support, optimizers, pictures, campaigns = map(program, PROGRAMS)
# Of the pairs that are always tried, one is supported; one is refused, as the units of its model are not known.
QUICK = [("ewc", "T5 v1.1"), ("das", "Mixtral")]


def read(name: str) -> str:
    return (DOCS / name).read_text(encoding="utf-8")


def test_what_programs_write_is_up_to_date():
    assert read("methods.md") == choosing.page(), "python docs/site/choosing.py writes it again"
    assert read("files.md") == scores.page(read("files.md")), "python docs/site/scores.py writes it again"
    fault_tolerance = read("studies/fault-tolerance.md")
    assert fault_tolerance == campaigns.page(fault_tolerance), "python docs/site/campaigns.py writes it again"
    assert scores.SCHEMA.read_text() == scores.schema(), "python docs/site/scores.py writes it again"
    cells_by_row = json.loads(read("support.json"))
    assert set(cells_by_row) <= {
        *support.list_rows(),
        *support.PASSES,
        support.CHECKPOINTING,
    }  # what was not tried yet is a dash
    assert set().union(*cells_by_row.values()) == set(support.FAMILIES)
    assert read("support.md") == support.make_page(cells_by_row), (
        "python docs/site/support.py writes it again"
    )


def test_the_pictures_of_the_guides_are_there_and_on_a_page():
    text = "\n".join(path.read_text(encoding="utf-8") for path in DOCS.rglob("*.md"))
    for name in pictures.PICTURES:
        assert (pictures.IMAGES / f"{name}.png").is_file() and f"images/{name}.png)" in text


def test_the_table_of_memory_by_model_size_is_up_to_date(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks" / "costs")
    model_sizes = importlib.import_module("model_sizes")
    page = read("continue-a-chat-model.md")
    assert page == model_sizes.make_page(page), "python benchmarks/costs/model_sizes.py --published"
    assert all(f"| {model} |" in page for model in model_sizes.CONFIGS)


def test_the_table_of_optimizers_is_up_to_date():
    results = json.loads(read("optimizers.json"))
    assert set(results) == set(optimizers.ROWS)
    assert all(set(cells) == set(optimizers.COLUMNS) for cells in results.values())
    page = read("optimizers.md")
    assert page == optimizers.make_page(page, results), "python docs/site/optimizers.py writes it again"


@pytest.mark.campaign
def test_the_pages_of_options_are_what_the_program_writes(monkeypatch):
    monkeypatch.delenv("CPT_CACHE", raising=False)
    pages = options.pages()
    for path, text in pages.items():
        assert path.read_text() == text, f"{path.name}: python docs/site/options.py"
    assert {*(DOCS / "options").glob("*.md")} == {path for path in pages if path.parent.name == "options"}


@pytest.mark.parametrize(("page", "required"), [
    ("model", ["model.name_or_path"]),
    ("domains", ["domains.root"]),
    ("benchmark", ["benchmark.tasks"]),
])  # fmt: skip
def test_required_options_are_on_their_page(page, required):
    lines = read(f"options/{page}.md").splitlines()
    for option in required:
        assert any(line.startswith(f"| **`{option}`** | `???` |") for line in lines)


def test_required_options_come_first_and_equal_rows_once():
    page = read("options/domains.md")
    shared, _, choices = page.partition("## `domains=")
    assert "| `domains.separator` |" in shared and "| `domains.separator` |" not in choices
    texts = choices.partition("texts`\n")[2]
    first_row = next(line for line in texts.splitlines() if line.startswith("| ") and "`" in line)
    assert first_row.startswith("| **`domains.root`** | `???` |")


def test_the_options_of_a_checkpoint_are_on_the_page_of_models():
    page = read("options/model.md")
    section = page.partition("## `model=hf`")[2].partition("## `")[0]
    for option in ("model.num_hidden_layers", "model.pretraining.head_steps", "model.pretraining.precision"):
        assert f"| `{option}` |" in section


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    return support.write_texts(tmp_path_factory.mktemp("support") / "texts")


def without_losses(cell):
    """A cell without the losses in its message, which depend on the processor."""
    return re.sub(r"[\d.]+ nats", "… nats", cell) if isinstance(cell, str) else cell


@pytest.mark.slow
@pytest.mark.parametrize(
    ("row", "family"),
    [*QUICK, *(pytest.param(r, "", marks=pytest.mark.campaign) for r in support.list_rows())],
)
def test_a_pair_is_what_the_table_of_models_says(row, family, texts, no_pictures, tmp_path):
    """One pair, or, without a family, all that the table has of a row."""
    cells = json.loads(read("support.json")).get(row, {})
    families = [family] if family else list(cells)
    for name in families:
        cell = support.try_pair(row, name, texts=texts, cache=texts.parent / "cache", folder=tmp_path / name)
        assert without_losses(cell) == without_losses(cells[name])


# A pair that is trained, and one that is refused.
QUICK_PAIRS = [("mask=mofo", "muon"), ("mask=mofo", "adafactor")]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("row", "column"),
    [*QUICK_PAIRS, *(pytest.param(row, "", marks=pytest.mark.campaign) for row in optimizers.ROWS)],
)
def test_a_pair_is_what_the_table_of_optimizers_says(row, column, texts, no_pictures, tmp_path):
    """One pair, or, without a column, all of a row."""
    cells = json.loads(read("optimizers.json"))[row]
    columns = [column] if column else list(cells)
    if find_spec("bitsandbytes") is None and "adamw_8bit" in columns:
        columns.remove("adamw_8bit")
    for number, name in enumerate(columns):
        folder = tmp_path / str(number)
        cell = optimizers.try_pair(row, name, texts=texts, cache=texts.parent / "cache", folder=folder)
        assert cell == cells[name]
