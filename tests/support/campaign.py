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
MOST = f"{MANY}|ema|hat|ncl|none|osf|agem|merge|recadam|companions"  # of what few have to show

# By test what of it rests until `pytest -m campaign`: a regular expression for whole names of its rows.
RESTING = {
    "test_contract.py::test_killed_and_started_again_it_ends_with_the_same_bits": MANY,
    "test_contract.py::test_a_causal_model_is_learned": MANY,
    "test_contract.py::test_two_domains_are_learned": MANY,
    "test_contract.py::test_the_exported_model_is_that_of_the_last_domain": MANY,
    "test_neutral.py::test_at_neutral_strength_it_is_the_plain_method_bit_for_bit": (
        "das (gradient|frozen)|l2 base|migu .*|merge slerp|mas|wise_ft|ema|reptile"
    ),
    "test_sharded.py::test_what_is_shared_out_may_rest_on_the_cpu": ".*",
    "test_sharded.py::test_parts_that_are_whole_in_each_process_lie_in_the_stages_file": "",
    "test_sharded.py::test_stages_in_shards_grow_and_are_filled_by_any_number_of_processes": "",
    "test_sharded.py::test_a_stage_that_was_half_written_does_not_count": "",
    "test_sharded.py::test_a_process_holds_its_share_and_the_export_is_whole": "",
    "test_derpp.py::test_two_processes_keep_a_shard_each_and_go_on_with_the_same_bits": "",
    "test_derpp.py::test_killed_with_a_full_memory_it_ends_with_the_same_bits": ".*",
    "test_distributed_tasks.py::test_two_processes_see_the_samples_and_spans_of_one": ".*",
    "test_offload.py::test_a_killed_run_goes_on_with_it_and_without": "ewc",
    "test_offload.py::test_what_rests_elsewhere_has_the_same_bits": "ema|hat",
    "test_replay.py::test_replay_keeps_what_was_learned": "",
    "test_twelve_domains.py::test_a_domain_adds_what_it_must_and_nothing_else": "ncl",
    "test_twelve_domains.py::test_what_domains_share_is_stored_once": "hat",
    "test_inclora.py::test_kept_apart_a_run_goes_on_with_the_same_bits": "3",
    "test_hat.py::test_it_goes_on_within_the_third_domain": "ffn|pfeiffer|adapter.*",
    "test_freezing.py::test_frozen_weights_keep_their_bits_through_a_run": "das|ewc|derpp",
    "test_growth.py::test_two_and_then_one_more_are_three_at_once": "ncl|branched",
    "test_packing.py::test_two_tasks_are_learned_and_a_killed_run_ends_with_the_same_bits": "replay|ncl",
    "test_forecast.py::test_what_a_method_stores_is_foretold_for_every_stage": "ncl|joint",
    "test_contract.py::test_killed_between_domains_it_ends_with_the_same_bits": f".*({MOST})",
    "test_contract.py::test_it_learns_in_16_bits": f"({MOST})-.*",
    "test_contract.py::test_compositions_go_on_with_the_same_bits": ".*mask=(?!migu replay).*",
    "test_contract_decoder.py::test_two_domains_are_learned_and_a_killed_run_ends_with_the_same_bits": (
        "(ncl|ewc|kd|hat|agem|osf|merge|recadam)-.*"
    ),
    "test_contract_decoder.py::test_what_a_method_may_be_told": "method=(hat|demix|kd|prompt|adapter).*",
    "test_contract_decoder.py::"
    "test_what_is_known_of_a_learned_domain_stays_bit_for_bit": "(cpt_plugin|prompt|lora).*",
    "test_contract_decoder.py::test_it_learns_in_16_bits": "derpp|hat|olora",
    "test_kill.py::test_sigkill_changes_no_bit": "in the base|after a stage|in the last domain|exporting",
    "test_preemption.py::test_a_signal_loses_nothing": "(?!in a domain|scoring).*",
    "test_preemption.py::test_what_lightning_would_do_on_slurm_is_not_done": "",
    "test_tasks.py::test_answers_are_learned_in_a_sequence": "(?!method=lora|replay=past).*",
    "test_guard.py::test_all_processes_hear_of_one": "stop",
    "test_guard.py::test_a_transient_one_stops_the_run_and_costs_nothing": "(loss|gradient)-(first|last)",
    "test_distributed.py::test_two_processes_have_the_same_parts_as_one": "method=(hat|lifelong_moe)",
    "test_distributed_tasks.py::test_a_signal_within_the_answers_ends_both_and_they_go_on": ".*",
    "test_replay.py::test_processes_and_parts_share_out_the_same_step": "(2|8)-.*",
    "test_replay.py::test_what_cannot_be_on_the_command_line": "(?!chosen0).*",
    "test_growth.py::test_what_needs_all_domains_beforehand_says_so": "options(1|3).*",
    "test_sharded.py::test_what_is_refused_is_measured_on_the_finished_run": "",
    "test_sharded.py::test_shared_out_weights_are_those_of_one_process": "demix",
    "test_das.py::test_a_model_without_dropout_learns_its_domain": "dga",
    "test_callbacks.py::test_a_killed_run_goes_on_with_the_state_of_its_callbacks": "3|7|11|12",
    "test_lifelong_moe.py::test_earlier_experts_and_their_rows_keep_their_bits": "(masked|both)-frozen",
    "test_lifelong_moe.py::test_a_domain_begins_with_the_model_before_it": "(causal|both)-(base|last)",
    "test_lifelong_moe.py::test_migu_masks_the_rows_of_new_experts_and_no_router": "(causal|both)-frozen",
    "test_asking.py::test_methods_answer_with_the_part_of_a_task": ".*",
    "test_generated.py::test_two_processes_write_what_one_writes": "",
    "test_generated.py::test_how_many_are_written_at_once_does_not_matter": "1|64",
    "test_generated.py::test_the_mixture_is_that_of_real_text": "given[01]",
    "test_generated.py::test_what_is_damaged_is_written_again_alike": "<lambda>",
    "test_generated.py::test_what_is_written_is_foretold": "given1",
    "test_elle.py::test_killed_between_growing_and_the_first_step": "branched|frozen",
    "test_rows.py::test_a_run_ends_with_the_same_weights": "(gradient|update)-fisher|update-output",
}


def is_resting(node: str) -> bool:
    """Whether a test, by its pytest name, is one of the rows that rest."""
    name, _, row = node.partition("[")
    for test, rows in RESTING.items():
        if name.endswith(f"/{test}"):
            return re.fullmatch(rows, row.removesuffix("]")) is not None
    return False
