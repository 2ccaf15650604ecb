"""Large tables of methods by promises: a few rows run always, the others by `pytest -m campaign`."""

import re
from collections.abc import Collection, Iterable
from typing import Any

import pytest


def run_few(names: Iterable[Any], always_run: Collection[Any]) -> list:
    """The values of a parameter; those that are not in `always_run` are marked for the campaign."""
    values = []
    for name in names:
        marks = [] if name in always_run else [pytest.mark.campaign]
        values.append(pytest.param(name, marks=marks))
    return values


# Tests that only `pytest -m campaign` runs, one a line: file and test without test_, and a regular expression
# for the names of rows. Without an expression all rows of the test are meant.
TABLE = r"""
loader_processes a_loader_process_that_ends_is_reported_in_a_line os._exit\(3\)-spawn|os.kill.*
loader_processes a_batch_that_cannot_be_sent_ends_the_run_instead_of_being_waited_for spawn
loader_processes loader_processes_work_below_a_long_temporary_folder
loader_processes without_a_short_folder_the_error_of_the_socket_is_reported
loader_processes a_killed_loader_process_is_reported_as_want_of_memory
slurm signals_of_scheduler_and_launcher_are_one_to_a_job variables1.*
dry_run a_matched_run_takes_the_operations_of_ncl lora
dry_run bytes_steps_and_tokens_are_those_of_the_run method=ewc.*
search by_a_metric_of_end_tasks_trials_read_dev_and_final_runs_test
computed_plan the_method_is_changed_last
computed_plan sharding_is_named_where_it_helps_and_is_possible
costs a_process_ends_although_its_loaders_processes_are_alive
distributed two_processes_score_as_one
distributed two_processes_learn_and_answer_as_one_whether_killed_or_not
distributed two_processes_write_the_answers_of_one_whether_killed_or_not
quantized a_killed_run_resumes_to_the_bit_and_exports_a_plain_model olora-nf4|lora-int8|sapt-int8
quantized an_exported_adapter_loads_onto_the_plain_and_the_quantized_base int8
quantized a_checkpoint_that_is_stored_quantized_is_trained_beside_its_bits fp4|int8
quantized two_processes_train_what_one_does
runs an_extended_run_writes_for_the_new_stage_alone
runs the_mixture_is_that_of_real_text
runs two_processes_write_what_one_writes
weights frozen_weights_keep_their_bits_through_a_run das|ewc|derpp
quantized domains_are_added_to_a_quantized_run_as_from_the_beginning
quantized an_adapter_in_the_folder_is_merged_before_weights_are_quantized
distributed sharded_weights_equal_those_of_one_process parts.on.disk
drift_budget killed_it_ends_with_the_same_bits
runs a_run_killed_while_it_writes_resumes_with_the_same_bits
runs verify_reads_generated_texts_and_a_run_needs_its_kept_ones_to_continue
guard all_processes_hear_of_one
guard rolling_back_leaves_out_all_steps_since_the_checkpoint 1
rebuild one_wandb_run_per_run_folder_with_the_identifier_of_the_live_one
package without_contrib_a_run_a_sweep_and_their_report_work
package a_users_own_method_source_and_experiment_are_swept_away_from_the_checkout
bf16_weights small_steps_are_not_lost 1e-5.*
chunks logits_of_a_batch_are_never_one_tensor (?!derpp|ncl).*
expert_adapters adapters_of_experts_are_merged_and_exported_with_the_same_logits deepseek_v3|mixtral|olmoe
bottleneck at_first_the_model_is_the_base_bit_for_bit_and_then_it_is_not t5
plain_model lora_is_written_layer_by_layer t5-False
parameter_options killed_and_started_again_it_ends_with_the_same_bits method1
quantized a_killed_run_resumes_to_the_bit_and_exports_a_plain_model olora-int8
reservoir the_losses_are_those_of_the_paper .*masked
config a_wrong_config_is_found_without_torch cache_dir.*
block_expansion the_base_is_kept_bit_for_bit_and_new_blocks_alone_are_trained masked
block_attention no_bit_of_a_sample_depends_on_another_and_its_gradients_are_the_padded_ones mistral.*|gpt_neox.*
extended_tokenizer new_tokens_begin_as_the_mean_of_what_the_checkpoint_has_in_their_place 333.*|338.*
"""


def read_table(table: str) -> dict[tuple[str, str], str]:
    """By file and test, the expression for the names of its rows."""
    patterns = {}
    for line in table.strip().splitlines():
        file, test, *pattern = line.split(" ")
        patterns[f"test_{file}.py", f"test_{test}"] = pattern[0] if pattern else ".*"
    return patterns


CAMPAIGN_ROWS = read_table(TABLE)


def is_campaign_row(node: str) -> bool:
    """Whether a test, by its pytest name, is left to the campaign."""
    name, _, row = node.partition("[")
    file, _, test = name.rpartition("/")[2].partition("::")
    rows = CAMPAIGN_ROWS.get((file, test))
    return rows is not None and re.fullmatch(rows, row.removesuffix("]")) is not None
