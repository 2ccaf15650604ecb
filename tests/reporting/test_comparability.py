"""Runs are compared as runs of methods where base, texts and settings allow it; what differs is named."""

import json

import numpy as np
import pytest

from cpt.core.config import EXECUTION
from cpt.reporting import compare, findings
from cpt.reporting.comparability import REPRESENTED, is_compared, read_base_hash
from cpt.reporting.load_runs import measure_runs
from cpt.reporting.sections import build_sections, find_differing_settings
from cpt.reporting.tex import write_tables
from tests.support.example_runs import CONDITIONS, NLL, make_run, make_section, save_run

OTHER_BASE = np.array(NLL) - np.array([[0.5], [0], [0], [0]])


def save_run_of_base(folder, weights, **options):
    """A run whose folder names the hash of its base's weights."""
    measured = save_run(folder, **options)
    base = {"model.safetensors": [1, 2, weights], "config.json": [1, 2, str(folder)]}
    (folder / "identity.json").write_text(json.dumps({"base": base}))
    return measured


def sections(*runs):
    return build_sections(measure_runs(runs))


def names(compared_sections):
    names_of_sections = []
    for section in compared_sections:
        names_of_sections.append([group.name for group in section.groups])
    return names_of_sections


def test_runs_with_other_tokenizers_are_compared_in_bits_per_byte_only():
    """The same text as 1,000 tokens and as 800, and as many nats: no perplexity stands next to the other."""
    other_tokenizer = CONDITIONS | {"tokenizer": "89abcdef"}
    nll = np.array(NLL) * 1000 / 800
    tokens = [800] * 4
    runs = [
        make_run(objective="causal"),
        make_run(objective="causal", nll=nll, conditions=other_tokenizer, tokens=tokens),
    ]
    tokenizer_sections = sections(*runs)
    assert [section.title.partition("(")[2] for section in tokenizer_sections] == [
        "tokenizer 0123abcd)",
        "tokenizer 89abcdef)",
    ]
    values, other_values = (section.runs[0].values for section in tokenizer_sections)
    assert values["LC/perplexity"] != other_values["LC/perplexity"]
    assert values["LC/bits_per_byte"] == pytest.approx(other_values["LC/bits_per_byte"])


def conditions(section):
    return "\n".join(findings.list_conditions(section).lines)


def test_runs_of_bases_with_other_losses_are_in_sections_that_name_the_difference(tmp_path):
    settings = {"model": {"name": "own", "pretraining": {"steps": 9}}}
    other_settings = {"model": {"name": "own", "pretraining": {"steps": 99}}}
    first = [save_run(tmp_path / f"a{seed}", seed=seed, config=settings) for seed in (0, 1)]
    other_run = save_run(tmp_path / "b", method="das", nll=OTHER_BASE, config=other_settings)
    base_sections = sections(*first, other_run)
    assert names(base_sections) == [["ncl"], ["das"]] and base_sections[1].baselines == {}
    assert "base" in base_sections[0].title and base_sections[0].title != base_sections[1].title
    text = conditions(base_sections[0])
    assert "The bases differ" in text and "(das)" in text and "model.pretraining.steps" in text
    assert "(ncl)" in conditions(base_sections[1])
    assert "The bases differ" not in conditions(make_section(first))


def test_hashes_distinguish_bases_unless_other_files_hold_the_same_weights(tmp_path):
    close_nll = np.array(NLL) + 1e-3
    runs = [
        save_run_of_base(tmp_path / "a", "1"),
        save_run_of_base(tmp_path / "b", "2", method="das", nll=close_nll),
    ]
    assert names(sections(*runs)) == [["ncl"], ["das"]]
    runs = [save_run_of_base(tmp_path / "c", "1"), save_run_of_base(tmp_path / "d", "2", method="das")]
    assert len(sections(*runs)) == 1  # .bin and .safetensors
    runs = [
        save_run_of_base(tmp_path / "e", "1"),
        save_run_of_base(tmp_path / "f", "1", method="das", nll=close_nll),
    ]
    assert len(sections(*runs)) == 1  # another device or precision
    assert read_base_hash(tmp_path / "a") == read_base_hash(tmp_path / "c") != read_base_hash(tmp_path / "b")
    runs = [
        save_run_of_base(tmp_path / "g", "1"),
        save_run_of_base(tmp_path / "h", "1", method="das", nll=OTHER_BASE),
    ]
    assert len(sections(*runs)) == 2  # fewer blocks of the same file


@pytest.mark.parametrize(
    "text", ["", "[]", "{", '{"base": []}', '{"base": {"a.bin": 3}}', '{"base": {"a.bin": []}}']
)
def test_a_damaged_or_foreign_manifest_gives_no_hash_of_the_base(tmp_path, text):
    (tmp_path / "identity.json").write_text(text)
    assert read_base_hash(tmp_path) == ""


def test_a_base_that_was_not_measured_is_compared_by_its_hash_or_not_at_all(tmp_path):
    rows = [[None] * 4, *NLL[1:]]
    assert (
        len(sections(make_run(nll=NLL), make_run(method="das", nll=[[5.0, None, None, None], *NLL[1:]]))) == 1
    )
    unmeasured = [save_run_of_base(tmp_path / name, name, method=name, nll=rows) for name in ("ncl", "das")]
    assert len(sections(*unmeasured)) == 2


SETTINGS = {  # of the config, and another value; what a run learns or how it is measured follows from it
    "domains.balanced": (False, True),
    "domains.truncate": ("tail", "middle"),
    "domains.template.prompt": ("{text}", "{text}?"),
    "domains.a_new_option": (1, 2),
    "model.config.n_layer": (2, 4),
    "trainer.precision": ("32-true", "bf16-mixed"),
    "model.mlm_probability": (0.15, 0.3),
    "eval.a_new_option": (1, 2),
    "a_new_section.value": (1, 2),
}


@pytest.mark.parametrize("key", SETTINGS)
def test_every_setting_that_decides_the_result_makes_groups_and_is_named(tmp_path, key):
    values = SETTINGS[key]

    def config(value, seed):
        tree = {"seed": seed}
        *parents, last = key.split(".")
        subtree = tree
        for parent in parents:
            subtree = subtree.setdefault(parent, {})
        subtree[last] = value
        return tree

    runs = [save_run(tmp_path / str(i), seed=i, config=config(value, i)) for i, value in enumerate(values)]
    section = make_section(runs)
    assert [group.name for group in section.groups] == sorted(f"ncl, {key}={value}" for value in values)
    methods = [
        save_run(tmp_path / f"m{i}", method=f"m{i}", config=config(value, 0))
        for i, value in enumerate(values)
    ]
    text = conditions(make_section(methods))
    assert f"{key}: " in text and all(f"{value} (m{i})" in text for i, value in enumerate(values))


@pytest.mark.parametrize("key", [*REPRESENTED, *(key for key in EXECUTION if not key.startswith("trainer."))])
def test_what_is_represented_otherwise_or_only_says_how_a_run_is_carried_out_makes_no_group(tmp_path, key):
    if key in ("seed", "order", "name", "variant"):
        return
    tree = [{"seed": 0}, {"seed": 1}]
    for subtree, value in zip(tree, ("a", "b"), strict=True):
        *parents, last = key.split(".")
        for parent in parents:
            subtree = subtree.setdefault(parent, {})
        subtree[last] = value
    runs = [save_run(tmp_path / str(i), seed=i, config=config) for i, config in enumerate(tree)]
    assert [group.name for group in make_section(runs).groups] == ["ncl"]


def test_auto_counts_as_what_it_became(tmp_path):
    config = {"trainer": {"precision": "auto", "attn_implementation": "auto"}}
    numerics = [{"precision": name, "attention": "sdpa"} for name in ("32-true", "bf16-mixed", "32-true")]
    runs = [
        save_run(tmp_path / str(i), seed=i, config=config, numerics=run_numerics)
        for i, run_numerics in enumerate(numerics)
    ]
    assert find_differing_settings(runs) == ["trainer.precision"]
    sizes = {group.name: len(group.runs) for group in make_section(runs).groups}
    assert sizes == {"ncl, trainer.precision=32-true": 2, "ncl, trainer.precision=bf16-mixed": 1}


def test_keys_that_only_begin_like_another_are_compared():
    assert is_compared("domains.rooted") and not is_compared("domains.root")
    assert is_compared("model.names") and not is_compared("model.name")


def test_long_lists_of_settings_are_shortened(tmp_path):
    runs = []
    for number in range(12):
        config = {"trainer": {f"option_{index}": number for index in range(20)}}
        runs.append(save_run(tmp_path / str(number), method=f"m{number}", config=config))
    (line,) = (line for line in findings.list_conditions(make_section(runs)).lines if "beyond" in line)
    assert "; and 12 more." in line and "… 9 more" in line and len(line) < 1000


def test_a_difference_over_fewer_pairs_than_its_row_is_followed_by_their_number():
    runs = [make_run(method="ncl", seed=seed) for seed in range(4)]
    runs += [make_run(method="das", seed=seed) for seed in range(4)]
    diverged = np.array(NLL)
    diverged[1, 0] = np.nan  # what CPT and FG need, and LC does not
    runs[-1] = make_run(method="das", seed=3, nll=diverged)
    block = compare.tabulate_differences(make_section(runs))
    (row,) = (dict(zip(block.head, cells, strict=True)) for cells in block.cells)
    counted = {name: cell.endswith(" (3)") for name, cell in row.items() if name.startswith("Δ")}
    assert row["pairs"] == "4" and True in counted.values() and False in counted.values()
    assert any(line.startswith("(k) after a difference") for line in block.lines)
    table = compare.tabulate_differences(make_section(runs[:-1] + [make_run(method="das", seed=3)]))
    assert not any(line.startswith("(k) after a difference") for line in table.lines)


def test_tex_marks_means_over_fewer_runs_and_names_of_files_differ_in_more_than_case(tmp_path):
    diverged = np.array(NLL)
    diverged[1, 0] = np.nan
    runs = [make_run(method="ncl", seed=seed) for seed in range(3)]
    runs += [make_run(method="das", seed=seed) for seed in range(3)]
    runs[-1] = make_run(method="das", seed=2, nll=diverged)
    runs += [make_run(method="ncl", variant=variant, seed=0) for variant in ("a=X", "a=x")]
    paths = write_tables([make_section(runs)], tmp_path)
    (line,) = (line for line in (tmp_path / "main.tex").read_text().splitlines() if line.startswith("das"))
    counted = ["(2)" in cell for cell in line.split("&")]
    assert counted.count(True) == 2 and not counted[1]  # CPT and FG, not LC
    assert len({path.name.lower() for path in paths}) == len(paths)
    main = (tmp_path / "main.tex").read_text()
    assert "(k): number of runs with a value, if not all" in main and "In nats if no unit is named" in main
    assert main.index("\\centering") < main.index("\\caption")
    matrix = (tmp_path / "matrix-perplexity-das-law_food_space.tex").read_text()
    assert "means over 2 to 3 runs" in matrix
