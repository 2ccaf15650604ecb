"""Large tables of methods by promises: a few rows run always, the others by `pytest -m campaign`."""

import re
from collections.abc import Collection, Iterable
from typing import Any

import pytest


def run_few(names: Iterable[Any], few: Collection[Any]) -> list:
    """The values of a parameter, of which those beside a few are marked for the campaign."""
    return [pytest.param(name, marks=[] if name in few else pytest.mark.campaign) for name in names]


# Rows of the tables of methods that the campaign has: those whose kind of state another method stands for. A
# method that is not named here runs always.
STOOD_FOR = (
    "adapter", "across", "branched", "cpt_plugin", "dga", "elle", "ema", "ewc", "growing", "inclora", "joint",
    "kd", "l2", "lora", "peft", "mas", "merge_lora", "migu", "moelora", "nlora", "one", "progprompt",
    "prompt", "replay", "reptile", "si", "wise_ft",
)  # fmt: skip
MANY = "|".join(STOOD_FOR)
MORE = f"{MANY}|agem|companions|merge|none|osf|recadam"  # of whole runs

# What rests until `pytest -m campaign`, a line each: file and test without test_, and a regular expression
# for whole names of rows (a second line adds to it); all of the test where there is none.
TABLE = r"""
advise an_advice_is_planned_run_stopped_gone_on_with_and_told
task_evaluator methods_answer_with_the_part_of_a_task
callbacks a_killed_run_goes_on_with_the_state_of_its_callbacks (?!6).*
chats killed_between_domains_it_ends_with_the_same_bits after a commit
chats killed_within_a_domain_it_ends_with_the_same_bits
chats long_chats_lose_their_oldest_exchanges
contract a_causal_model_is_learned MORE
contract compositions_go_on_with_the_same_bits .*mask=(?!migu replay).*
contract every_text_is_scored_by_known_parts MANY
contract it_learns_in_16_bits (MORE|ema|hat|ncl)-.*
contract killed_and_started_again_it_ends_with_the_same_bits MORE
contract killed_between_domains_it_ends_with_the_same_bits .*(MORE|ema|hat|ncl)
contract the_exported_model_is_that_of_the_last_domain MANY
contract two_domains_are_learned MORE
contract_decoder it_learns_in_16_bits derpp|hat|olora
contract_decoder two_domains_are_learned_and_a_killed_run_ends_with_the_same_bits (ncl|ewc|kd|hat)-.*
contract_decoder two_domains_are_learned_and_a_killed_run_ends_with_the_same_bits (agem|osf|merge)-.*
contract_decoder two_domains_are_learned_and_a_killed_run_ends_with_the_same_bits (recadam|demix|derpp)-.*
contract_decoder what_a_method_may_be_told
contract_decoder what_is_known_of_a_learned_domain_stays_bit_for_bit (cpt_plugin|prompt|lora).*
das a_model_without_dropout_learns_its_domain
derpp killed_with_a_full_memory_it_ends_with_the_same_bits
derpp two_processes_keep_a_shard_each_and_go_on_with_the_same_bits
distributed statistics_are_those_of_all_processes
distributed two_processes_agree_where_a_seam_is_used
distributed two_processes_have_the_same_parts_as_one method=(hat|lifelong_moe)
distributed_tasks a_signal_within_the_answers_ends_both_and_they_go_on
distributed_tasks two_processes_score_as_one
distributed_tasks two_processes_see_the_samples_and_spans_of_one
docstrings networkx_gives_the_same_half_megabyte_each_time
dry_run a_run_that_goes_on_from_another_has_its_last_domains_left
dry_run bytes_steps_and_tokens_are_those_of_the_run ncl|joint|ewc
dry_run cells_are_counted_as_they_are_measured
dry_run options_of_all_methods_are_profiled
dry_run the_command_prints_tables_and_leaves_no_folder
elle killed_between_growing_and_the_first_step
experiments an_experiment_has_a_plan_with_each_value_it_sweeps methods_table
runs a_run_killed_in_a_stage_replays_what_was_written
runs a_run_that_grows_writes_for_the_new_stage_alone
runs how_many_are_written_at_once_does_not_matter
runs the_mixture_is_that_of_real_text
runs two_processes_write_what_one_writes
runs what_is_damaged_is_written_again_alike
task_runs killed_it_goes_on_with_the_same_bits causal
task_runs valid_examples_are_replayed_and_learned_to_be_written_again causal
task_runs without_a_share_it_is_ncl causal
weights frozen_weights_keep_their_bits_through_a_run das|ewc|derpp
growth two_and_then_one_more_are_three_at_once ncl|branched|derpp
growth what_needs_all_domains_beforehand_says_so options[1-3].*
guard a_transient_one_stops_the_run_and_costs_nothing (loss|gradient)-(first|last)
guard all_processes_hear_of_one stop.*|rollback-False
hat it_goes_on_within_the_third_domain
inclora kept_apart_a_run_goes_on_with_the_same_bits
kill sigkill_changes_no_bit in the base|after a stage|in the last domain|exporting|committing
leaks a_killed_stage_has_the_leak_of_an_unbroken_one
lifelong_moe a_domain_begins_with_the_model_before_it (causal|both)-(base|last)
lifelong_moe earlier_experts_and_their_rows_keep_their_bits (masked|both)-frozen
lifelong_moe migu_masks_the_rows_of_new_experts_and_no_router (causal|both)-frozen
neutral at_neutral_strength_it_is_the_plain_method_bit_for_bit das (gradient|frozen)|l2 .*|migu .*|merge.*
neutral at_neutral_strength_it_is_the_plain_method_bit_for_bit mas|wise_ft|ema|reptile|elle|lifelong_moe
neutral at_neutral_strength_it_is_the_plain_method_bit_for_bit recadam|si|moelora|nlora|replay|hat
offload a_killed_run_goes_on_with_it_and_without ewc|olora
offload the_plan_says_what_changes_nothing
offload what_rests_elsewhere_has_the_same_bits ema|hat|ewc
orders a_killed_run_goes_on_in_its_order
package a_users_own_method_source_and_experiment_are_swept_away_from_the_checkout
package the_source_archive_installs_the_same
packing two_tasks_are_learned_and_a_killed_run_ends_with_the_same_bits replay|ncl|migu|derpp
parts_on_disk a_run_that_is_begun_again_holds_nothing_that_rests
parts_on_disk what_rests_on_disk_is_what_rests_in_memory hat|olora
preemption a_signal_loses_nothing (?!in a domain).*
preemption end_tasks_are_left_and_what_was_measured_stays
preemption processes_that_prepare_data_leave_with_their_run
preemption what_lightning_would_do_on_slurm_is_not_done
lm_eval_evaluator a_run_that_is_stopped_within_its_probe_goes_on_with_it
replay processes_and_parts_share_out_the_same_step (2|8)-.*
replay replay_keeps_what_was_learned
replay the_method_is_ncl_with_replay_bit_for_bit
reservoir every_sample_of_a_stream_is_as_likely_to_be_kept 2
row_gradients a_run_ends_with_the_same_weights (gradient|update)-fisher|.*-output
row_gradients a_run_of_low_rank_pairs_ends_with_the_same_weights
sharded a_killed_run_goes_on_with_the_same_bits
sharded a_process_holds_its_share_and_the_export_is_whole
sharded a_stage_that_was_half_written_does_not_count
sharded shared_out_weights_are_those_of_one_process ewc
sharded stages_in_shards_grow_and_are_filled_by_any_number_of_processes
sharded what_is_refused_is_measured_on_the_finished_run
sharded what_is_shared_out_may_rest_on_the_cpu
drift_budget killed_it_ends_with_the_same_bits lora-end
rebuild of_a_table_that_wandb_cuts_the_last_stages_are_shown
tasks answers_are_learned_in_a_sequence (?!replay=past).*
text_packing two_domains_are_learned_and_a_killed_run_ends_with_the_same_bits small derpp|small_gpt2 replay
text_packing two_domains_are_learned_and_a_killed_run_ends_with_the_same_bits small_gpt2 ncl
twelve_domains a_domain_adds_what_it_must_and_nothing_else
twelve_domains what_domains_share_is_stored_once
"""


def read_table() -> dict[tuple[str, str], str]:
    found: dict[tuple[str, str], str] = {}
    for line in TABLE.split("\n")[1:-1]:
        file, test, rows = [*line.split(" ", 2), ".*"][:3]
        for name, names in (("MANY", MANY), ("MORE", MORE)):
            rows = rows.replace(name, names)
        key = f"test_{file}.py", f"test_{test}"
        found[key] = f"{found[key]}|{rows}" if key in found else rows
    return found


RESTING = read_table()


def is_resting(node: str) -> bool:
    """Whether a test, by its pytest name, is one of the rows that rest."""
    name, _, row = node.partition("[")
    file, _, test = name.rpartition("/")[2].partition("::")
    rows = RESTING.get((file, test))
    return rows is not None and re.fullmatch(rows, row.removesuffix("]")) is not None
