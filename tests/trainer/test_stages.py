"""The file of a stage whose weights are shared out: shards, and what is whole beside them."""

import pytest
import torch
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from cpt.adapters.domain_store import DomainParams
from cpt.core.distributed import full_tensor
from cpt.core.tensors import NamedTensors
from cpt.trainer import checkpoint as stages
from cpt.trainer.checkpoint import check_stage, load_stage, restore_stage, save_stage
from cpt.trainer.costs import stored_bytes
from cpt.trainer.lightning import shard_state
from cpt.trainer.run_dir import RunDir
from cpt.verify import damage_in_run

INSTEAD = "begin anew"


@pytest.fixture
def mesh(tmp_path):
    """One process that shares out with itself."""
    store = distributed.FileStore(str(tmp_path / "store"), 1)
    distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    distributed.destroy_process_group()


class Method(nn.Module):
    """A model of a table, a head that is tied to it and a map, an anchor of all, a bank of the map's bias and
    a count."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.model = nn.ModuleDict(
            {"table": nn.Embedding(8, 4), "map": nn.Linear(4, 4), "head": nn.Linear(4, 8)}
        )
        self.model["head"].weight = self.model["table"].weight
        self.anchor = NamedTensors({name: each + 1 for name, each in self.model.named_parameters()})
        self.bank = DomainParams(self.model, ["map.bias"])
        self.bank.keep(self.model, 0)
        self.register_buffer("count", torch.tensor(seed))

    def share_out(self, mesh) -> "Method":
        table, own = self.model["table"], self.model["map"]
        for part in (table, own):
            part.weight = nn.Parameter(distribute_tensor(part.weight.data, mesh, [Shard(0)]))
        self.model["head"].weight = table.weight
        shared = {"table.weight": table.weight, "map.weight": own.weight}
        self.anchor.shard(shared)
        self.bank.shard(shared)
        return self


def is_same(state: dict, other: dict) -> bool:
    return [*state] == [*other] and all(torch.equal(state[name], other[name]) for name in state)


def test_shards_are_read_as_what_was_shared_out(mesh, tmp_path):
    path = tmp_path / "stages" / "001.pt"
    expected = Method(1).state_dict()
    given = save_stage(Method(1).share_out(mesh), path)
    assert sorted(each.name for each in path.parent.iterdir()) == ["001.1.shards", "001.pt"]
    assert stages.open_stage(path)[0].keys() == {
        *("model.map.bias", "model.head.bias", "anchor.map/bias", "anchor.head/bias", "bank.0:map/bias"),
        "count",
    }
    assert is_same(load_stage(path), expected)
    own = {"table.weight", "map.weight", "map.bias", "head.weight", "head.bias"}
    assert stored_bytes(given, own) == stored_bytes(expected, own) > 0
    check_stage(path, instead=INSTEAD)


def test_what_is_tied_is_written_once(mesh, tmp_path):
    path = tmp_path / "001.pt"
    save_stage(Method(1).share_out(mesh), path)
    names = stages.open_stage(path)[1]["names"]
    assert names["model.head.weight"] == names["model.table.weight"] == "model.table.weight"
    assert len({*names.values()}) == 4  # of model and anchor


@pytest.mark.parametrize("written", [True, False], ids=["shards", "whole"])
@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("rests", [True, False])
def test_a_module_is_restored_however_it_is_laid_out(mesh, tmp_path, written, shared, rests):
    path = tmp_path / "001.pt"
    save_stage(Method(1).share_out(mesh) if written else Method(1), path)
    other = Method(2)
    if shared:
        other.share_out(mesh).register_load_state_dict_pre_hook(shard_state)
    restore_stage(other, path, rests=rests)
    state = {name: full_tensor(each) if shared else each for name, each in other.state_dict().items()}
    assert is_same(state, Method(1).state_dict())
    assert other.bank.mapped == ({"0:map/bias"} if rests else set())


def killed(*args, **how):
    raise KeyboardInterrupt


def test_nothing_is_brought_together_to_be_written(mesh, tmp_path, monkeypatch):
    def refused(*args, **how):
        raise AssertionError("brought together")

    module = Method(1).share_out(mesh)
    with monkeypatch.context() as patch:
        patch.setattr(DTensor, "full_tensor", refused)
        patch.setattr(DTensor, "redistribute", refused)
        save_stage(module, tmp_path / "001.pt")
    assert is_same(load_stage(tmp_path / "001.pt"), Method(1).state_dict())


@pytest.mark.parametrize("function", ["write_shards", "hash_files", "save_state"])
def test_a_stage_that_is_half_written_is_none(function, mesh, tmp_path, monkeypatch):
    place = RunDir(tmp_path / "run")
    path, module = place.stage(1), Method(1).share_out(mesh)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(stages, function, killed)
        save_stage(module, path)
    assert not path.exists()
    save_stage(module, path)  # the same process again
    assert is_same(load_stage(path), Method(1).state_dict())
    assert len([*path.parent.glob("*.shards")]) == 1
    path.unlink()
    place.clean()
    assert not [*path.parent.iterdir()]


def test_a_stage_is_replaced_as_a_whole(mesh, tmp_path, monkeypatch):
    path = tmp_path / "001.pt"
    save_stage(Method(1).share_out(mesh), path)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(stages, "save_state", killed)
        save_stage(Method(2).share_out(mesh), path)
    assert is_same(load_stage(path), Method(1).state_dict())
    save_stage(Method(2).share_out(mesh), path)
    assert is_same(load_stage(path), Method(2).state_dict())
    assert len([*tmp_path.glob("*.shards")]) == 1


def test_a_stage_that_one_process_writes_anew_has_no_shards(mesh, tmp_path):
    path = tmp_path / "001.pt"
    save_stage(Method(1).share_out(mesh), path)
    save_stage(Method(2), path)
    assert [each.name for each in tmp_path.glob("001*")] == ["001.pt"]
    assert is_same(load_stage(path), Method(2).state_dict())


DAMAGE = {
    "cut off": lambda file: file.write_bytes(file.read_bytes()[:-10]),
    "gone": lambda file: file.unlink(),
    "another byte": lambda file: file.write_bytes(file.read_bytes()[:-20] + b"x" + file.read_bytes()[-19:]),
}


@pytest.mark.parametrize("what", DAMAGE)
def test_damage_is_told(what, mesh, tmp_path):
    place = RunDir(tmp_path)
    save_stage(Method(1).share_out(mesh), place.stage(1))
    assert not [line for line in damage_in_run(tmp_path) if "shards" in line]
    [file] = tmp_path.glob("stages/*.shards/*.distcp")
    DAMAGE[what](file)
    with pytest.raises(ValueError, match=rf"001\.1\.shards: {file.name}.*; begin anew"):
        check_stage(place.stage(1), instead=INSTEAD)
    assert [line for line in damage_in_run(tmp_path) if "001.1.shards" in line]


def test_a_committed_stage_removes_those_before_with_their_shards(mesh, tmp_path):
    place = RunDir(tmp_path)
    for number in (1, 2):
        save_stage(Method(number).share_out(mesh), place.stage(number))
    place.cleanup(2, keep=True)
    place.clean()
    assert len([*(tmp_path / "stages").iterdir()]) == 4
    place.cleanup(2, keep=False)
    assert {each.name for each in (tmp_path / "stages").iterdir()} == {"002.pt", "002.1.shards"}
