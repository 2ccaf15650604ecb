"""Files of safetensors that are written tensor by tensor: the bytes of the library, and one tensor in memory."""

import pytest
import torch
from safetensors.torch import save_file

from cpt.core.tensor_files import TensorWriter, open_tensors

TENSORS = {
    "b.weight": torch.randn(3, 4),
    "a.weight": torch.randn(5).bfloat16(),
    'a "name" — of letters': torch.arange(7),
    "a number": torch.tensor(2.5, dtype=torch.float64),
    "nothing": torch.empty(0, 3),
    "truth": torch.tensor([True, False, True]),
    "transposed": torch.randn(4, 6).T,
    "half": torch.randn(2, 2).half(),
}


@pytest.mark.parametrize("metadata", [None, {"format": "pt"}])
def test_a_file_has_the_bytes_of_the_library(metadata, tmp_path):
    contiguous = {name: tensor.contiguous() for name, tensor in TENSORS.items()}
    save_file(contiguous, tmp_path / "expected", metadata)
    layout = {name: tensor.to("meta") for name, tensor in TENSORS.items()}
    with TensorWriter(tmp_path / "written", layout, metadata) as writer:
        for name in sorted(TENSORS):  # in any order
            writer.write(name, TENSORS[name])
    assert (tmp_path / "written").read_bytes() == (tmp_path / "expected").read_bytes()

    with open_tensors(tmp_path / "written") as opened:
        assert opened.metadata() == metadata
        for name, tensor in TENSORS.items():
            assert torch.equal(opened.get_tensor(name), tensor)


@pytest.mark.parametrize("tensor", [torch.zeros(4, 3), torch.zeros(3, 4).half()], ids=["shape", "type"])
def test_a_tensor_that_the_header_describes_otherwise_is_refused(tensor, tmp_path):
    with (
        TensorWriter(tmp_path / "file", {"x": torch.zeros(3, 4)}, None) as writer,
        pytest.raises(ValueError, match=r"^x is torch.float.*header of .*file says torch.float32 \[3, 4\]"),
    ):
        writer.write("x", tensor)


def test_what_is_read_is_not_mapped(tmp_path):
    save_file({"x": torch.ones(2**20)}, tmp_path / "file")
    with open_tensors(tmp_path / "file") as opened:
        tensor = opened.get_tensor("x")
        with open("/proc/self/maps", encoding="utf-8") as maps:
            assert str(tmp_path / "file") not in maps.read()
    assert tensor.sum() == 2**20
