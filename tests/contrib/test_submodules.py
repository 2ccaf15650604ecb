"""End tasks of docstrings: the label of a text is the sub-package it stands in."""

import importlib
import re

import pytest

from cpt.data.corpus import make_corpus
from cpt.data.sources.docstrings import InstalledDocs, names_in, subpackages
from cpt.evaluation.finetune_tasks import plan_endtasks
from tests.support.endtask_fixtures import options

HELD_OUT = {"valid": 0.2, "test": 0.3, "seed": 0, "max_documents": None}
FIELDS = {"rivers": "water", "hills": "stone", "woods": "tree"}


def write_module(path, field, place):
    path.parent.mkdir(parents=True, exist_ok=True)
    texts = [
        f"This is number {number} of the sentences on {FIELDS[field]} that the module {place} of {field} "
        "has to say, and it says no more than it must."
        for number in range(4)
    ]
    path.write_text("".join(f"def f{at}():\n    {text!r}\n" for at, text in enumerate(texts)))


@pytest.fixture
def task(tmp_path, monkeypatch):
    """Of made_up, whose sub-packages have the same 12 modules each, and one module on its own."""
    places = {f"{field}/m{place}": (field, place) for field in FIELDS for place in range(12)}
    for name, about in (places | {"alone": ("hills", 99), "__init__": ("hills", 98)}).items():
        write_module(tmp_path / "made_up" / f"{name}.py", *about)
    monkeypatch.syspath_prepend(tmp_path)
    importlib.invalidate_caches()

    own = {"packages": {"land": ["made_up"]}, "splits": HELD_OUT, "cache": str(tmp_path / "cache")}
    own |= {"examples": {"train": 20, "dev": 6, "test": 8}, "classes": 3, "select": "dev"}

    def make(**overrides):
        given = options("submodules", **own | overrides)
        return plan_endtasks(given, ["land"], ["land"]).source.task("land")

    return make


def test_labels_are_the_sub_packages_which_no_text_names_and_a_module_is_in_the_domains_split(task, tmp_path):
    found = task(examples=dict.fromkeys(("train", "dev", "test"), 100))
    assert found.classes == ["made_up.hills", "made_up.rivers", "made_up.woods"]
    examples = [*found.train, *found.dev, *found.test]
    for example in examples:
        assert example.id.startswith(f"{example.label}.")
        assert FIELDS[example.label.split(".")[1]] in example.text
    said = " ".join(example.text for example in examples)
    assert not re.search("hills|rivers|woods", said) and " of _ has to say" in said
    about = {"general": ["stdlib"], "orders": None, "held_out": HELD_OUT, "score_on": "test"}
    source = InstalledDocs(packages={"land": ["made_up"]}, **about)
    text = make_corpus(source, "land", cache=tmp_path / "corpora")
    blanked, splits = names_in(found.classes), {"train": found.train, "valid": found.dev, "test": found.test}
    for split, own in splits.items():
        theirs = blanked.sub("_", "\n".join(text.documents(split)["text"]))
        assert own and all(example.text in theirs for example in own)
    modules = [{example.id.rsplit("-", 1)[0] for example in own} for own in splits.values()]
    assert len(set.union(*modules)) == sum(map(len, modules)) == len(examples) / 4
    found = task(classes=2, examples={"train": 7, "dev": 2, "test": 3})
    for own, most in ((found.train, 7), (found.dev, 2), (found.test, 3)):
        assert max(sum(example.label == label for example in own) for label in found.classes) == most


def test_names_are_blanked_as_words_and_a_sub_package_with_more_than_half_of_the_text_is_divided():
    shown = names_in(["a.core.sets", "a.io"]).sub(
        "_", "Sets of core.io, to_io and io_x; score, radio, subsets"
    )
    assert shown == "_ of _._, to__ and __x; score, radio, subsets"
    sizes = {"p": 1, "p.core.x.a": 4, "p.core.x.b": 4, "p.core.y.a": 3, "p.core": 1, "p.io.a": 4, "p.one": 1}
    found = subpackages((module, ["text"] * size) for module, size in sizes.items())
    divided = {"p.core.x.a": "p.core.x", "p.core.x.b": "p.core.x", "p.core.y.a": "p.core.y", "p.io.a": "p.io"}
    assert found == {name: name for name in sizes} | divided
