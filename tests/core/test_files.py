"""Archives that are whole."""

import numpy as np
import pytest

from cpt.core.files import check_archive
from cpt.evaluation.documents import documents_file, load_documents


@pytest.fixture
def archive(tmp_path):
    path = documents_file(tmp_path, 0)
    path.parent.mkdir()
    np.savez(path, law=np.ones((2, 3)))
    return path


@pytest.mark.parametrize("value", [0, 64, 255])
def test_whatever_a_byte_becomes_it_is_told_in_a_line(archive, value):
    """A version that zipfile does not know was an error of another kind."""
    whole, refused = archive.read_bytes(), 0
    for place in range(len(whole)):
        archive.write_bytes(whole[:place] + bytes([value]) + whole[place + 1 :])
        try:
            check_archive(archive, instead="do this")
        except ValueError as error:
            assert str(error).endswith("; do this")
            refused += 1
    assert refused > len(whole) / 2


def test_losses_by_document_that_are_damaged_are_told(archive, tmp_path):
    assert load_documents(tmp_path, [0])[0]["law"].shape == (2, 3)
    archive.write_bytes(archive.read_bytes()[:-9])
    with pytest.raises(ValueError, match=r"000.npz is truncated or damaged .*; bring it back"):
        load_documents(tmp_path, [0])
    with pytest.raises(ValueError, match="001.npz is gone; bring it back"):
        load_documents(tmp_path, [1])
