"""Orders: named ones, words, lists, and those that follow from how alike the texts are."""

import itertools
import math

import numpy as np
import pytest
import xxhash
from omegaconf import OmegaConf

from cpt.data.orders import NUM_BUCKETS, Similarity, arrange_domains, embed_by_words, resolve_order

NAMES = ["ai", "acl", "pubmed", "phone"]
ORDERS = [["pubmed", "acl", "ai"], ["ai", "pubmed", "acl"]]
NAMED = [(0, ORDERS[0]), (1, ORDERS[1]), ("reverse", ORDERS[0][::-1]), ("phone", ["phone"])]
NAMED += [(OmegaConf.create(["ai", "acl"]), ["ai", "acl"])]


def resolve(order, *, names=NAMES, orders=ORDERS, seed=0, find_exclusion=lambda name: ""):
    return resolve_order(order, names=names, orders=orders, seed=seed, find_exclusion=find_exclusion)


def test_an_order_is_named_or_a_list_or_a_draw_of_order_0_by_the_seed():
    for order, expected in NAMED:
        assert resolve(order) == expected
    assert resolve(0, orders=None) == ["acl", "ai", "phone", "pubmed"]
    assert resolve("reverse", orders=[]) == ["pubmed", "phone", "ai", "acl"]
    drawn = [tuple(resolve("random", seed=seed)) for seed in range(60)]
    assert set(drawn) == set(itertools.permutations(ORDERS[0]))
    assert resolve("random", seed=3) == resolve("random", seed=3)


def test_swapped_halves_are_the_same_domains_with_the_second_half_first():
    for count in (1, 2, 5):
        names = [f"d{number}" for number in range(count)]
        half = (count + 1) // 2
        for order, swapped in ((0, "swapped"), ("reverse", "reverse_swapped"), ("random", "random_swapped")):
            domains = resolve(order, names=names, orders=None, seed=5)
            expected = domains[half:] + domains[:half]
            assert resolve(swapped, names=names, orders=None, seed=5) == expected


def test_what_is_not_an_order_and_names_that_the_scores_need_are_refused():
    for order in (2, "alike", ["ai", "law"], ["ai", "acl", "ai"], []):
        with pytest.raises(ValueError, match="order|domain"):
            resolve(order)
    message = r"^order=\[ai,acll\] is invalid: unknown domain acll\. Did you mean acl\? Allowed: acl, ai"
    with pytest.raises(ValueError, match=message):
        resolve(["ai", "acll"])
    with pytest.raises(
        ValueError, match=r"^order=\[ai,general\] is invalid: general is the general text, not a"
    ):
        resolve(["ai", "general"])
    exclusion = {"law": "domains.ignore=[law]", "general": "domains.ignore=[general]"}
    for order in ("law", ["ai", "law"], OmegaConf.create(["ai", "law"])):
        typed = order if isinstance(order, str) else r"\[ai,law\]"
        reason = (
            rf"^order={typed} is invalid with domains.ignore=\[law\]: it leaves out law. Allowed: acl, ai, "
        )
        with pytest.raises(ValueError, match=reason):
            resolve(order, find_exclusion=lambda name: exclusion.get(name, ""))
        with pytest.raises(ValueError, match="^order=.* is invalid: unknown "):
            resolve(order, find_exclusion=lambda name: "")
    with pytest.raises(ValueError, match="general is the general text"):
        resolve(["general"], find_exclusion=lambda name: exclusion.get(name, ""))
    with pytest.raises(ValueError, match="^order=0 is invalid: unknown domain law. Allowed: "):
        resolve(0, orders=[["ai", "law"]])
    for name in ("base", "joint", "general"):
        with pytest.raises(ValueError, match=f"uses {name} itself"):
            resolve(0, names=["ai", name], orders=None)


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
    rows = [row.split() for row in matrix.split(",")]
    similarity = Similarity(names, np.array(rows, float), np.array(general))
    for word, order in (("similar", similar), ("similar_tree", tree), ("dissimilar", dissimilar)):
        expected = [names[int(number)] for number in order]
        assert arrange_domains(word, similarity) == expected
        assert arrange_domains(f"{word}_swapped", similarity) == expected[2:] + expected[:2]


def test_means_are_centred_before_their_cosines_and_names_sorted():
    common = np.array([100.0, 100.0, 0.0])
    directions = {"z": [1, 0, 0], "a": [-1, 0, 0], "m": [0, 1, 0], "b": [0, -1, 0]}
    means = {name: common + direction for name, direction in directions.items()}
    similarity = Similarity.of(means, general=common + [2, 0, 0])
    assert similarity.names == ["a", "b", "m", "z"] and similarity.general.tolist() == [-1, 0, 0, 1]
    assert similarity.matrix.tolist() == [[1, 0, 0, -1], [0, 1, -1, 0], [0, -1, 1, 0], [-1, 0, 0, 1]]


def hash_word(word: str) -> int:
    return xxhash.xxh32_intdigest(word.encode()) % NUM_BUCKETS


def test_words_of_any_alphabet_weigh_by_their_counts_and_by_how_few_documents_have_them():
    law = ["the court court rules", "the act"]
    food = ["the bread", "the basil"]
    embeddings = embed_by_words({"law": [law], "food": [food]})
    the, court, rules, bread = (
        embeddings["law"][hash_word(word)] for word in ("the", "court", "rules", "bread")
    )

    # A word that a document has n times weighs 1 + log(n) in it, over the norm of the document's weights. The
    # first document of law has the weights (1, twice, 1) of "the", "court" and "rules", the second (1, 1).
    twice = 1 + math.log(2)
    first_norm = math.sqrt(1 + twice**2 + 1)
    second_norm = math.sqrt(1 + 1)
    # Inverse document frequency: 1 + log((1 + 4 documents) / (1 + documents with the word)). It is 1 for "the",
    # which all four have, and `rare` for a word that one has.
    rare = 1 + math.log((1 + 4) / (1 + 1))
    # The embedding of law is the mean of its two documents.
    assert rules == pytest.approx(rare * (1 / first_norm) / 2)
    assert court == pytest.approx(rare * (twice / first_norm) / 2)
    assert bread == 0
    assert the == pytest.approx((1 / first_norm + 1 / second_norm) / 2)

    # Letters of any alphabet make words, in lower case; single letters, digits and signs do not.
    embeddings = embed_by_words({"a": [["Straße STRASSE x 42 суд"]], "b": [["42 !"]], "c": []})
    expected = {hash_word(word) for word in ("straße", "strasse", "суд")}
    assert set(np.flatnonzero(embeddings["a"])) == expected
    assert not embeddings["b"].any() and not embeddings["c"].any() and embeddings["c"].shape == (NUM_BUCKETS,)
