"""Named orders, words, lists, and what is said about any other."""

import itertools

import pytest
from omegaconf import OmegaConf

from cpt.data.orders import resolve_order

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


def test_names_that_yaml_reads_as_numbers():
    assert resolved([2020, 2019], names=["2019", "2020"], orders=None) == ["2020", "2019"]


def test_a_random_order_is_one_of_order_0_and_the_seeds():
    drawn = [tuple(resolved("random", seed=seed)) for seed in range(60)]
    assert set(drawn) == set(itertools.permutations(ORDERS[0]))
    assert resolved("random", seed=3) == resolved("random", seed=3)
    assert ORDERS[0] == ["pubmed", "acl", "ai"]


LISTED = "0 (pubmed acl ai), 1 (ai pubmed acl), reverse, random"


@pytest.mark.parametrize(
    "order, message",
    [
        (2, f"order=2 is not known; allowed: {LISTED}"),
        (-1, f"order=-1 is not known; allowed: {LISTED}"),
        ("similar", f"order=similar is not known; allowed: {LISTED}"),
        (None, f"order=null is not known; allowed: {LISTED}"),
        (0.0, f"order=0.0 is not known; allowed: {LISTED}"),
        (["ai", "law", "art"], "unknown domain law, art; there are: acl, ai, phone, pubmed"),
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
