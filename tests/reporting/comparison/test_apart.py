"""Runs of which perplexity means different things are never ranked together, and are told apart in words."""

import csv
import json

import pytest

from cpt.evaluation.scores import Scores, conditions
from cpt.report import main
from cpt.reporting.comparison.across import BITS, build_heading
from cpt.reporting.comparison.differences import contrasts, rank_groups
from cpt.reporting.comparison.groups import sections
from cpt.reporting.comparison.measures import MEASURES
from cpt.reporting.comparison.notes import notes
from cpt.reporting.comparison.runs import measure_runs
from tests.support.comparing import CONDITIONS, DOMAINS, NLL, run, saved

OTHERS = {
    "objective": {"objective": "causal"},
    "texts": {"digest": "other"},
    "score_on": {"conditions": CONDITIONS | {"score_on": "valid"}},
    "tokenizer": {"conditions": CONDITIONS | {"tokenizer": "4567cdef"}},
    "length": {"conditions": CONDITIONS | {"length": 128}},
    "mask_rate": {"conditions": CONDITIONS | {"mask_rate": 0.15}},
    "packing": {"conditions": CONDITIONS | {"packing": "isolated"}},
    "domains": {"order": DOMAINS[:2], "nll": [row[:3] for row in NLL[:3]]},
}


def compared(*runs):
    return sections(measure_runs(runs, domains=[]), by_order=False, baseline="ncl")


def lines(*runs):
    return [line for block in build_heading(compared(*runs)) for line in block.lines]


@pytest.fixture
def no_pictures(monkeypatch):
    monkeypatch.setattr("cpt.report.build_pictures", lambda section: [])


@pytest.mark.parametrize("name", OTHERS)
def test_what_perplexity_depends_on_makes_a_section(name):
    alike = [run(seed=seed, method=method) for seed in (0, 1) for method in ("ncl", "das")]
    other = run(method="das", **OTHERS[name])
    first, second = compared(*alike, other)
    assert [len(first.runs), len(second.runs)] == [4, 1]
    assert second.baselines == {}
    assert all(contrasts(second, measure) == {} for measure in MEASURES)
    assert not any(rank_groups(second).values())
    (line,) = [line for line in lines(*alike, other) if line.startswith("Section 2, 1 run of tiny: ")]
    assert name in line
    assert first.title != second.title


def test_runs_that_were_measured_alike_are_one_section_whatever_else_differs():
    runs = [run(), run(seed=1), run(method="das"), run(model="large"), run(order=DOMAINS[::-1])]
    assert len(compared(*runs)) == 1
    assert build_heading(compared(*runs)) == []


def test_the_mask_rate_of_a_causal_model_means_nothing():
    rates = [CONDITIONS | {"mask_rate": rate} for rate in (None, 0.3)]
    assert len(compared(*(run(objective="causal", conditions=given) for given in rates))) == 1


def test_titles_say_what_differs_and_no_more():
    given = [CONDITIONS, CONDITIONS | {"length": 128, "mask_rate": 0.15}]
    titles = [section.title for section in compared(*(run(conditions=each) for each in given))]
    assert titles == [
        "masked: food, law, space (length 64, mask_rate 0.3)",
        "masked: food, law, space (length 128, mask_rate 0.15)",
    ]
    assert compared(run())[0].title == "masked: food, law, space"


def test_texts_that_share_a_name_are_named():
    one, other = run(), run()
    other.scores.texts["law"] = {"digest": "changed"}
    assert "Not the same text in all sections: law." in lines(one, other)


def test_one_is_no_measure_of_intransigence_for_another_length():
    other = run(conditions=CONDITIONS | {"length": 128})
    mine, others, _ = measure_runs([run(), other, run(method="one")], domains=[])
    assert "intransigence/nats" in mine.values
    assert "intransigence/nats" not in others.values


# --- files of earlier versions


def config(length=64, rate=0.3, score_on="test"):
    return {"model": {"length": length, "mask_rate": rate}, "domains": {"score_on": score_on}}


def test_what_a_run_does_not_say_is_taken_from_those_with_as_many_tokens():
    (only,) = compared(run(conditions={}), run(method="das"), run(conditions={}, seed=1))
    assert "unknown" not in " ".join(only.conditions.values())
    assert only.baselines["das"].name == "ncl"
    (line,) = [line for line in notes(only) if "do not say" in line]
    assert line.startswith("2 of 3 runs do not say all of this")
    assert line.endswith("(score_on, tokenizer, length, mask_rate).")
    assert not [line for line in notes(compared(run())[0]) if "do not say" in line]


@pytest.mark.parametrize("counts", ["tokens", "scored", "bytes"])
def test_a_run_with_other_counts_takes_nothing(counts):
    old = run(conditions={})
    setattr(old.scores, counts, [77, 1000, 1000, 1000])
    assert len(compared(old, run())) == 2


def test_unknown_values_do_not_depend_on_the_order_of_learning():
    one, other = run(conditions={}), run(conditions={}, order=DOMAINS[::-1])
    for each in (one, other):
        each.scores.tokens = [{"law": 5, "food": 6}.get(name, 7) for name in each.scores.domains]
    assert one.conditions == other.conditions


# --- bits per byte across sections


def causal(**given):
    return run(objective="causal", **given)


def test_bits_per_byte_of_causal_models_on_one_text_stand_side_by_side():
    other = causal(conditions=CONDITIONS | {"tokenizer": "4567cdef", "length": 32}, method="das")
    found = compared(causal(), causal(seed=1, shift=0.1), other, run(), causal(digest="else"))
    _, table = build_heading(found)
    assert table.title == BITS
    assert [row[:4] for row in table.cells] == [
        ["1", "ncl", "0123abcd", "64"],
        ["2", "das", "4567cdef", "32"],
    ]
    lc = other.scores.metrics["LC"]["bits_per_byte"]
    assert table.cells[1][table.head.index("LC")] == f"{lc:.4f}"
    assert any(BITS in line for line in lines(causal(), other))


@pytest.mark.parametrize(
    "runs",
    [
        [run(), run(conditions=CONDITIONS | {"length": 128})],  # masked: no code length
        [causal(), causal(digest="else")],
        [causal(), run()],
        [causal(), causal(conditions=CONDITIONS | {"score_on": "valid"})],
        [causal(), causal(conditions=CONDITIONS | {"packing": "isolated"})],
    ],
)
def test_other_bits_per_byte_do_not(runs):
    blocks = build_heading(compared(*runs))
    assert len(blocks) == 1
    assert BITS not in blocks[0].lines[0]


def test_methods_that_learn_each_domain_from_the_base_have_no_last_model_there_either():
    other = causal(conditions=CONDITIONS | {"tokenizer": "4567cdef"}, method="one")
    _, table = build_heading(compared(causal(), other))
    assert dict(zip(table.head, table.cells[1], strict=True))["LC"] == "–"


def test_texts_of_which_nothing_is_known_do_not_stand_side_by_side():
    runs = [causal(), causal(conditions=CONDITIONS | {"length": 32})]
    for each in runs:
        each.scores.texts = {}
    assert len(build_heading(compared(*runs))) == 1


# --- the whole comparison


def test_no_run_is_lost(tmp_path, capsys, no_pictures):
    for place, (name, given) in enumerate({"none": {}, **OTHERS}.items()):
        for seed in range(2):
            saved(tmp_path / f"{place}-{name}-{seed}", seed=seed, **given)
    assert main([str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("9 sections, each with its own tables")
    with open(tmp_path / "comparison.csv", newline="") as file:
        table = list(csv.DictReader(file))
    assert len(table) == len({line["folder"] for line in table}) == 18
    assert {line["section"] for line in table} == set("123456789")
    assert {line["length"] for line in table} == {"64", "128"}
    markdown = (tmp_path / "comparison.md").read_text()
    assert markdown.startswith("# Comparison of runs\n\n9 sections, each with its own tables")
    told = json.loads((tmp_path / "comparison.json").read_text())
    assert [len(each["runs"]) for each in told["sections"]] == [2] * 9
    assert told["sections"][0]["conditions"]["tokenizer"] == "0123abcd"
    assert told["apart"][0].startswith("9 sections")
    latex = (tmp_path / "comparison.tex").read_text()
    assert latex.count(r"\begin{tabular}") == 9
    assert r"% masked, mask\_rate 0.3, length 128" in latex


def test_filters_choose_among_the_sections(tmp_path, capsys, no_pictures):
    saved(tmp_path / "1")
    saved(tmp_path / "2", method="das", conditions=CONDITIONS | {"length": 128})
    assert main([str(tmp_path), "--where", "method=das", "--export", "none"]) == 0
    shown = capsys.readouterr().out
    assert "sections" not in shown
    assert "length 128" in shown


def test_runs_without_the_domains_asked_for_are_named(tmp_path, capsys, no_pictures):
    saved(tmp_path / "1")
    saved(tmp_path / "2", **OTHERS["domains"])
    assert main([str(tmp_path), "--domains", "space", "--export", "json"]) == 0
    assert "Runs without these domains" in capsys.readouterr().out
    ((folder, *_),) = json.loads((tmp_path / "comparison.json").read_text())["runs_without_these_domains"]
    assert folder == str(tmp_path / "2")


def test_a_run_writes_down_how_it_was_measured(start, small, tmp_path):
    start(small("trainer.steps=1", "model.base.steps=1", "domains.score_on=valid"), tmp_path / "a")
    written = json.loads((tmp_path / "a" / "scores.json").read_text())["conditions"]
    assert written | {"tokenizer": ""} == {
        "score_on": "valid",
        "tokenizer": "",
        "length": 16,
        "mask_rate": 0.3,
        "scored": "masked tokens",
    }
    assert len(written["tokenizer"]) == 8
    assert "unknown" not in " ".join(conditions(Scores.load(tmp_path / "a" / "scores.json")).values())
