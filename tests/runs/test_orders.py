"""Runs whose texts decide the order, and runs of a choice of domains, cut to one size."""

import shutil

import numpy as np
import pytest

from cpt.data.orders import Similarity, arrange_domains
from cpt.train import is_done
from cpt.trainer.domain_order import load_cached_order, order_domains
from cpt.trainer.plan import make_plan
from tests.conftest import VOCABULARIES, sentences
from tests.runs.reading import scores_of, start_and_kill
from tests.support.method_fixtures import build_method_fixture

KINDS = {"law": "law", "eats": "food", "sky": "space"}


@pytest.fixture
def of_pairs(small, tmp_path):
    texts = {"general": "general"}
    for kind, vocabulary in KINDS.items():
        texts[f"{kind}.one"] = vocabulary
        texts[f"{kind}.two"] = vocabulary
    for seed, (name, words) in enumerate(texts.items()):
        count = 120 if words == "space" else 60
        lines = sentences(VOCABULARIES[words], count=count, seed=seed)
        (tmp_path / "pairs" / name).mkdir(parents=True)
        (tmp_path / "pairs" / name / "all.txt").write_text("\n".join(lines) + "\n")
    folders = [f"domains.root={tmp_path / 'pairs'}", f"cache_dir={tmp_path / 'cache'}"]
    return lambda *overrides: small(*folders, "trainer.steps=2", "model.pretraining.steps=2", *overrides)


def groups(order) -> list[str]:
    return [name.partition(".")[0] for name in order]


def test_domains_of_one_kind_are_learned_one_after_another(of_pairs, monkeypatch, tmp_path):
    plan = make_plan(of_pairs("order=similar"))
    assert load_cached_order(plan) is None
    similar_order = order_domains(plan)
    assert sorted(similar_order.order) == plan.order != similar_order.order
    matrix = similar_order.similarity.matrix
    assert np.allclose(np.diagonal(matrix), 1) and (matrix == matrix.T).all()

    monkeypatch.setattr("cpt.trainer.domain_order.write_similarity", None)  # of the same texts it is known
    tree, far, swapped = (
        order_domains(make_plan(of_pairs(f"order={order_name}"))).order
        for order_name in ("similar_tree", "dissimilar", "similar_swapped")
    )
    assert order_domains(plan).order == load_cached_order(plan).order == similar_order.order
    for close in (similar_order.order, tree):
        assert groups(close)[::2] == groups(close)[1::2]
    assert far[0] == similar_order.order[0] and groups(far)[0] != groups(far)[1]
    assert swapped == [*similar_order.order[3:], *similar_order.order[:3]]

    for option in ("domains.embedding_samples=5", "domains.held_out.seed=1"):
        assert load_cached_order(make_plan(of_pairs("order=similar", option))) is None

    monkeypatch.undo()
    (file,) = (tmp_path / "cache" / "similarity").glob("*/similarity.json")
    file.write_text(file.read_text()[:-20])
    assert load_cached_order(plan) is None and order_domains(plan).order == similar_order.order  # made again


def test_a_run_keeps_its_order_and_similarity_also_after_a_kill(start, of_pairs, killing, tmp_path):
    cfg = of_pairs("order=similar")
    run = tmp_path / "run"
    cache = tmp_path / "cache"
    order = order_domains(make_plan(cfg)).order
    start_and_kill(start, killing, cfg, run, step=1, domain=order[2])
    start(cfg, run)

    scores = scores_of(run)
    similarity = scores.similarity
    assert similarity["names"] == scores.run["order"] == scores.domains[:-1] == order
    by_name = np.argsort(similarity["names"])
    matrix = np.array(similarity["matrix"])[np.ix_(by_name, by_name)]
    stored_similarity = Similarity(
        sorted(similarity["names"]), matrix, np.array(similarity["general"])[by_name]
    )
    assert arrange_domains("similar", stored_similarity) == order and similarity["embedding"] == "tfidf"

    assert is_done(cfg, run) and not is_done(of_pairs("order=dissimilar"), run)
    shutil.rmtree(cache / "similarity")
    assert not is_done(cfg, run)  # as far as is known without reading
    start(cfg, run)
    assert is_done(cfg, run)


def tokens(data) -> dict[str, int]:
    return {name: int(text.row_lengths.sum()) for name, text in data.train.items()}


def test_balanced_domains_are_learned_for_as_many_steps_but_for_a_row(of_pairs):
    budget = ["trainer.steps=null", "trainer.epochs=1", "replay=general"]
    undivided = build_method_fixture(of_pairs(*budget)).data
    cut = build_method_fixture(of_pairs(*budget, "domains.balanced=true")).data
    sizes = [count for name, count in tokens(cut).items() if name != "general"]
    length = next(iter(cut.train.values())).length
    assert min(tokens(undivided).values()) <= min(sizes) and max(sizes) - min(sizes) < length
    assert tokens(undivided)["sky.one"] > 1.5 * tokens(cut)["sky.one"]
    assert tokens(undivided)["general"] == tokens(cut)["general"]
    cut_steps = [cut.steps(domain) for domain in cut.domains]
    undivided_steps = [undivided.steps(domain) for domain in undivided.domains]
    assert max(cut_steps) - min(cut_steps) <= 1 < max(undivided_steps) - min(undivided_steps)
