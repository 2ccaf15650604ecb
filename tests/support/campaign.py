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
    "adapter", "across", "branched", "cpt_plugin", "dga", "ema", "ewc", "growing", "inclora", "joint", "kd",
    "l2", "lora", "peft", "mas", "merge_lora", "migu", "moelora", "nlora", "one", "progprompt", "prompt",
    "replay", "reptile", "si", "wise_ft",
)  # fmt: skip
MANY = "|".join(STOOD_FOR)
MOST = f"{MANY}|ema|hat|ncl|none|osf|agem|merge|recadam|companions"  # of what few have to show

# By test what of it rests until `pytest -m campaign`: a regular expression for whole names of its rows.
RESTING = {
    "test_contract.py::test_killed_and_started_again_it_ends_with_the_same_bits": MANY,
    "test_contract.py::test_a_causal_model_is_learned": MANY,
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
    "test_distributed.py::test_two_processes_have_the_same_parts_as_one": "method=hat",
    "test_distributed_tasks.py::test_a_signal_within_the_answers_ends_both_and_they_go_on": ".*",
    "test_replay.py::test_processes_and_parts_share_out_the_same_step": "(2|8)-.*",
    "test_replay.py::test_what_cannot_be_on_the_command_line": "(?!chosen0).*",
    "test_growth.py::test_what_needs_all_domains_beforehand_says_so": "options(1|3).*",
    "test_sharded.py::test_what_is_refused_is_measured_on_the_finished_run": "",
    "test_sharded.py::test_shared_out_weights_are_those_of_one_process": "demix",
    "test_das.py::test_a_model_without_dropout_learns_its_domain": "dga",
    "test_callbacks.py::test_a_killed_run_goes_on_with_the_state_of_its_callbacks": "3|7|11|12",
    "test_asking.py::test_methods_answer_with_the_part_of_a_task": ".*",
}


def is_resting(node: str) -> bool:
    """Whether a test, by its pytest name, is one of the rows that rest."""
    name, _, row = node.partition("[")
    for test, rows in RESTING.items():
        if name.endswith(f"/{test}"):
            return re.fullmatch(rows, row.removesuffix("]")) is not None
    return False
