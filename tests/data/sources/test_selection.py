"""Which domains a source has: M2D2's names, patterns, coarse domains joined of fine ones."""

from collections import Counter

import pytest
from hydra.utils import instantiate

from cpt.core.schema import fits
from cpt.data.corpus import make_corpus
from cpt.data.sources.base import (
    COARSE_OF_WIKIPEDIA,
    GENERAL,
    NOT_DOMAINS,
    NamePatterns,
    group_names,
    parse_name,
    read_members,
    select_domains,
    stamp_of,
)
from tests.conftest import VOCABULARIES, sentences

# The published list by its parts, as `split` of the data set has it.
FINE_OF_WIKIPEDIA = {
    "Culture_and_the_arts": "Culture_and_Humanities Games_and_Toys Mass_media Performing_arts "
    "Sports_and_Recreation The_arts_and_Entertainment Visual_arts",
    "General_referece": "Further_research_tools_and_topics Reference_works",
    "Health_and_fitness": "Exercise Health_science Human_medicine Nutrition Public_health Self_care",
    "History_and_events": "By_continent By_period By_region",
    "Human_activites": "Human_activities Impact_of_human_activity",
    "Mathematics_and_logic": "Fields_of_mathematics Logic Mathematics",
    "Natural_and_physical_sciences": "Biology Earth_sciences Nature Physical_sciences",
    "Philosophy_and_thinking": "Philosophy Thinking",
    "Religion_and_belief_systems": "Allah Belief_systems Major_beliefs_of_the_world",
    "Society_and_social_sciences": "Social_sciences Society",
    "Technology_and_applied_sciences": "Agriculture Computing Engineering Transport",
}
CLASSES = {  # of S2ORC
    "astro-ph": "CO EP GA HE IM SR",
    "cond-mat": "dis-nn mes-hall mtrl-sci other quant-gas soft stat-mech str-el supr-con",
    "cs": "AI AR CC CE CG CL CR CV CY DB DC DL DM DS ET FL GL GR GT HC IR IT LG LO MA MM MS NA NE NI OH OS "
    "PF PL RO SC SD SE SI SY",
    "econ": "EM GN TH",
    "eess": "AS IV SP SY",
    "math": "AC AG AP AT CA CO CT CV DG DS FA GM GN GR GT HO IT KT LO MG MP NA NT OA OC PR QA RA RT SG SP ST",
    "nlin": "AO CD CG PS SI",
    "physics": "acc-ph ao-ph app-ph atm-clus atom-ph bio-ph chem-ph class-ph comp-ph data-an ed-ph flu-dyn "
    "gen-ph geo-ph hist-ph ins-det med-ph optics plasm-ph pop-ph soc-ph space-ph",
    "q-bio": "BM CB GN MN NC OT PE QM SC TO",
    "q-fin": "CP EC GN MF PM PR RM ST TR",
    "stat": "AP CO ME ML OT TH",
}
ARCHIVES = (
    "Art Philosophy alg-geom ao-sci astro-ph atom-ph bayes-an chao-dyn chem-ph cmp-lg comp-gas cond-mat "
    "dg-ga funct-an gr-qc hep-ex hep-lat hep-ph hep-th math-ph mtrl-th nucl-ex nucl-th patt-sol plasm-ph "
    "q-alg q-bio quant-ph solv-int supr-con"
)
WIKIPEDIA = [f"{coarse}__{fine}" for coarse, some in FINE_OF_WIKIPEDIA.items() for fine in some.split()]
S2ORC = [f"{archive}.{each}" for archive, some in CLASSES.items() for each in some.split()]
S2ORC += ARCHIVES.split()
ALL = [*FINE_OF_WIKIPEDIA, *(f"{archive}_l1" for archive in CLASSES), *WIKIPEDIA, *S2ORC]


def test_236_names_are_22_coarse_domains_and_214_fine_ones():
    parsed = {name: parse_name(name) for name in ALL}
    assert len(parsed) == 236 and set(FINE_OF_WIKIPEDIA) == set(COARSE_OF_WIKIPEDIA)
    assert Counter(fine is None for _, fine in parsed.values()) == {True: 22, False: 214}
    assert len(set(parsed.values())) == 236 and len({coarse for coarse, _ in parsed.values()}) == 49
    assert parsed["General_referece__Reference_works"] == ("General_referece", "Reference_works")
    assert parsed["cond-mat.mes-hall"] == ("cond-mat", "mes-hall") and parsed["cond-mat_l1"][0] == "cond-mat"
    assert parsed["hep-th"] == ("hep-th", "hep-th")
    groups = group_names(ALL, "coarse")
    assert sum(map(len, groups.values())) == 214 and not set(groups) & {"cs_l1"}
    assert groups["q-bio"][0] == "q-bio.BM" and "q-bio" in groups["q-bio"]
    assert group_names(["econ_l1", "cs.AI", "cs_l1"], "coarse") == {"econ": ["econ_l1"], "cs": ["cs.AI"]}


@pytest.fixture
def root(tmp_path):
    """Domains with M2D2's names, a file each."""
    for seed, name in enumerate(["cs.AI", "cs.CL", "cs_l1", "math.AG", "math.AC", "hep-th", GENERAL]):
        (tmp_path / name).mkdir()
        lines = sentences(list(VOCABULARIES.values())[seed % 4], count=40, seed=seed)
        (tmp_path / name / "all.txt").write_text("\n".join(lines) + "\n")
    return tmp_path


def source(root, **given):
    options = {"folder": ".", "column": "text", "document": "line", "general": "general", "orders": None}
    options |= {"held_out": {"valid": 0.1, "test": 0.1, "seed": 0}, "score_on": "test", "root": str(root)}
    return instantiate({"_target_": "cpt.data.sources.texts.Texts", **options, **given}, _convert_="all")


def test_a_stray_of_the_list_is_refused_by_name(root):
    for stray in NOT_DOMAINS:
        with pytest.raises(ValueError, match=f"{stray} stands in M2D2's list and is no domain"):
            parse_name(stray)
        (root / stray).mkdir()
    with pytest.raises(ValueError, match="stands in M2D2's list"):
        _ = source(root, by="fine").domains
    assert not {*NOT_DOMAINS} & {*source(root, by="fine", ignore=[*NOT_DOMAINS]).domains}
    assert {*NOT_DOMAINS} <= {*source(root).domains}  # folders like any other


def test_fine_leaves_the_coarse_ones_out_and_a_coarse_domain_has_the_text_of_its_fine_ones(root, tmp_path):
    fine = ["cs.AI", "cs.CL", "hep-th", "math.AC", "math.AG"]
    assert source(root, by="fine").domains == fine and source(root).domains == sorted([*fine, "cs_l1"])
    made = source(root, by="coarse")
    assert made.domains == ["cs", "hep-th", "math"] and made.members("cs") == ["cs.AI", "cs.CL"]
    made.check_domains(made.domains)
    joined = [text for _, text in read_members(made, "cs")]
    assert joined == [text for name in made.members("cs") for _, text in made.read(name)]
    corpus = make_corpus(made, "cs", cache=tmp_path / "cache")
    assert sum(corpus.facts["documents"].values()) == 80
    assert list(read_members(made, GENERAL)) == list(made.read(GENERAL))
    before = stamp_of(made, "cs")
    (root / "cs.CL" / "more.txt").write_text("one more line\n")
    assert stamp_of(made, "cs") != before and before.startswith("cs-")
    assert stamp_of(made, "hep-th") == stamp_of(source(root), "hep-th")  # nothing is joined to it


@pytest.mark.parametrize(
    ("only", "left"),
    [
        ("cs.*", ["cs.AI", "cs.CL"]),
        (["math.AC", "hep-th"], ["hep-th", "math.AC"]),
        ("/(cs|math)\\.A./", ["cs.AI", "math.AC", "math.AG"]),
        ("*.A[!C]", ["cs.AI", "math.AG"]),
        (["c?_l1", "/hep.*/"], ["cs_l1", "hep-th"]),
    ],
)
def test_only_some_domains_are_left_and_named_orders_are_of_them(only, left, root):
    assert source(root, only=only).domains == left
    orders = [["math.AG", "cs.AI", "cs.CL"], ["cs.CL", "cs.AI"]]
    assert source(root, orders=orders, only="cs.*").named_orders == [["cs.AI", "cs.CL"], ["cs.CL", "cs.AI"]]
    assert source(root, orders={4: orders[0]}, only="cs.*").named_orders == {4: ["cs.AI", "cs.CL"]}


def test_patterns_are_for_whole_names_and_for_joined_ones(root):
    names = {"cs.AI": ["cs.AI"], "/a/": ["/a/"]}
    for pattern in ("cs", "/cs/"):
        with pytest.raises(ValueError, match="leaves no domain"):
            select_domains(names, pattern)
    assert list(select_domains(names, ["/a/", "?a?"])) == ["/a/"]
    assert source(root, by="coarse", only="m*").domains == ["math"]
    with pytest.raises(ValueError, match="domains.only=cs.AI leaves no domain"):
        _ = source(root, by="coarse", only="cs.AI").domains
    assert not any(fits(value, NamePatterns) for value in ("", "/(/", [], ["a", 5], 5, True, {"a": 1}))
