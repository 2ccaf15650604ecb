"""An allocation that fails ends a run in one line; any other error of the same class is not hidden."""

import re

import pytest
import torch

from cpt.core.errors import readable

FAILING = {
    "python": lambda: bytearray(1 << 62),
    "torch": lambda: torch.empty(1 << 50),
    "oneDNN": lambda: raised(RuntimeError("could not create a primitive")),
    "a thread": lambda: raised(RuntimeError("can't start new thread")),
    "a gpu": lambda: raised(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")),
}


def raised(error):
    raise error


@pytest.mark.parametrize("what", FAILING)
def test_it_is_one_line_about_memory(what, capsys):
    with pytest.raises(SystemExit) as ended, readable(errors_only=True):
        FAILING[what]()
    said = capsys.readouterr().err
    assert ended.value.code == 1
    assert re.fullmatch(
        r"cpt: memory does not suffice \(.+\); the same command goes on from here; .+\n", said
    )


def test_it_is_told_of_what_became_of_it_on_the_way_up(capsys):
    with pytest.raises(SystemExit), readable(errors_only=True):
        try:
            raise MemoryError
        except MemoryError as error:
            raise ValueError("variant cannot be resolved") from error
    assert capsys.readouterr().err.startswith("cpt: memory does not suffice (MemoryError); the same command")


def test_what_is_no_want_of_memory_is_raised(capsys):
    with pytest.raises(RuntimeError, match="shapes"), readable(errors_only=True):
        raise RuntimeError("shapes differ")
    with pytest.raises(MemoryError), readable(errors_only=False):
        raise MemoryError
    assert capsys.readouterr().err == ""
