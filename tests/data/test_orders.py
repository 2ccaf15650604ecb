"""Named orders, words, lists, and what is said about any other."""

import itertools

import numpy as np
import pytest
from omegaconf import OmegaConf

from cpt.data.orders import Similarity, arrange_domains, by_texts, resolve_order

NAMES = ["ai", "acl", "pubmed", "phone"]
ORDERS = [["pubmed", "acl", "ai"], ["ai", "pubmed", "acl"]]


def resolved(order, *, names=NAMES, orders=ORDERS, seed=0):
    return resolve_order(order, names=names, orders=orders, seed=seed)


@pytest.mark.parametrize(
    "order, expected",
    [
        (0, ["pubmed", "acl", "ai"]),
        (1, ["ai", "pubmed", "acl"]),
        ("reverse", ["ai", "acl", "pubmed"]),
        ("acl", ["acl"]),
        ("phone", ["phone"]),
        (["phone", "ai"], ["phone", "ai"]),
        (("ai",), ["ai"]),
        (OmegaConf.create(["ai", "acl"]), ["ai", "acl"]),
    ],
)
def test_an_order(order, expected):
    assert resolved(order) == expected


def test_without_named_orders_there_is_one_by_name():
    for orders in (None, []):
        assert resolved(0, orders=orders) == ["acl", "ai", "phone", "pubmed"]
        assert resolved("reverse", orders=orders) == ["pubmed", "phone", "ai", "acl"]


def test_a_random_order_is_one_of_order_0_and_the_seeds():
    drawn = [tuple(resolved("random", seed=seed)) for seed in range(60)]
    assert set(drawn) == set(itertools.permutations(ORDERS[0]))
    assert resolved("random", seed=3) == resolved("random", seed=3)
    assert ORDERS[0] == ["pubmed", "acl", "ai"]


@pytest.mark.parametrize("count", [1, 2, 5, 6, 236])
@pytest.mark.parametrize("word", ["", "reverse", "random"])
def test_swapped_halves_are_the_same_domains_with_the_second_half_first(word, count):
    names = [f"d{number:03d}" for number in range(count)]
    given = {"names": names, "orders": None, "seed": 5}
    whole = resolved(word or 0, **given)
    swapped = resolved(f"{word}_swapped" if word else "swapped", **given)
    half = (count + 1) // 2
    assert sorted(swapped) == names
    assert swapped[: count - half] == whole[half:] and swapped[count - half :] == whole[:half]


@pytest.mark.parametrize("word", ["similar", "dissimilar", "similar_swapped", "dissimilar_swapped"])
def test_what_the_texts_decide_is_the_first_order_until_they_are_read(word):
    assert by_texts(word) and resolved(word) == ORDERS[0]
    assert not any(map(by_texts, (0, "random", "random_swapped", ["similar"])))
    matrix = np.array([[1, 0.9, 0.1], [0.9, 1, 0.5], [0.1, 0.5, 1]])
    similarity = Similarity(["a", "b", "c"], matrix, np.array([0.5, 0.2, 0.1]))
    expected = {"similar": "abc", "dissimilar": "acb", "similar_swapped": "cab", "dissimilar_swapped": "bac"}
    assert "".join(arrange_domains(word, similarity)) == expected[word]


def test_a_tree_needs_names_with_groups():
    assert resolved("similar_tree", names=["cs.AI", "cs.CL", "math.AG"], orders=None)
    for names in (["cs.AI", "cs.CL"], ["cs.AI", "math.AG"], NAMES):
        with pytest.raises(ValueError, match=f"order=similar_tree: the {len(names)} domains are within"):
            resolved("similar_tree_swapped", names=names, orders=None)


LISTED = (
    "0 (pubmed acl ai), 1 (ai pubmed acl), reverse, random, similar, similar_tree, dissimilar, swapped, such"
)


@pytest.mark.parametrize(
    "order, message",
    [
        (2, f"order=2 is not known; allowed: {LISTED}"),
        (-1, f"order=-1 is not known; allowed: {LISTED}"),
        ("alike", f"order=alike is not known; allowed: {LISTED}"),
        (None, f"order=null is not known; allowed: {LISTED}"),
        (0.0, f"order=0.0 is not known; allowed: {LISTED}"),
        (["ai", "law", "art"], "order: unknown domain law, art; there are: acl, ai, phone, pubmed"),
        ([], "must name at least one domain"),
        (["ai", "acl", "ai"], "and each only once"),
    ],
)
def test_what_is_not_an_order(order, message):
    with pytest.raises(ValueError) as error:
        resolved(order)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", ["base", "joint", "general"])
def test_names_that_the_scores_need(name):
    with pytest.raises(ValueError, match=f"may not be called {name}:"):
        resolved(0, names=["ai", name], orders=None)
