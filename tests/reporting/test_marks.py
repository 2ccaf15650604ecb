"""Colours and markers: a method has its own on every page, and no two groups of a page share one."""

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
    variants = {f"das (seed={place})": "das" for place in range(4)} | {"das": "das", "hat": "hat"}
    places = find_places(variants.items())
    assert places["das"] == own_place("das") and places["hat"] == own_place("hat")
    assert (
        len({drawing.style(places[name])["color"] for name, plain in variants.items() if plain == "das"}) == 1
    )
    assert len({drawing.style(places[name])["marker"] for name in variants if name != "hat"}) == 5


def test_no_two_of_fifty_four_share_a_place_and_more_are_borne():
    names = [(f"group {place}", f"group {place}") for place in range(60)]
    assert len(set(find_places(names[:PLACES]).values())) == PLACES
    assert len(find_places(names)) == 60
    assert PLACES % COLOURS == 0
