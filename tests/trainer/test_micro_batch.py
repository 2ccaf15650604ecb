"""`trainer.micro_batch`: how many samples pass through the model together, by number or by what fits."""

import json
import logging
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from omegaconf import OmegaConf

from cpt.core.memory import list_limit_files
from cpt.data.corpora import Corpora
from cpt.methods.ncl import NCL
from cpt.methods.stage_module import StageModule
from cpt.trainer import micro_batch, micro_batch_trial, profiling
from cpt.trainer.auto import choose_devices
from cpt.trainer.base_model import make_base
from cpt.trainer.check_model import check_model
from cpt.trainer.computed_changes import ChangeSearch
from cpt.trainer.computed_memory import STEP, find_memory, make_layout
from cpt.trainer.device_kinds import GPUS
from cpt.trainer.micro_batch import FittingMicroBatch, agree_on_micro_batch, choose_micro_batch, search
from cpt.trainer.micro_batch_trial import try_micro_batch
from cpt.trainer.plan import make_plan
from cpt.trainer.simulated_plan import SimulatedPlan
from tests.runs.reading import assert_same_bits, read_scores, start_and_kill
from tests.support.method_fixtures import one_process

AUTO = "trainer.micro_batch=auto"
TWO_DOMAINS = "order=[law,food]"
SIZES = [1, 2, 4, 8]


@pytest.fixture
def two_samples_fit(monkeypatch):
    """A device on which more than two samples of a micro-batch are out of memory."""
    compute_losses = NCL.losses

    def losses(module, batch):
        is_trial = getattr(module.data, "trial_batch", None) is not None  # else the base is pre-trained
        if is_trial and len(batch["input_ids"]) > 2:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return compute_losses(module, batch)

    monkeypatch.setattr(NCL, "losses", losses)


@pytest.mark.filterwarnings("ignore")
def test_auto_is_the_largest_that_fits_and_the_run_is_that_of_the_number(
    small, start, planned_json, two_samples_fit, tmp_path, caplog
):
    caplog.set_level(logging.INFO)
    cost = planned_json(small(TWO_DOMAINS, AUTO), tmp_path / "plan")
    assert cost["micro_batch"] == 2 and not (tmp_path / "plan").exists()

    start(small(TWO_DOMAINS, AUTO), tmp_path / "auto")
    assert (
        "Micro-batch (trainer.micro_batch=auto): 2 samples, 4 times in a step on each of 1 device; "
        in caplog.text
    )
    assert read_scores(tmp_path / "auto")["numerics"]["micro_batch"] == "2"
    start(small(TWO_DOMAINS, "trainer.micro_batch=2"), tmp_path / "number")
    start(small(TWO_DOMAINS, "trainer.accumulate_grad_batches=4"), tmp_path / "divided")
    assert_same_bits(tmp_path / "auto", tmp_path / "number")
    assert_same_bits(tmp_path / "auto", tmp_path / "divided")


def test_a_resumed_run_keeps_its_micro_batch_on_a_device_with_more_memory(
    small, start, killing, tmp_path, monkeypatch
):
    monkeypatch.setattr(
        micro_batch, "find_fitting_micro_batch", lambda *args, **kwargs: FittingMicroBatch(2, 1, "tried")
    )
    cfg = small(TWO_DOMAINS, AUTO)
    start(cfg, tmp_path / "whole")
    start_and_kill(start, killing, cfg, tmp_path / "run", step=5, domain="food")
    monkeypatch.setattr(
        micro_batch, "find_fitting_micro_batch", lambda *args, **kwargs: FittingMicroBatch(8, 1, "tried")
    )
    start(cfg, tmp_path / "run")
    assert_same_bits(tmp_path / "run", tmp_path / "whole")


@pytest.fixture
def planned_json(start, capsys):
    def plan(cfg, folder):
        capsys.readouterr()
        folder.mkdir()
        start(OmegaConf.merge(cfg, {"plan": "json"}), folder)
        return json.loads(capsys.readouterr().out)

    return plan


@pytest.mark.parametrize(
    ("first", "fitting", "may_run_out", "chosen", "attempts"),
    [
        (4, 4, True, 4, [4, 8]),  # memory grows with 8, which fails
        (8, 2, True, 2, [8, 4, 2]),
        (1, 8, True, 8, [1, 2, 4, 8]),
        (8, 0, True, None, [8, 4, 2, 1]),
        (2, 4, False, 4, [2, 4]),  # 8 would take twice as much, which ends a process on a CPU
    ],
)
def test_a_search_goes_down_to_what_fits_or_up_to_what_does_not(
    first, fitting, may_run_out, chosen, attempts
):
    tried_sizes = []

    def try_size(size):
        tried_sizes.append(size)
        return 10 * size if size <= fitting else None

    choice = search(SIZES, try_size, first=first, limit=10 * max(fitting, 1) + 5, may_run_out=may_run_out)
    assert (None if choice is None else choice.micro_batch) == chosen
    assert tried_sizes == attempts


def test_what_fits_the_device_and_not_the_limit_does_not_fit():
    choice = search(SIZES, lambda size: 10 * size, first=8, limit=25, may_run_out=True)
    assert choice == FittingMicroBatch(2, 20, "tried")


@pytest.mark.filterwarnings("ignore")
def test_later_stages_and_other_processes_count_as_memory(small, monkeypatch):
    monkeypatch.setattr(micro_batch_trial, "read_peak_bytes", lambda device: 10**9)
    plan = make_plan(small("method=demix", "order=[law,food,space]"))
    corpora = Corpora.read(plan.source, plan.order, cache=Path(plan.run.cache_dir))
    base = make_base(plan.model, corpora, accelerator="cpu")
    domains = []

    def needed(*, world_size=1):
        num_bytes = try_micro_batch(plan, make_machine(plan, world_size=world_size), corpora, base, 2)
        assert num_bytes is not None
        return num_bytes

    setup_stage = StageModule.setup_stage

    def note_stage(module, stage):
        domains.append(stage.name)
        setup_stage(module, stage)

    monkeypatch.setattr(StageModule, "setup_stage", note_stage)
    assert needed() == 10**9 and domains == ["law", "food", "space"]
    gradients = needed(world_size=2) - 10**9  # whose buckets DDP sends
    assert gradients > 0 and gradients % 4 == 0
    monkeypatch.setattr(profiling, "NUM_STAGES", 2)
    assert needed() > 10**9  # the experts of the third domain


def make_machine(plan, *, world_size=1, strategy="auto"):
    return replace(one_process(plan), world_size=world_size, strategy=strategy)


@pytest.mark.parametrize(
    ("stored", "world_size", "num_micro_batches"),
    [(2, 1, 4), (2, 2, 2), (8, 2, 1), (3, 1, 4)],
)
def test_other_processes_keep_the_micro_batch_if_they_can(
    stored, world_size, num_micro_batches, small, tmp_path
):
    plan = make_plan(small(AUTO))
    path = tmp_path / "micro_batch.json"
    path.write_text(json.dumps({"micro_batch": stored}))
    machine = make_machine(plan, world_size=world_size)
    chosen = choose_micro_batch(plan, machine, None, None, stored=path)
    assert chosen.trainer.accumulate_grad_batches == num_micro_batches
    assert agree_on_micro_batch(chosen, machine, stored=path) == chosen


@pytest.mark.parametrize("text", ["", "{}", '{"micro_batch": 0}', '{"micro_batch": "2"}', "[2]"])
def test_a_damaged_file_is_named(text, small, tmp_path):
    path = tmp_path / "micro_batch.json"
    path.write_text(text)
    plan = make_plan(small(AUTO))
    with pytest.raises(ValueError, match=r"micro_batch.json is damaged; .* \{\"micro_batch\": N\}"):
        choose_micro_batch(plan, make_machine(plan), None, None, stored=path)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_processes_agree_on_the_smallest(strategy, small, tmp_path, monkeypatch):
    """What cannot be tried is computed; each process may have another device."""
    joined = []
    monkeypatch.setattr(micro_batch, "is_one_of_several", lambda: True)
    monkeypatch.setattr(micro_batch, "join_processes", joined.append)
    monkeypatch.setattr(micro_batch, "gather_objects", lambda chosen: [chosen, 1])
    monkeypatch.setattr(micro_batch, "find_total_memory", lambda: 10**9)
    plan = make_plan(small(AUTO))
    machine = make_machine(plan, world_size=2, strategy=strategy)
    path = tmp_path / "micro_batch.json"
    chosen = choose_micro_batch(plan, machine, None, None, stored=path)
    assert chosen.trainer.accumulate_grad_batches == 1  # four samples each
    agreed = agree_on_micro_batch(chosen, machine, stored=path)
    assert agreed.trainer.accumulate_grad_batches == 4
    assert json.loads(path.read_text()) == {"micro_batch": 1}
    assert len(joined) == (strategy == "ddp")  # of fsdp they have loaded the model together


def test_what_cannot_be_computed_or_does_not_fit_is_refused(small, small_gpt2, tmp_path, monkeypatch):
    monkeypatch.setattr(micro_batch, "find_total_memory", lambda: 10**9)
    monkeypatch.setattr(micro_batch, "is_one_of_several", lambda: True)
    plan = make_plan(small_gpt2(AUTO, "method=elle"))
    with pytest.raises(ValueError, match="auto is invalid with .*torchrun.*: the memory of method=elle"):
        choose_micro_batch(plan, make_machine(plan), None, None, stored=tmp_path / "none")

    monkeypatch.setattr(micro_batch, "is_one_of_several", lambda: False)
    monkeypatch.setattr(micro_batch, "try_micro_batch", lambda *args: None)
    plan = make_plan(small(AUTO))
    with pytest.raises(ValueError, match="auto is invalid: a step with one sample does not fit into 900 MB"):
        choose_micro_batch(plan, make_machine(plan), None, None, stored=tmp_path / "none")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            "trainer.micro_batch=3",
            "micro_batch=3 is invalid with trainer.batch_size=8 of 1 process. .* 1, 2, 4",
        ),
        ("trainer.micro_batch=8 trainer.devices=2", "micro_batch=8 is .* of 2 processes. Allowed: 1, 2, 4"),
        ("trainer.micro_batch=0", "trainer.micro_batch=0 is invalid"),
        ("trainer.micro_batch=all", "trainer.micro_batch=all is invalid"),
        (
            f"{AUTO} trainer.accumulate_grad_batches=2",
            "accumulate_grad_batches=2 is invalid with micro_batch=auto",
        ),
    ],
)
def test_wrong_numbers_are_refused_in_one_line(options, words, small):
    with pytest.raises(ValueError, match=words) as raised:
        make_plan(small(*options.split()))
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("method=das", "contrastive loss compares the samples of each micro-batch"),
        ("method=derpp", "each micro-batch draws its own past samples"),
        ("method=das method.contrast=0", ""),
    ],
)
def test_what_depends_on_the_micro_batch_takes_none_that_depends_on_the_device(options, words, small):
    plan = make_plan(small(AUTO, *options.split()))
    if not words:
        check_model(plan)
        return
    with pytest.raises(ValueError, match=rf"micro_batch=auto is invalid: .*memory of the device \(.*{words}"):
        check_model(plan)


def test_strategy_auto_takes_gpus_that_share_the_micro_batches(small, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    assert choose_devices(make_plan(small("trainer.micro_batch=2")).trainer) == (4, "ddp")
    assert choose_devices(make_plan(small(AUTO)).trainer) == (8, "ddp")


def test_a_computed_plan_divides_a_step_until_it_fits(small):
    plan = make_plan(small(AUTO, "plan=true", "plan_device=h100"))
    simulated = SimulatedPlan(plan, GPUS["h100"])
    layout = make_layout(plan, 1)
    undivided, divided = (
        sum(find_memory(simulated, replace(layout, accumulate=number))[STEP].values()) for number in (1, 4)
    )
    changes = ChangeSearch(small(AUTO), simulated, GPUS["h100"])
    assert changes.divide(simulated, layout, limit=undivided).accumulate == 1
    assert changes.divide(simulated, layout, limit=divided).accumulate == 4
    assert changes.divide(simulated, layout, limit=1).accumulate == 8
    assert make_layout(make_plan(small("trainer.micro_batch=2")), 2).accumulate == 2


def test_limits_of_control_groups_are_those_of_all_above(tmp_path):
    groups = tmp_path / "cgroup"
    groups.write_text("4:memory:/job/step\n2:cpu:/job\n0::/user.slice\n")
    root = tmp_path / "fs"
    assert list_limit_files(groups, root=root) == [
        *(root / "memory" / name / "memory.limit_in_bytes" for name in ("job/step", "job", "")),
        *(root / name / "memory.max" for name in ("user.slice", "")),
    ]
    assert list_limit_files(tmp_path / "none", root=root) == []
