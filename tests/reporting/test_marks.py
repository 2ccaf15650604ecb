"""Colours and markers: a method has its own on every page, and no two groups of a page share one."""

import pytest

from cpt.reporting import drawing
from cpt.reporting.marks import COLOURS, METHODS, PLACES, find_places, own_place
from tests.conftest import ROOT


def test_every_method_has_a_place_of_its_own():
    known = {path.stem for path in (ROOT / "conf" / "method").glob("*.yaml")}
    assert known <= set(METHODS)
    assert len(set(METHODS)) == len(METHODS) <= PLACES


def test_a_method_is_alike_on_pages_with_other_groups():
    pages = [("ncl", "das", "kd"), ("hat", "das"), ("das", "ncl + migu", "own_method", "kd")]
    found = [find_places((name, name) for name in names) for names in pages]
    assert {page["das"] for page in found} == {own_place("das")}
    assert found[0]["kd"] == found[2]["kd"] == own_place("kd")


def test_groups_with_values_have_the_colour_of_their_method():
    eight = dict.fromkeys(["ncl", "ewc", "kd", "derpp", "demix", "migu", "das", "replay"])
    variants = {name: name for name in eight} | {f"das (seed={place})": "das" for place in range(4)}
    places = find_places(variants.items())
    assert places["das"] == own_place("das") and places["replay"] == own_place("replay")
    assert (
        len({drawing.style(places[name])["color"] for name, plain in variants.items() if plain == "das"}) == 1
    )
    assert len({drawing.style(places[name])["marker"] for name in variants if name.startswith("das")}) == 5


@pytest.mark.parametrize(
    "names",
    [
        ["replay", "ncl", "migu", "das", "ewc", "kd", "demix"],
        ["lora", "ncl", "replay (a)", "replay (b)", "adapter", "kd + migu", "own", "joint", "one", "hat"],
        list(METHODS[::8]),
    ],
)
def test_the_first_eight_groups_have_a_colour_each(names):
    places = find_places((name, name.split(" (")[0]) for name in names)
    colours = [drawing.style(places[name])["color"] for name in names[:8]]
    assert len(set(colours)) == len(colours)
    assert len(set(places.values())) == len(places)


def test_no_two_of_seventy_two_share_a_place_and_more_are_borne():
    names = [(f"group {place}", f"group {place}") for place in range(80)]
    assert len(set(find_places(names[:PLACES]).values())) == PLACES
    assert len(find_places(names)) == 80
    assert PLACES % COLOURS == 0
