"""Orders: named ones, words, lists, and those that follow from how alike the texts are."""

import itertools
import math

import numpy as np
import pytest
import xxhash
from omegaconf import OmegaConf

from cpt.data.orders import BUCKETS, Similarity, arrange_domains, embed_by_words, resolve_order

NAMES = ["ai", "acl", "pubmed", "phone"]
ORDERS = [["pubmed", "acl", "ai"], ["ai", "pubmed", "acl"]]
NAMED = [(0, ORDERS[0]), (1, ORDERS[1]), ("reverse", ORDERS[0][::-1]), ("phone", ["phone"])]
NAMED += [(OmegaConf.create(["ai", "acl"]), ["ai", "acl"])]


def resolved(order, *, names=NAMES, orders=ORDERS, seed=0):
    return resolve_order(order, names=names, orders=orders, seed=seed)


def test_an_order_is_named_or_a_list_or_a_draw_of_order_0_by_the_seed():
    for order, expected in NAMED:
        assert resolved(order) == expected
    assert resolved(0, orders=None) == ["acl", "ai", "phone", "pubmed"]
    assert resolved("reverse", orders=[]) == ["pubmed", "phone", "ai", "acl"]
    drawn = [tuple(resolved("random", seed=seed)) for seed in range(60)]
    assert set(drawn) == set(itertools.permutations(ORDERS[0]))
    assert resolved("random", seed=3) == resolved("random", seed=3)


def test_swapped_halves_are_the_same_domains_with_the_second_half_first():
    for count, word in itertools.product((1, 2, 5), ("", "reverse", "random")):
        given = {"names": [f"d{number}" for number in range(count)], "orders": None, "seed": 5}
        whole, half = resolved(word or 0, **given), (count + 1) // 2
        assert resolved(f"{word}_swapped" if word else "swapped", **given) == whole[half:] + whole[:half]


def test_what_is_not_an_order_and_names_that_the_scores_need_are_refused():
    for order in (2, "alike", ["ai", "law"], ["ai", "acl", "ai"], []):
        with pytest.raises(ValueError, match="order|domain"):
            resolved(order)
    for name in ("base", "joint", "general"):
        with pytest.raises(ValueError, match=f"uses {name} itself"):
            resolved(0, names=["ai", name], orders=None)


@pytest.mark.parametrize(
    ("matrix", "general", "similar", "tree", "dissimilar"),
    [  # aa.1 is like bb.0 more than like aa.0: a chain leaves aa and comes back
        ("1 .3 .6 0, .3 1 .2 .1, .6 .2 1 .1, 0 .1 .1 1", [0.9, 0.0, 0.1, 0.1], "0213", "0123", "0312"),
        # bb.0 is nearer to the general text, bb.1 to aa.1
        ("1 .8 0 0, .8 1 .1 .4, 0 .1 1 .5, 0 .4 .5 1", [0.9, 0.5, 0.6, 0.1], "0132", "0132", "0213"),
        ("1 1 1 1, 1 1 1 1, 1 1 1 1, 1 1 1 1", [0.0, 0.0, 0.0, 0.0], "0123", "0123", "0123"),  # ties
    ],
)
def test_a_chain_goes_to_the_nearest_or_farthest_and_a_tree_keeps_a_coarse_domain_together(
    matrix, general, similar, tree, dissimilar
):
    names = ["aa.0", "aa.1", "bb.0", "bb.1"]
    given = Similarity(names, np.array([row.split() for row in matrix.split(",")], float), np.array(general))
    for word, places in (("similar", similar), ("similar_tree", tree), ("dissimilar", dissimilar)):
        assert arrange_domains(word, given) == [names[int(place)] for place in places]
        assert arrange_domains(f"{word}_swapped", given) == [names[int(at)] for at in places[2:] + places[:2]]


def test_means_are_centred_before_their_cosines_and_names_sorted():
    common = np.array([100.0, 100.0, 0.0])
    directions = {"z": [1, 0, 0], "a": [-1, 0, 0], "m": [0, 1, 0], "b": [0, -1, 0]}
    found = Similarity.of({n: common + each for n, each in directions.items()}, general=common + [2, 0, 0])
    assert found.names == ["a", "b", "m", "z"] and found.general.tolist() == [-1, 0, 0, 1]
    assert found.matrix.tolist() == [[1, 0, 0, -1], [0, 1, -1, 0], [0, -1, 1, 0], [-1, 0, 0, 1]]


def bucket_of(word: str) -> int:
    return xxhash.xxh32_intdigest(word.encode()) % BUCKETS


def test_words_of_any_alphabet_weigh_by_their_counts_and_by_how_few_documents_have_them():
    texts = {"law": ["the court court rules", "the act"], "food": ["the bread", "the basil"]}
    found = embed_by_words({name: [each] for name, each in texts.items()})
    the, court, rules, bread = (found["law"][bucket_of(word)] for word in ("the", "court", "rules", "bread"))
    twice, rare = 1 + math.log(2), 1 + math.log(5 / 2)  # in one of 4 documents
    once = 1 / math.sqrt(twice**2 + 2) / 2
    assert [rules, court, bread] == pytest.approx([rare * once, twice * rare * once, 0])
    assert the == pytest.approx(once + 1 / math.sqrt(2) / 2)
    found = embed_by_words({"a": [["Straße STRASSE x 42 суд"]], "b": [["42 !"]], "c": []})
    assert set(np.flatnonzero(found["a"])) == {bucket_of(word) for word in ("straße", "strasse", "суд")}
    assert not found["b"].any() and not found["c"].any() and found["c"].shape == (BUCKETS,)
