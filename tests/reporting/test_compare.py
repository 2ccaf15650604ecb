"""Means, paired differences, ranks and findings of groups of runs, against values by hand; their exports."""

import csv
import math

import numpy as np
import pytest
from scipy.stats import binomtest

from cpt.evaluation.predictions import find_answers_file
from cpt.evaluation.statistics import Difference
from cpt.reporting import contrasts
from cpt.reporting.csv_export import export_csv
from cpt.reporting.example_contrasts import contrast_examples
from cpt.reporting.findings import build_findings, describe_fairness, list_conditions
from cpt.reporting.load_runs import measure_runs
from cpt.reporting.measures import MEASURES
from cpt.reporting.sections import build_sections
from tests.evaluation.test_task_metrics import write_predictions
from tests.support.example_runs import DOMAINS, make_endtasks, make_run, make_scores, make_section, save_run
from tests.support.task_answers import choose_answers, save_answers

FG = "FG/nats"
ROWS = ["base", *DOMAINS]


def make_seeds(method, shifts, **options):
    runs = []
    for seed, shift in enumerate(shifts):
        runs.append(make_run(f"{method}-{seed}", method=method, seed=seed, shift=shift, **options))
    return runs


def test_the_best_is_so_over_the_pairs_that_all_have():
    """ncl forgets less in each pair, but has another order in which all forget much."""
    shifts = np.linspace(0, 0.01, 8)
    runs = make_seeds("ncl", shifts) + make_seeds("ewc", shifts + 0.05)
    for seed in range(8):
        runs.append(make_run(f"o{seed}", method="ncl", seed=seed, shift=2.0, order=DOMAINS[::-1]))
    line = next(line for line in build_findings(make_section(runs)).lines if "Forgets" in line)
    assert line.startswith("Forgets least: `ncl`") and "Distinguished from 1 of 1 other (" in line

    measure = next(measure for measure in MEASURES if measure.key == FG)
    kd_runs = make_seeds("kd", [-0.5, -0.5, -0.5])
    kd_runs[2].scores.metrics.pop("FG")  # it has diverged
    section = make_section(make_seeds("ncl", [0, 0, 0]) + kd_runs)
    best = contrasts.find_best(section, make_section(runs).groups, measure)
    assert best.group.name == "ncl"
    assert build_findings(make_section([make_run()])).lines == []


def test_a_group_that_trains_nothing_says_nothing_of_fairness():
    costs = {"ncl": (100, 50), "kd": (100, 80), "none": (0, 0)}
    description = "Fairness: equal tokens (100 per run), different operations (50 to 80 per run)"
    assert describe_fairness(costs) == f"{description}."
    assert (
        describe_fairness(costs | {"old": (None, None), "odd": (100, 0)})
        == f"{description}, unknown of old, odd."
    )
    assert describe_fairness({"ncl": (100, 50), "none": (0, 0)}) == ""


def test_what_was_measured_otherwise_is_left_out_and_said(tmp_path):
    endtasks = make_endtasks([[0.5] * 3] * 4)
    runs = []
    for seed, epochs in enumerate((5, 5, 20)):
        config = {"seed": seed, "endtask": {"epochs": epochs, "root": f"/data/{seed}"}}
        runs.append(save_run(tmp_path / str(seed), config=config, seed=seed, endtasks=endtasks))
    runs[1].scores.metrics["FWT_zs"]["terms"] = [1, 3]
    section = make_section(runs)
    assert ["endtask/MF1" in run.values for run in section.runs] == [True, True, False]
    assert ["FWT_zs/nats" in run.values for run in section.runs] == [True, False, True]
    condition_lines = list_conditions(section).lines
    assert "Not compared: endtask (another protocol) of ncl." in condition_lines
    assert "Not compared: FWT_zs (fewer cells) of ncl." in condition_lines


def test_an_answer_protocol_of_before_an_option_is_that_of_its_neutral_value(tmp_path):
    protocols = []
    for name, option in {"old": {}, "new": {"ranked": True}, "other": {"ranked": False}}.items():
        config = {"seed": 0, "answers": {"when": "last", **option}}
        run = save_run(tmp_path / name, config=config, seed=0)
        protocols.append(run.task_protocol("answers"))
    assert protocols[0] == protocols[1] != protocols[2]


def test_differences_are_paired_by_order_and_seed_and_corrected_by_holm():
    runs = make_seeds("ncl", [0.0, 0.3, 0.6]) + make_seeds("das", [-0.1, 0.1, 0.3, 9.0])
    found_contrasts = contrasts.find_contrasts(make_section(runs), FG)
    assert set(found_contrasts) == {"das"}
    assert found_contrasts["das"].n == 3
    assert found_contrasts["das"].p == pytest.approx(0.25)
    forgotten = [make_scores(shift=shift).metrics["FG"]["nats"] for shift in (-0.1, 0.1, 0.3, 0, 0.3, 0.6)]
    assert found_contrasts["das"].mean == pytest.approx(np.mean(forgotten[:3]) - np.mean(forgotten[3:]))

    copies = [make_run(shift=0.0), make_run("copy", shift=0.2), make_run(method="das", shift=0.5)]
    assert contrasts.find_contrasts(make_section(copies), FG)["das"].mean == pytest.approx(0.4)

    p_values = {"a": 0.01, "b": 0.04, "c": 0.03, "d": 0.9}
    differences = {name: Difference(mean=0, low=0, high=0, p=p, n=9) for name, p in p_values.items()}
    corrected = contrasts.read_contrasts(contrasts.correct_differences(differences))
    corrected_p = {name: contrast.p_holm for name, contrast in corrected.items()}
    assert corrected_p == pytest.approx({"a": 0.04, "c": 0.09, "b": 0.09, "d": 0.9})
    assert all(math.isnan(contrast.p_t_holm) for contrast in corrected.values())
    assert contrasts.correct_differences({}).empty


DRAW = np.random.default_rng(0)
NCL, DAS = (DRAW.random((2, 60)) < share for share in (0.4, 0.6))


def make_answered_run(folder, last, **options):
    tasks = {task: [answers] * len(ROWS) for task, answers in last.items()}
    return make_run(folder, answers=save_answers(folder, tasks, rows=ROWS), **options)


def contrast_by_task(compared):
    return {row["task"]: row for row in contrast_examples(compared).table.to_dict("records")}


def test_answers_to_a_task_and_to_all_by_hand_without_those_that_are_damaged_or_missing(tmp_path):
    runs = []
    for method, right in (("ncl", NCL), ("das", DAS)):
        answers = {
            "law": choose_answers(right[0]),
            "food": choose_answers(right[1][:20]),
            "space": choose_answers(right[0]),
            "sea": choose_answers(right[0]),
        }
        runs.append(make_answered_run(tmp_path / method, answers, method=method))
    find_answers_file(tmp_path / "das", ROWS, 3, "sea").unlink()
    damaged = find_answers_file(tmp_path / "ncl", ROWS, 3, "space")
    damaged.write_text("damaged")
    contrast = contrast_examples(make_section(runs))
    (complaint,) = contrast.unreadable
    assert complaint.startswith(f"{damaged}: damaged predictions")

    row_of_task = {row["task"]: row for row in contrast.table.to_dict("records")}
    assert len(contrast.table) == len(row_of_task) == 3
    law = row_of_task["law"]
    food = row_of_task["food"]
    overall = row_of_task[""]
    assert (law["n"], food["n"], overall["n"], overall["num_tasks"]) == (60, 20, 80, 2)

    only_das = (DAS[0] & ~NCL[0]).sum()
    only_ncl = (NCL[0] & ~DAS[0]).sum()
    assert law["both"] == (DAS[0] & NCL[0]).sum()
    assert (law["only_group"], law["only_baseline"]) == (only_das, only_ncl)
    assert law["mean"] == pytest.approx((only_das - only_ncl) / 60)
    assert law["p"] == pytest.approx(binomtest(int(only_das), int(only_das + only_ncl)).pvalue)
    assert overall["mean"] == pytest.approx((law["mean"] + food["mean"]) / 2), "tasks weigh alike"
    law_variance = np.std(DAS[0] * 1.0 - NCL[0]) ** 2 / 60
    food_variance = np.std(DAS[1][:20] * 1.0 - NCL[1][:20]) ** 2 / 20
    width = 2 * 1.96 * np.sqrt(law_variance + food_variance) / 2
    assert overall["high"] - overall["low"] == pytest.approx(width, rel=0.1)


def test_seeds_are_averaged_by_example(tmp_path):
    runs = []
    for method, right in (("ncl", NCL), ("das", DAS)):
        for seed in (0, 1):
            answers = {"law": choose_answers(right[seed])}
            runs.append(make_answered_run(tmp_path / f"{method}-{seed}", answers, method=method, seed=seed))
    record = contrast_by_task(make_section(runs))[""]
    assert record["n"] == 60, "two seeds are no more examples"
    assert record["mean"] == pytest.approx((DAS * 1.0 - NCL).mean())
    assert record["only_group"] == (DAS & ~NCL).sum()
    shared_seed_record = contrast_by_task(make_section([runs[0], *runs[2:]]))[""]
    assert shared_seed_record["only_group"] == (DAS[0] & ~NCL[0]).sum(), "only the seed that both have"


def test_end_tasks_are_compared_by_their_predictions(tmp_path):
    endtasks = make_endtasks([[0.5] * 3] * 4)
    runs = []
    for method, right in (("ncl", [1, 0, 0, 0]), ("das", [1, 1, 1, 0]), ("ewc", None)):
        runs.append(save_run(tmp_path / method, method=method, endtasks=endtasks))
        if right is None:
            continue
        for task in DOMAINS:
            for seed in (7, 8):
                write_predictions(tmp_path / method, 3, task, seed, right, rows=ROWS)
    row_of_task = contrast_by_task(make_section(runs))
    assert {row["group"] for row in row_of_task.values()} == {"das"}
    assert row_of_task[""]["mean"] == pytest.approx(0.5)
    assert row_of_task[""]["n"] == 12


NASTY = ["law\n", "=1+1", "+cmd|' /C calc'!A0", "\r\n=1", "a,b;\"c\"'d'"]


def test_csv_has_every_number_of_each_run_and_names_are_no_formulas(tmp_path):
    runs = [*make_seeds("ncl", [0.0, 0.2]), make_run(method="one", shift=-3.0)]
    runs += [make_run(method=name, order=[name, "food", "space"]) for name in NASTY]
    runs[1].scores.optimized_metric = 123.5
    export_csv(build_sections(measure_runs(runs)), tmp_path / "v1.5.csv")
    with (tmp_path / "v1.5.csv").open(newline="") as file:
        head, *lines = csv.reader(file)
    assert [len(line) for line in lines] == [len(head)] * 8
    assert not [cell for cell in sum(lines, head) if cell and cell[0] in "=+@\t\r\n"]

    rows = [dict(zip(head, line, strict=True)) for line in lines]
    (run_row,) = (row for row in rows if row["seed"] == "1")
    assert run_row["folder"].endswith("/ncl-1")
    assert (run_row["order"], run_row["group"]) == ("law food space", "ncl")
    assert float(run_row["LC/perplexity"]) == make_scores(shift=0.2).metrics["LC"]["perplexity"]
    assert float(run_row["compared/intransigence/nats"]) == pytest.approx((0.2 + 3.0) / 3)
    assert run_row["optimized_metric"] == "123.5"
