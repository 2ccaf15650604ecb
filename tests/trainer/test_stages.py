"""Weights that are shared out in files: the old or the new are there at any time."""

import shutil

import pytest
import torch
from safetensors.torch import save_file
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from cpt.adapters.domain_store import DomainParams
from cpt.core import distributed as sharding
from cpt.core.distributed import full_tensor
from cpt.core.tensors import NamedTensors, load_tensors
from cpt.evaluation.options import StageOptions
from cpt.models.fsdp import shard_loaded_state
from cpt.optim.nan_guard import all_finite
from cpt.trainer import evaluator, linked_weights
from cpt.trainer.checkpoint import (
    check_stage,
    load_stage,
    restore_stage,
    save_sharded,
    save_stage,
)
from cpt.trainer.linked_weights import link_weights
from cpt.trainer.lm_eval_evaluator import LMEvalEvaluator
from cpt.trainer.run_dir import RunDir
from cpt.trainer.state_folders import LINKS, SHARDS
from cpt.verify import find_damage_in_run
from tests.runs.reading import same_state


def interrupt(*args, **options):
    raise KeyboardInterrupt


def test_a_sum_over_processes_passes_contiguous_tensors_to_nccl(monkeypatch):
    def nccl(tensor):
        assert tensor.is_contiguous()
        tensor.mul_(2)

    monkeypatch.setattr(sharding, "is_distributed", lambda: True)
    monkeypatch.setattr(sharding.distributed, "all_reduce", nccl)
    lora_b = torch.arange(6.0).view(2, 3).T
    sharding.all_reduce_sum(lora_b)
    assert torch.equal(lora_b, 2 * torch.arange(6.0).view(2, 3).T) and not lora_b.is_contiguous()


def test_processes_do_not_wait_for_one_that_failed_after_a_stage(monkeypatch):
    class Failing(LMEvalEvaluator):
        def measure_requests(self, *arguments):
            raise RuntimeError("no memory")

    store = distributed.HashStore()
    failing = Failing(
        StageOptions(when="last"), None, None, run=None, module=None, data=None, settings_hash=""
    )
    failing.stage_name = str
    monkeypatch.setattr(evaluator, "barrier", lambda: None)
    monkeypatch.setattr(sharding, "is_distributed", lambda: True)
    monkeypatch.setattr(sharding.distributed, "get_rank", lambda: 1)
    monkeypatch.setattr(sharding.distributed, "get_world_size", lambda: 2)
    monkeypatch.setattr(sharding.distributed.distributed_c10d, "_get_default_store", lambda: store)
    monkeypatch.setattr(sharding.time, "sleep", lambda seconds: pytest.fail("it waits"))
    with pytest.raises(RuntimeError, match="no memory"):
        failing.measure(1, torch.device("cpu"))
    with pytest.raises(ValueError, match="^process 1 has failed: no memory$"):
        sharding.wait_for_all("here")


@pytest.fixture
def mesh(tmp_path):
    store = distributed.FileStore(str(tmp_path / "store"), 1)
    distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    distributed.destroy_process_group()


def test_a_row_that_is_no_number_is_not_lost_among_those_of_other_processes(mesh, monkeypatch):
    rows = distribute_tensor(torch.tensor([[1.0, torch.nan]]), mesh, [Shard(0)])
    other_value = torch.ones(())
    # as gloo does
    monkeypatch.setattr(sharding.distributed, "all_reduce", lambda x, op: x.copy_(torch.fmax(other_value, x)))
    assert not all_finite([rows]) and all_finite([rows[:, :1]])


class Method(nn.Module):
    """A model of a table, a head that is tied to it and a map, an anchor of all, domain parameters of
    the map's bias and a count."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        parts = {"table": nn.Embedding(8, 4), "map": nn.Linear(4, 4), "head": nn.Linear(4, 8)}
        self.model = nn.ModuleDict(parts)
        self.model["head"].weight = self.model["table"].weight
        self.anchor = NamedTensors({name: parameter + 1 for name, parameter in self.model.named_parameters()})
        self.domain_params = DomainParams(self.model, ["map.bias"])
        self.domain_params.capture(self.model, 0)
        self.register_buffer("count", torch.tensor(seed))

    def share_out(self, mesh) -> "Method":
        table = self.model["table"]
        linear_map = self.model["map"]
        for part in (table, linear_map):
            part.weight = nn.Parameter(distribute_tensor(part.weight.data, mesh, [Shard(0)]))
        self.model["head"].weight = table.weight
        shared = {"table.weight": table.weight, "map.weight": linear_map.weight}
        self.anchor.shard(shared)
        self.domain_params.shard(shared)
        return self


def test_shards_are_written_once_and_read_as_what_is_stored_shared_out(mesh, tmp_path, monkeypatch):
    path = tmp_path / "stages" / "001.pt"
    module = Method(1).share_out(mesh)
    expected = Method(1).state_dict()
    with monkeypatch.context() as patch:
        patch.setattr(DTensor, "full_tensor", interrupt)
        patch.setattr(DTensor, "redistribute", interrupt)
        save_stage(module, path)
    assert sorted(entry.name for entry in path.parent.iterdir()) == ["001.1.shards", "001.pt"]
    stored = load_tensors(path)
    shard_places = stored.pop(SHARDS)["places"]
    bare = {"model.map.bias", "model.head.bias", "count"}
    bare |= {"anchor.map/bias", "anchor.head/bias", "domain_params.0:map/bias"}
    assert {name for name, value in stored.items() if value is not None} == bare
    assert same_state(load_stage(path), expected)
    assert [["model.table.weight"], ["model.head.weight"]] in shard_places.values()  # they are tied
    assert len(shard_places) == 4  # of model and anchor


def test_nested_tensors_of_a_checkpoint_are_sharded_too(mesh, tmp_path):
    path = tmp_path / "001-l[aw].ckpt"
    table = Method(1).share_out(mesh).model["table"].weight.detach()
    state = {0: {"step": torch.tensor(3.0), "exp_avg": table + 1, "seen": 3}}
    optimizer = {"state": state, "param_groups": [{"lr": 0.1, "params": [0]}]}
    for step in (1, 2):
        save_sharded({"loops": step, "state_dict": {"w": table}, "optimizer_states": [optimizer]}, path)
    assert [shards.name for shards in tmp_path.glob("*.shards")] == ["001-l[aw].2.shards"]

    checkpoint = load_stage(path)
    moments = optimizer["state"][0]
    (optimizer_state,) = checkpoint["optimizer_states"]
    weight = table.full_tensor()
    assert torch.equal(optimizer_state["state"][0].pop("exp_avg"), moments["exp_avg"].full_tensor())
    assert optimizer_state == {**optimizer, "state": {0: {"step": moments["step"], "seen": 3}}}
    assert checkpoint["loops"] == 2 and torch.equal(checkpoint["state_dict"]["w"], weight)

    [file] = tmp_path.glob("*.shards/*.distcp")
    file.write_bytes(file.read_bytes()[:-10])
    with pytest.raises(ValueError, match=r"\.shards: .*distcp has [\d,]+ bytes, .*; delete .*001-l.*\.ckpt"):
        load_stage(path)


@pytest.mark.parametrize(
    ("is_stored_shared", "shared", "stores_on_disk"),
    [(True, True, True), (True, False, False), (False, True, False)],
)
def test_a_module_is_restored_however_it_is_laid_out(
    mesh, tmp_path, is_stored_shared, shared, stores_on_disk
):
    path = tmp_path / "001.pt"
    save_stage(Method(1).share_out(mesh) if is_stored_shared else Method(1), path)
    restored = Method(2)
    if shared:
        restored.share_out(mesh).register_load_state_dict_pre_hook(shard_loaded_state)
    restore_stage(restored, path, stores_on_disk=stores_on_disk)
    state = {
        name: full_tensor(tensor) if shared else tensor for name, tensor in restored.state_dict().items()
    }
    assert same_state(state, Method(1).state_dict())
    assert restored.domain_params.mapped_names == ({"0:map/bias"} if stores_on_disk else set())


@pytest.mark.parametrize("function", ["checkpoint.save", "hash_files", "save_state"])
def test_a_stage_that_is_half_written_is_none_and_one_is_replaced_as_a_whole(
    function, mesh, tmp_path, monkeypatch
):
    path = tmp_path / "stages" / "001.pt"
    before = None
    for number in (1, 2):
        module = Method(number).share_out(mesh)
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(f"cpt.trainer.checkpoint.{function}", interrupt)
            save_stage(module, path)
        assert same_state(load_stage(path), before) if before else not path.exists()
        save_stage(module, path)  # the same process again
        before = Method(number).state_dict()
        assert same_state(load_stage(path), before) and len([*path.parent.glob("*.shards")]) == 1
    save_stage(Method(3), path)  # by one process
    assert [entry.name for entry in path.parent.iterdir()] == ["001.pt"]


def export(module: Method, model, names=("table.weight", "map.bias")) -> None:
    """An exported model with some of a module's weights and the part of a domain."""
    model.mkdir(exist_ok=True)
    (model / "parts").mkdir(exist_ok=True)
    weights = dict(module.model.named_parameters())
    save_file({name: weights[name].detach().clone() for name in names}, model / "model.safetensors")
    part = {"w": 1 + weights["map.weight"].detach(), "flat": weights["table.weight"].detach().flatten()}
    save_file(part, model / "parts" / "law.safetensors")


@pytest.mark.parametrize("shared", [False, True])
def test_what_an_exported_model_holds_is_not_stored_twice(shared, mesh, tmp_path):
    path = tmp_path / "stages" / "001.pt"
    model = tmp_path / "model"
    expected = Method(1).state_dict()
    save_stage(Method(1).share_out(mesh) if shared else Method(1), path)
    export(Method(1), model)
    link_weights(path, model)

    (folder,) = (entry for entry in path.parent.iterdir() if entry != path)  # no shards
    stored = load_tensors(path)
    linked = stored.pop(LINKS)
    keys = {name: key for name, (file, key) in linked["tensors"].items() if file == "model.safetensors"}
    assert keys == {
        "model.table.weight": "table.weight",
        "model.head.weight": "table.weight",  # they are tied
        "model.map.bias": "map.bias",
        "domain_params.0:map/bias": "map.bias",
    }
    assert linked["tensors"]["anchor.map/weight"][0] == "parts/law.safetensors"
    assert all(stored[name] is None for name in linked["tensors"])
    assert (folder / "model.safetensors").samefile(model / "model.safetensors")
    assert same_state(load_stage(path), expected)

    for _ in range(2):
        for stores_on_disk in (True, False):
            restored = Method(2)
            restore_stage(restored, path, stores_on_disk=stores_on_disk)
            assert same_state(dict(restored.state_dict()), expected)
            assert restored.domain_params.mapped_names == ({"0:map/bias"} if stores_on_disk else set())
        check_stage(path, remedy="")
        shutil.rmtree(model)  # the stage stays whole, and the model can be written anew
        export(Method(1), model, names=["map.weight"])
        link_weights(path, model)
        names = [entry.name for entry in path.parent.iterdir()]
        assert len(names) == 2 and "001.pt" in names
        assert same_state(load_stage(path), expected)

    export(Method(3), model)
    (model / "parts" / "law.safetensors").unlink()
    link_weights(path, model)  # which shares nothing with the stage
    assert same_state(load_stage(path), expected)


def test_equal_weights_of_a_linked_stage_can_be_changed_one_by_one(tmp_path):
    path = tmp_path / "001.pt"
    module = Method(1)
    save_stage(module, path)
    export(module, tmp_path / "model")
    link_weights(path, tmp_path / "model")
    state = load_stage(path)
    state["model.map.bias"].zero_()
    assert torch.equal(state["domain_params.0:map/bias"], module.model["map"].bias)


@pytest.mark.parametrize("function", ["save_state", "hash_files", "remove_folders"])
def test_a_kill_while_weights_are_linked_leaves_the_stage_whole(function, tmp_path, monkeypatch):
    run = RunDir(tmp_path)
    path = run.stage_path(1)
    expected = Method(1).state_dict()
    save_stage(Method(1), path)
    export(Method(1), run.model)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(linked_weights, function, interrupt)
        link_weights(path, run.model)
    assert same_state(load_stage(path), expected)
    link_weights(path, run.model)
    assert same_state(load_stage(path), expected) and len([*path.parent.iterdir()]) == 2
    run.cleanup(2, keep_stages=False)
    assert not [*path.parent.iterdir()]


def test_without_hard_links_the_stage_stays_as_it_is(tmp_path, monkeypatch, caplog):
    path = tmp_path / "001.pt"
    model = tmp_path / "model"
    save_stage(Method(1), path)
    export(Method(1), model)
    before = path.read_bytes()

    def refuse(*arguments):
        raise OSError(1, "Operation not permitted")

    caplog.set_level("INFO")
    monkeypatch.setattr(linked_weights.os, "link", refuse)
    link_weights(path, model)
    assert path.read_bytes() == before and {*tmp_path.iterdir()} == {path, model}
    assert f"Storing the weights twice, in {model} and {path}: no hard links here" in caplog.text


def test_a_damaged_or_missing_file_of_shards_is_refused_and_reported(mesh, tmp_path):
    stage = RunDir(tmp_path).stage_path(1)
    save_stage(Method(1).share_out(mesh), stage)
    assert not [line for line in find_damage_in_run(tmp_path) if "shards" in line]
    [file] = tmp_path.glob("stages/*.shards/*.distcp")
    original = file.read_bytes()
    for data in (original[:-10], original[:-20] + b"x" + original[-19:], None):
        file.unlink() if data is None else file.write_bytes(data)
        with pytest.raises(ValueError, match=rf"001\.1\.shards: {file.name}.*; begin anew"):
            check_stage(stage, remedy="begin anew")
        assert [line for line in find_damage_in_run(tmp_path) if "001.1.shards" in line]
