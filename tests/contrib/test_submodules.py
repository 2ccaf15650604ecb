"""End tasks of docstrings: the label of a text is the sub-package it stands in."""

import importlib
from collections import Counter

import pytest

from cpt.data.corpus import make_corpus
from cpt.data.sources.docstrings import InstalledDocs, names_in, subpackages
from cpt.evaluation.finetune_tasks import plan_endtasks
from tests.support.endtask_fixtures import options

HELD_OUT = {"valid": 0.2, "test": 0.3, "seed": 0, "max_documents": None}
FIELDS = {"rivers": "water", "hills": "stone", "woods": "tree"}
SENTENCE = "This is number {} of the sentences on {} that the module {} of {} has to say, and it says little."


@pytest.fixture
def package(tmp_path, monkeypatch):
    """Its name; its sub-packages have 12 modules of 4 sentences each."""
    for field, about in FIELDS.items():
        for place in range(12):
            path = tmp_path / "made_up" / field / f"m{place}.py"
            path.parent.mkdir(parents=True, exist_ok=True)
            texts = [SENTENCE.format(number, about, place, field) for number in range(4)]
            path.write_text("".join(f"def f{at}():\n    {text!r}\n" for at, text in enumerate(texts)))
    (tmp_path / "made_up" / "__init__.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    importlib.invalidate_caches()
    return "made_up"


@pytest.mark.parametrize(("classes", "most"), [(3, 100), (2, 3)])
def test_labels_are_the_sub_packages_which_no_text_names_and_a_module_is_in_the_domains_split(
    package, tmp_path, classes, most
):
    given = {"packages": {"land": [package]}, "splits": HELD_OUT, "cache": str(tmp_path), "classes": classes}
    given |= {"examples": dict.fromkeys(("train", "dev", "test"), most), "select": "dev"}
    found = plan_endtasks(options("submodules", **given), ["land"], ["land"]).source.task("land")
    assert len(found.classes) == classes and {*found.classes} <= {f"{package}.{field}" for field in FIELDS}
    about = {"general": ["stdlib"], "orders": None, "held_out": HELD_OUT, "score_on": "test"}
    source = InstalledDocs(packages=given["packages"], **about)
    text = make_corpus(source, "land", cache=tmp_path / "corpora")
    blanked, splits = names_in(found.classes), {"train": found.train, "valid": found.dev, "test": found.test}
    for split, own in splits.items():
        theirs = blanked.sub("_", "\n".join(text.documents(split)["text"]))
        assert own and all(example.text in theirs and " of _ has to say" in example.text for example in own)
        assert all(FIELDS[example.label.split(".")[1]] in example.text for example in own)
        assert max(Counter(example.label for example in own).values()) <= most


def test_a_sub_package_with_more_than_half_of_the_text_is_divided():
    sizes = {"p": 1, "p.core.x.a": 4, "p.core.x.b": 4, "p.core.y.a": 3, "p.core": 1, "p.io.a": 4, "p.one": 1}
    found = subpackages((module, ["text"] * size) for module, size in sizes.items())
    divided = {"p.core.x.a": "p.core.x", "p.core.x.b": "p.core.x", "p.core.y.a": "p.core.y", "p.io.a": "p.io"}
    assert found == {name: name for name in sizes} | divided
