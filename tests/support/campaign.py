"""Large tables of methods by promises: a few rows run always, the others by `pytest -m campaign`."""

import re
from collections.abc import Collection, Iterable
from typing import Any

import pytest


def run_few(names: Iterable[Any], few: Collection[Any]) -> list:
    """The values of a parameter, of which those beside a few are marked for the campaign."""
    return [pytest.param(name, marks=[] if name in few else pytest.mark.campaign) for name in names]


ALL = ".*"
# By file and test what rests until `pytest -m campaign`: a regular expression for whole names of rows; of a
# test without rows, ALL.
RESTING = {
    "test_advise.py": {
        "test_an_advice_is_planned_run_stopped_gone_on_with_and_told": ALL,
    },
    "test_task_evaluator.py": {
        "test_methods_answer_with_the_part_of_a_task": ALL,
    },
    "test_benchmarks.py": {
        "test_every_benchmark_can_be_imported": ALL,
    },
    "test_callbacks.py": {
        "test_a_killed_run_goes_on_with_the_state_of_its_callbacks": "(?!6).*",
    },
    "test_chats.py": {
        "test_killed_between_domains_it_ends_with_the_same_bits": "after a commit",
        "test_killed_within_a_domain_it_ends_with_the_same_bits": ALL,
        "test_long_chats_lose_their_oldest_exchanges": ALL,
    },
    "test_distributed.py": {
        "test_statistics_are_those_of_all_processes": ALL,
        "test_two_processes_agree_where_a_seam_is_used": ALL,
        "test_two_processes_have_the_same_parts_as_one": "method=(hat|lifelong_moe)",
    },
    "test_distributed_tasks.py": {
        "test_a_signal_within_the_answers_ends_both_and_they_go_on": ALL,
        "test_two_processes_score_as_one": ALL,
        "test_two_processes_see_the_samples_and_spans_of_one": ALL,
    },
    "test_docstrings.py": {
        "test_networkx_gives_the_same_half_megabyte_each_time": ALL,
    },
    "test_dry_run.py": {
        "test_a_run_that_goes_on_from_another_has_its_last_domains_left": ALL,
        "test_bytes_steps_and_tokens_are_those_of_the_run": "ncl|joint|ewc",
        "test_cells_are_counted_as_they_are_measured": ALL,
        "test_options_of_all_methods_are_profiled": ALL,
        "test_the_command_prints_tables_and_leaves_no_folder": ALL,
    },
    "test_experiments.py": {
        "test_an_experiment_has_a_plan_with_each_value_it_sweeps": "methods_table",
    },
    "test_runs.py": {
        "test_a_run_killed_in_a_stage_replays_what_was_written": ALL,
        "test_a_run_that_grows_writes_for_the_new_stage_alone": ALL,
        "test_how_many_are_written_at_once_does_not_matter": ALL,
        "test_the_mixture_is_that_of_real_text": ALL,
        "test_two_processes_write_what_one_writes": ALL,
        "test_what_is_damaged_is_written_again_alike": ALL,
    },
    "test_task_runs.py": {
        "test_killed_it_goes_on_with_the_same_bits": "causal",
        "test_valid_examples_are_replayed_and_learned_to_be_written_again": "causal",
        "test_without_a_share_it_is_ncl": "causal",
    },
    "test_weights.py": {
        "test_frozen_weights_keep_their_bits_through_a_run": "das|ewc|derpp",
    },
    "test_growth.py": {
        "test_two_and_then_one_more_are_three_at_once": "ncl|branched|derpp",
        "test_what_needs_all_domains_beforehand_says_so": "options[1-3].*",
    },
    "test_kill.py": {
        "test_sigkill_changes_no_bit": "in the base|after a stage|in the last domain|exporting|committing",
    },
    "test_leaks.py": {
        "test_a_killed_stage_has_the_leak_of_an_unbroken_one": ALL,
    },
    "test_orders.py": {
        "test_a_killed_run_goes_on_in_its_order": ALL,
    },
    "test_package.py": {
        "test_a_users_own_method_source_and_experiment_are_swept_away_from_the_checkout": ALL,
        "test_the_source_archive_installs_the_same": ALL,
    },
    "test_parts_on_disk.py": {
        "test_a_run_that_is_begun_again_holds_nothing_that_rests": ALL,
        "test_what_rests_on_disk_is_what_rests_in_memory": "hat|olora",
    },
    "test_preemption.py": {
        "test_a_signal_loses_nothing": "(?!in a domain).*",
        "test_end_tasks_are_left_and_what_was_measured_stays": ALL,
        "test_processes_that_prepare_data_leave_with_their_run": ALL,
        "test_what_lightning_would_do_on_slurm_is_not_done": ALL,
    },
    "test_lm_eval_evaluator.py": {
        "test_a_run_that_is_stopped_within_its_probe_goes_on_with_it": ALL,
    },
    "test_replay.py": {
        "test_processes_and_parts_share_out_the_same_step": "(2|8)-.*",
        "test_replay_keeps_what_was_learned": ALL,
        "test_the_method_is_ncl_with_replay_bit_for_bit": ALL,
    },
    "test_sharded.py": {
        "test_a_killed_run_goes_on_with_the_same_bits": ALL,
        "test_a_process_holds_its_share_and_the_export_is_whole": ALL,
        "test_a_stage_that_was_half_written_does_not_count": ALL,
        "test_shared_out_weights_are_those_of_one_process": "ewc",
        "test_stages_in_shards_grow_and_are_filled_by_any_number_of_processes": ALL,
        "test_what_is_refused_is_measured_on_the_finished_run": ALL,
        "test_what_is_shared_out_may_rest_on_the_cpu": ALL,
    },
    "test_drift_budget.py": {
        "test_killed_it_ends_with_the_same_bits": "lora-end",
    },
    "test_rebuild.py": {
        "test_of_a_table_that_wandb_cuts_the_last_stages_are_shown": ALL,
    },
    "test_tasks.py": {
        "test_answers_are_learned_in_a_sequence": "(?!replay=past).*",
    },
}


def is_resting(node: str) -> bool:
    """Whether a test, by its pytest name, is one of the rows that rest."""
    name, _, row = node.partition("[")
    file, _, test = name.rpartition("/")[2].partition("::")
    rows = RESTING.get(file, {}).get(test)
    return rows is not None and re.fullmatch(rows, row.removesuffix("]")) is not None
