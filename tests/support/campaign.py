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
contract killed_between_domains_it_ends_with_the_same_bits after a commit
contract every_text_is_scored_by_known_parts MANY
contract it_learns_in_16_bits (MORE|ema|hat|ncl)-.*
contract killed_and_started_again_it_ends_with_the_same_bits MORE
contract killed_between_domains_it_ends_with_the_same_bits .*(MORE|ema|hat|ncl)
contract the_exported_model_is_that_of_the_last_domain MANY
contract two_domains_are_learned MORE
contract it_learns_in_16_bits derpp|hat|olora
packing two_domains_are_learned_and_a_killed_run_ends_with_the_same_bits (ncl|ewc|kd|hat)-.*
packing two_domains_are_learned_and_a_killed_run_ends_with_the_same_bits (agem|osf|merge)-.*
packing two_domains_are_learned_and_a_killed_run_ends_with_the_same_bits (recadam|demix|derpp)-.*
distributed statistics_are_those_of_all_processes
distributed two_processes_agree_where_a_seam_is_used
distributed two_processes_have_the_same_parts_as_one method=lifelong_moe
distributed two_processes_score_as_one
dry_run bytes_steps_and_tokens_are_those_of_the_run ncl|joint|ewc
runs a_run_that_grows_writes_for_the_new_stage_alone
runs the_mixture_is_that_of_real_text
runs two_processes_write_what_one_writes
runs killed_it_goes_on_with_the_same_bits causal
runs valid_examples_are_replayed_and_learned_to_be_written_again causal
weights frozen_weights_keep_their_bits_through_a_run das|ewc|derpp
growth two_and_then_one_more_are_three_at_once ncl|branched|derpp
guard a_transient_one_stops_the_run_and_costs_nothing (loss|gradient)-(first|last)
lifelong_moe a_domain_begins_with_the_model_before_it (causal|both)-(base|last)
lifelong_moe earlier_experts_and_their_rows_keep_their_bits (masked|both)-frozen
contract at_neutral_strength_it_is_the_plain_method_bit_for_bit das (gradient|frozen)|l2 .*|migu .*|merge.*
contract at_neutral_strength_it_is_the_plain_method_bit_for_bit mas|wise_ft|ema|reptile|elle|lifelong_moe
contract at_neutral_strength_it_is_the_plain_method_bit_for_bit recadam|si|moelora|nlora|replay|hat
offload what_rests_elsewhere_has_the_same_bits ema|hat|ewc
package a_users_own_method_source_and_experiment_are_swept_away_from_the_checkout
parts_on_disk what_rests_on_disk_is_what_rests_in_memory hat|olora
reservoir every_sample_of_a_stream_is_as_likely_to_be_kept 2
sharded shared_out_weights_are_those_of_one_process ewc
sharded what_is_shared_out_may_rest_on_the_cpu
drift_budget killed_it_ends_with_the_same_bits lora-end
packing two_domains_are_learned_and_a_killed_run_ends_with_the_same_bits small derpp|small_gpt2 replay
packing two_domains_are_learned_and_a_killed_run_ends_with_the_same_bits small_gpt2 ncl
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
