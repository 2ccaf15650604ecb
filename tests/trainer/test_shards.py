"""A checkpoint in a folder of tensors and a file that names it: the old ones or the new ones at any time."""

import pytest
import torch

from cpt.trainer import checkpoint as fsdp


def checkpoint(step: int) -> dict:
    """What a trainer has after so many steps: two weights and the moments of one."""
    moments = {"step": torch.tensor(float(step)), "exp_avg": torch.full((2, 3), 0.5 + step), "seen": step}
    state = {"weight": torch.arange(6.0).view(2, 3) + step, "bias": torch.ones(2) * step}
    optimizer = {"state": {0: moments}, "param_groups": [{"lr": 0.1, "params": [0]}]}
    return {
        "global_step": step,
        "state_dict": state,
        "optimizer_states": [optimizer],
        "loops": {"done": step},
    }


def read(path):
    found = torch.load(path, weights_only=True)
    return fsdp.fill_in(found, path, lambda name, shape: None)


def assert_read(path, step: int) -> None:
    found, expected = read(path), checkpoint(step)
    assert found["loops"] == {"done": step} and found["state_dict"].keys() == expected["state_dict"].keys()
    for name, value in expected["state_dict"].items():
        assert torch.equal(found["state_dict"][name], value)
    [own], [then] = found["optimizer_states"], expected["optimizer_states"]
    assert own["param_groups"] == then["param_groups"] and own["state"][0]["seen"] == step
    for key in ("step", "exp_avg"):
        assert torch.equal(own["state"][0][key], then["state"][0][key])


def test_what_is_written_is_read_and_the_one_before_is_gone(tmp_path):
    path = tmp_path / "001-law.ckpt"
    for step in (4, 4):
        fsdp.save_shards(checkpoint(step), path)
        assert_read(path, step)
    assert [each.name for each in tmp_path.glob("*.shards")] == ["001-law.2.shards"]


@pytest.mark.parametrize("function", ["files.save", "save_state"])
def test_a_kill_leaves_the_one_before(function, tmp_path, monkeypatch):
    path = tmp_path / "001-law.ckpt"
    fsdp.save_shards(checkpoint(2), path)

    def killed(*args, **how):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(f"cpt.trainer.checkpoint.{function}", killed)
        fsdp.save_shards(checkpoint(4), path)
    assert_read(path, 2)
    fsdp.save_shards(checkpoint(4), path)
    assert_read(path, 4)
    assert len([*tmp_path.glob("*.shards")]) == 1


def test_a_file_that_is_cut_off_is_told(tmp_path):
    path = tmp_path / "001-law.ckpt"
    fsdp.save_shards(checkpoint(2), path)
    [file] = (tmp_path / "001-law.1.shards").glob("*.distcp")
    file.write_bytes(file.read_bytes()[:-10])
    with pytest.raises(ValueError, match=r"1\.shards: .*distcp has \d+ bytes, .*; delete .*001-law\.ckpt"):
        read(path)
