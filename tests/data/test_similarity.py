"""Orders that follow from how alike texts are: planted blocks, ties, and slow loops."""

import itertools

import numpy as np
import pytest

from cpt.data.orders import Similarity, arrange_domains

GROUPS = ["aa", "bb", "cc", "dd"]
NAMES = [f"{group}.{number}" for number in range(5) for group in GROUPS]  # interleaved


def planted(seed: int, *, names=NAMES, noise=0.05) -> Similarity:
    """Domains in blocks: alike within a coarse domain, hardly between two; the general text is like bb."""
    draw = np.random.default_rng(seed)
    names = sorted(names)
    blocks = np.array([[a[:2] == b[:2] for b in names] for a in names])
    matrix = 0.6 * blocks - 0.2 * ~blocks + noise * draw.normal(size=blocks.shape)
    matrix = (matrix + matrix.T) / 2
    np.fill_diagonal(matrix, 1)
    return Similarity(names, matrix, np.array([0.5 * (name[:2] == "bb") for name in names]) + 0.01 * noise)


def changes(order) -> int:
    """How often an order leaves a coarse domain."""
    return sum(one[:2] != other[:2] for one, other in itertools.pairwise(order))


@pytest.mark.parametrize("seed", range(10))
def test_planted_blocks_are_learned_one_after_another(seed):
    given = planted(seed)
    for order in (arrange_domains("similar", given), arrange_domains("similar_tree", given)):
        assert sorted(order) == given.names and order[0][:2] == "bb"
        assert changes(order) == len(GROUPS) - 1
    opposite = arrange_domains("dissimilar", given)
    assert sorted(opposite) == given.names and opposite[0] == arrange_domains("similar", given)[0]
    assert changes(opposite) >= len(NAMES) - 3


def slow_chain(given: Similarity, *, farthest: bool) -> list[str]:
    """The definition, in names."""
    place = {name: number for number, name in enumerate(given.names)}
    order = [max(given.names, key=lambda name: (given.general[place[name]], [-ord(c) for c in name]))]
    while len(order) < len(place):
        left = [name for name in given.names if name not in order]
        alike = {name: given.matrix[place[order[-1]], place[name]] for name in left}
        best = (min if farthest else max)(alike.values())
        order.append(next(name for name in sorted(left) if alike[name] == best))
    return order


@pytest.mark.parametrize("seed", range(5))
def test_a_chain_goes_to_the_nearest_or_the_farthest_that_is_left(seed):
    given = planted(seed, noise=0.5)
    assert arrange_domains("similar", given) == slow_chain(given, farthest=False)
    assert arrange_domains("dissimilar", given) == slow_chain(given, farthest=True)
    assert arrange_domains("similar", given) != arrange_domains("dissimilar", given)


def test_a_tree_keeps_a_coarse_domain_together_where_a_chain_does_not():
    """aa.1 is like bb.0 more than like aa.0: a chain leaves aa and comes back."""
    names = ["aa.0", "aa.1", "bb.0", "bb.1"]
    matrix = np.array([[1, 0.3, 0.6, 0.0], [0.3, 1, 0.2, 0.1], [0.6, 0.2, 1, 0.1], [0.0, 0.1, 0.1, 1]])
    given = Similarity(names, matrix, np.array([0.9, 0.0, 0.1, 0.1]))
    assert arrange_domains("similar", given) == ["aa.0", "bb.0", "aa.1", "bb.1"]
    assert arrange_domains("similar_tree", given) == ["aa.0", "aa.1", "bb.0", "bb.1"]


def test_within_a_coarse_domain_a_tree_begins_at_the_nearest_to_the_last_learned():
    """bb.0 is nearer to the general text, bb.1 to aa.1."""
    names = ["aa.0", "aa.1", "bb.0", "bb.1"]
    matrix = np.array([[1, 0.8, 0, 0], [0.8, 1, 0.1, 0.4], [0, 0.1, 1, 0.5], [0, 0.4, 0.5, 1]])
    given = Similarity(names, matrix, np.array([0.9, 0.5, 0.6, 0.1]))
    assert arrange_domains("similar_tree", given) == ["aa.0", "aa.1", "bb.1", "bb.0"]


def test_ties_go_by_name():
    given = Similarity(["a", "b", "c", "d"], np.ones((4, 4)), np.zeros(4))
    assert arrange_domains("similar", given) == arrange_domains("dissimilar", given) == ["a", "b", "c", "d"]


def test_means_are_centred_before_their_cosines_and_names_sorted():
    common = np.array([100.0, 100.0, 0.0])
    means = {
        "z": common + [1, 0, 0],
        "a": common - [1, 0, 0],
        "m": common + [0, 1, 0],
        "b": common - [0, 1, 0],
    }
    found = Similarity.of(means, general=common + [2, 0, 0])
    assert found.names == ["a", "b", "m", "z"]
    expected = [[1, 0, 0, -1], [0, 1, -1, 0], [0, -1, 1, 0], [-1, 0, 0, 1]]
    assert found.matrix.tolist() == expected and found.general.tolist() == [-1, 0, 0, 1]


def test_one_domain_and_domains_that_are_the_same_have_an_order():
    one = Similarity.of({"a": np.ones(3)}, general=np.zeros(3))
    assert arrange_domains("similar", one) == ["a"] and np.isfinite(one.matrix).all()
    same = Similarity.of({"b": np.ones(3), "a": np.ones(3)}, general=np.ones(3))
    assert arrange_domains("dissimilar", same) == ["a", "b"] and same.matrix.tolist() == [[0, 0], [0, 0]]


def test_what_differs_by_less_than_a_digit_is_a_tie():
    means = {"a": np.array([1.0, 1e-6]), "b": np.array([1.0, -1e-6]), "c": np.array([-2.0, 0.0])}
    found = Similarity.of(means, general=np.array([1.0, 0.0]))
    assert found.general[0] == found.general[1] == 1.0
