"""Runs whose texts decide the order, and runs of a choice of domains, cut to one size."""

import logging
import shutil

import numpy as np
import pytest
import torch

from cpt import verify
from cpt.data.orders import Similarity, arrange_domains
from cpt.evaluation.scores import Scores
from cpt.train import is_done
from cpt.trainer.domain_order import load_cached_order, order_domains
from cpt.trainer.plan import make_plan
from tests.conftest import VOCABULARIES, sentences
from tests.support.killing import KilledError, Killer
from tests.support.making import made

KINDS = {"law": "law", "eats": "food", "sky": "space"}


def scores_of(folder) -> Scores:
    return Scores.load(folder / "scores.json")


@pytest.fixture
def pairs(tmp_path):
    """Two domains of each kind and general text, of different sizes; of space twice as much."""
    root = tmp_path / "pairs"
    for seed, (group, words) in enumerate(KINDS.items()):
        for number, half in enumerate(("one", "two")):
            write(
                root,
                f"{group}.{half}",
                words,
                seed=10 * seed + number,
                count=60 * (1 + (words == "space")),
            )
    write(root, "general", "general", seed=99, count=60)
    return root


def write(root, name, words, *, seed, count):
    (root / name).mkdir(parents=True)
    (root / name / "all.txt").write_text(
        "\n".join(sentences(VOCABULARIES[words], count=count, seed=seed)) + "\n"
    )


@pytest.fixture
def of_pairs(small, pairs, tmp_path):
    """The config of a run on the pairs, with a cache of its own."""
    places = [
        f"domains.root={pairs}",
        f"cache_dir={tmp_path / 'cache'}",
        "trainer.steps=2",
        "model.base.steps=2",
    ]
    return lambda *overrides: small(*places, *overrides)


def groups(order) -> list[str]:
    return [name.partition(".")[0] for name in order]


@pytest.mark.parametrize("embedding", ["tfidf", "model"])
def test_domains_of_one_kind_are_learned_one_after_another(embedding, of_pairs):
    plan = make_plan(of_pairs("order=similar", f"domains.embedding={embedding}"))
    found = order_domains(plan)
    assert sorted(found.order) == plan.order != found.order
    matrix = found.similarity.matrix
    assert np.allclose(np.diagonal(matrix), 1) and (matrix == matrix.T).all()
    if embedding == "tfidf":  # what two steps of learning make of texts is not much
        assert groups(found.order)[::2] == groups(found.order)[1::2]
        tree = order_domains(make_plan(of_pairs("order=similar_tree"))).order
        assert groups(tree)[::2] == groups(tree)[1::2]
        far = order_domains(make_plan(of_pairs("order=dissimilar"))).order
        assert far[0] == found.order[0] and groups(far)[0] != groups(far)[1]
        swapped = order_domains(make_plan(of_pairs("order=similar_swapped"))).order
        assert swapped == [*found.order[3:], *found.order[:3]]


def test_the_texts_are_read_once_and_the_order_is_known_then(of_pairs, monkeypatch, caplog):
    plan = make_plan(of_pairs("order=similar"))
    assert load_cached_order(plan) is None
    with caplog.at_level(logging.INFO):
        first = order_domains(plan)
    assert "Embedding samples of 7 texts (domains.embedding=tfidf)" in caplog.text
    assert f"order=similar by tfidf: from {first.order[0]} to {first.order[-1]}" in caplog.text
    monkeypatch.setattr("cpt.trainer.similarity.write_similarity", None)
    assert order_domains(plan).order == load_cached_order(plan).order == first.order
    assert load_cached_order(make_plan(of_pairs("order=dissimilar"))) is not None  # of the same texts
    for other in ("domains.embedding_samples=5", "domains.embedding=model", "domains.held_out.seed=1"):
        assert load_cached_order(make_plan(of_pairs("order=similar", other))) is None
    assert (
        load_cached_order(make_plan(of_pairs("order=similar", "model.base.seed=3"))) is not None
    )  # tfidf asks no model


def test_a_run_keeps_its_order_and_similarity(start, of_pairs, tmp_path, monkeypatch, caplog):
    cfg = of_pairs("order=similar")
    start(cfg, tmp_path / "run")
    scores = scores_of(tmp_path / "run")
    told = scores.similarity
    assert told["names"] == scores.run["order"] == scores.domains[:-1] and told["embedding"] == "tfidf"
    by_name = np.argsort(told["names"])
    again = Similarity(
        sorted(told["names"]),
        np.array(told["matrix"])[np.ix_(by_name, by_name)],
        np.array(told["general"])[by_name],
    )
    assert arrange_domains("similar", again) == scores.run["order"]
    assert is_done(cfg, tmp_path / "run") and not is_done(of_pairs("order=dissimilar"), tmp_path / "run")
    report = (tmp_path / "run" / "report.md").read_text()
    assert (
        "Similarity of the domains' texts, in the order learned" in report and "Embedding: tfidf." in report
    )
    with caplog.at_level(logging.INFO):
        start(cfg, tmp_path / "run")
    assert "is finished already" in caplog.text
    assert verify.main([str(tmp_path / "cache")]) == 0
    (file,) = (tmp_path / "cache" / "similarity").glob("*/similarity.json")
    file.write_text("{}")
    assert verify.main([str(tmp_path / "cache")]) == 1
    shutil.rmtree(tmp_path / "cache" / "similarity")
    assert not is_done(cfg, tmp_path / "run")  # as far as is known without reading
    start(cfg, tmp_path / "run")
    assert is_done(cfg, tmp_path / "run")


def test_a_killed_run_goes_on_in_its_order(start, of_pairs, killing, tmp_path):
    cfg = of_pairs("order=similar", "trainer.steps=4")
    start(cfg, tmp_path / "whole")
    domain = scores_of(tmp_path / "whole").run["order"][2]
    killing(Killer(step=3, domain=domain))
    with pytest.raises(KilledError):
        start(cfg, tmp_path / "killed")
    killing(None)
    start(cfg, tmp_path / "killed")
    assert scores_of(tmp_path / "killed").nll == scores_of(tmp_path / "whole").nll


@pytest.mark.adopts
def test_a_new_domain_has_its_place_among_those_that_are_learned(start, of_pairs, pairs, tmp_path, caplog):
    cfg = of_pairs("order=similar")
    start(cfg, tmp_path / "old")
    learned = scores_of(tmp_path / "old").run["order"]
    write(pairs, "law.three", "law", seed=77, count=60)
    why = "order=similar gives a further domain its place among those that are learned"
    with pytest.raises(ValueError, match=rf"\(new: law.three\), and nothing can follow: {why}; allowed: 'o"):
        start(cfg, tmp_path / "old")
    with caplog.at_level(logging.INFO):
        start(cfg, tmp_path / "new")
    assert f"Not continuing from {tmp_path / 'old'}: {why}" in caplog.text
    order = scores_of(tmp_path / "new").run["order"]
    assert len(order) == 7 and scores_of(tmp_path / "new").grown == []
    start(of_pairs(f"order=[{','.join([*learned, 'law.three'])}]"), tmp_path / "old")  # as the line advises
    assert scores_of(tmp_path / "old").grown == [6]


def test_wrong_plans_are_told_before_texts_are_read(of_pairs, monkeypatch):
    monkeypatch.setattr("cpt.trainer.similarity.write_similarity", None)
    with pytest.raises(ValueError, match="method.reduction=100000; allowed"):
        order_domains(make_plan(of_pairs("order=similar", "method=adapter", "method.reduction=100000")))
    with pytest.raises(
        ValueError, match="embedding=static needs the package wordllama, which is not installed"
    ):
        make_plan(of_pairs("order=similar", "domains.embedding=static"))
    sentence = ["domains.embedding=sentence", "domains.embedding_model=/nowhere"]
    with pytest.raises(ValueError, match="embedding=sentence needs the package sentence-transformers"):
        make_plan(of_pairs("order=similar", *sentence))
    monkeypatch.setattr("cpt.data.sources.base.find_spec", lambda name: True)
    with pytest.raises(ValueError, match="domains.embedding_model=/nowhere: there is no such folder"):
        make_plan(of_pairs("order=similar", *sentence))


def tokens(data) -> dict[str, int]:
    return {name: int(text.row_lengths.sum()) for name, text in data.train.items()}


def test_balanced_domains_are_learned_for_as_many_steps_but_for_a_row(of_pairs):
    budget = ["trainer.steps=null", "trainer.epochs=1", "replay=general"]
    whole, cut = made(of_pairs(*budget)).data, made(of_pairs(*budget, "domains.balanced=true")).data
    sizes = [count for name, count in tokens(cut).items() if name != "general"]
    length = next(iter(cut.train.values())).length
    assert min(tokens(whole).values()) <= min(sizes) and max(sizes) - min(sizes) < length
    assert tokens(whole)["sky.one"] > 1.5 * tokens(cut)["sky.one"]
    assert tokens(whole)["general"] == tokens(cut)["general"]
    steps, before = ([data.steps(domain) for domain in data.domains] for data in (cut, whole))
    assert max(steps) - min(steps) <= 1 < max(before) - min(before)
    budgeted = made(of_pairs("domains.balanced=200")).data
    assert all(200 <= count < 200 + length for count in tokens(budgeted).values())


def test_a_balanced_run_of_some_domains_goes_on_with_more_only_where_its_size_is_given(
    start, of_pairs, tmp_path
):
    two, three = ("order=[law.one,eats.one]", "order=[law.one,eats.one,sky.one]")
    start(of_pairs(two, "domains.balanced=true"), tmp_path / "all")
    with pytest.raises(
        ValueError, match="nothing can follow: domains.balanced=true cuts all domains to the sm"
    ):
        start(of_pairs(three, "domains.balanced=true"), tmp_path / "all")
    start(of_pairs(two, "domains.balanced=200"), tmp_path / "fixed")
    start(of_pairs(three, "domains.balanced=200"), tmp_path / "fixed")
    assert scores_of(tmp_path / "fixed").grown == [2]


def test_only_some_domains_and_then_more_of_them(start, of_pairs, tmp_path):
    start(of_pairs("domains.only=eats.*"), tmp_path / "run")
    assert scores_of(tmp_path / "run").run["order"] == ["eats.one", "eats.two"]
    start(of_pairs("domains.only=[eats.*,law.one]"), tmp_path / "run")
    assert scores_of(tmp_path / "run").grown == [2]
    with pytest.raises(
        ValueError, match="domains.only=x.* leaves no domain; there are: eats.one, eats.two, "
    ):
        make_plan(of_pairs("domains.only=x.*"))


def test_coarse_domains_are_learned(start, of_pairs, tmp_path):
    start(of_pairs("domains.by=coarse"), tmp_path / "run")
    scores = scores_of(tmp_path / "run")
    assert scores.run["order"] == ["eats", "law", "sky"]
    assert sum(scores.texts["sky"]["documents"].values()) == 240
    assert torch.load(sorted((tmp_path / "run" / "stages").glob("*.pt"))[-1], weights_only=True)
