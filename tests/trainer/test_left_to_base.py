"""Files of a run hold what is trained and what a method keeps, not the weights that the base gives."""

from dataclasses import replace

import pytest
import torch

from cpt.core.tensors import load_tensors
from cpt.models.vocabulary import find_vocabulary_tables
from cpt.trainer.build import find_loaded_names
from tests.runs.reading import start_and_kill
from tests.support.campaign import run_few
from tests.support.frozen_bases import KEEPING, REWRITING
from tests.support.method_fixtures import ORDER, build_method_fixture, equal_tensors

FEW_STEPS = ["trainer.steps=2", "trainer.importance_samples=4"]
FEW = [KEEPING[1], KEEPING[2], KEEPING[-1]]


def build(config, case: str):
    return build_method_fixture(config(ORDER, *FEW_STEPS, *f"method={case}".split()))


def tensors_of(module) -> dict[str, torch.Tensor]:
    named = dict(module.named_parameters(remove_duplicate=False))
    named |= dict(module.named_buffers(remove_duplicate=False))
    return {name: tensor.detach().clone() for name, tensor in named.items()}


@pytest.mark.parametrize("case", run_few(KEEPING, FEW))
def test_the_state_leaves_out_what_no_stage_changes_and_is_whole_with_the_base(case, small):
    run = build(small, case)
    names = run.module.names_left_to_base
    before = {name: run.module.get_parameter(name).detach().clone() for name in names}
    for number in range(2):
        run.learn(number)
    state = run.module.state_dict()
    assert names and not names & state.keys()
    assert all(torch.equal(before[name], run.module.get_parameter(name)) for name in names)

    fresh = build(small, case)
    for domain in run.data:
        fresh.module.expand_to(domain)
    fresh.module.load_state_dict(state)
    assert equal_tensors(tensors_of(run.module), tensors_of(fresh.module))


@pytest.mark.parametrize("case", run_few(REWRITING, REWRITING))
def test_weights_that_a_method_rewrites_are_in_its_state(case, small):
    module = build(small, case).module
    rewritten = {id(parameter) for parameter in module.rewritten}
    state = module.state_dict(keep_vars=True)
    assert rewritten and rewritten <= {id(tensor) for tensor in state.values()}
    assert module.names_left_to_base


def test_a_whole_state_as_0_1_0_has_it_is_loaded(small):
    module = build(small, "lora").module
    base = {name: module.get_parameter(name) for name in module.names_left_to_base}
    state = module.state_dict() | base
    name = min(base)
    state[name] = state[name] + 1
    module.load_state_dict(state)
    assert torch.equal(module.get_parameter(name), state[name])


def test_stages_and_checkpoints_have_no_base_and_a_branch_copies_none(small, start, killing, tmp_path):
    options = ["method=prompt", "lr_scheduler=wsd", "lr_scheduler.decay=0.5"]
    start_and_kill(start, killing, small(ORDER, *options), tmp_path, step=5, domain="food")
    [checkpoint] = (tmp_path / "checkpoints").glob("*.ckpt")
    stage = load_tensors(tmp_path / "stages" / "001.pt")
    for state in (load_tensors(checkpoint)["state_dict"], stage):
        assert {name.partition(".")[0] for name in state} >= {"model", "weights_before_decay"}
        assert all("prompt" in name for name in state if name.startswith(("model.", "weights_before_decay.")))


def test_computed_rows_and_heads_are_not_left_to_the_base(small):
    run = build(small, "lora")
    model = run.module.model
    base = type("Base", (), {"resize": False, "own_tokenizer": None})()
    everything = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    assert find_loaded_names(run.plan, base, model) == everything
    base.resize = True
    tables = {id(table) for table in find_vocabulary_tables(model)}
    computed = {name for name in everything if id(model.get_parameter(name)) in tables}
    assert computed and find_loaded_names(run.plan, base, model) == everything - computed

    base.resize = False
    pretraining = replace(run.plan.model.pretraining, head_steps=0)
    options = replace(run.plan.model, name_or_path="checkpoint", pretraining=pretraining)
    names = find_loaded_names(replace(run.plan, model=options), base, model)
    assert names and not any(name.startswith("head.") for name in names)
