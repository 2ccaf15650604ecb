"""How threads wait: they spin where the machine has a core for each."""

import pytest

from cpt.core import processes
from cpt.core.processes import SLEEPING, SPINNING, choose_spins


@pytest.mark.parametrize(
    ("running", "given", "spins"),
    [
        *((1, "", SPINNING), (3, "", SPINNING), (4, "", SLEEPING), (9, "", SLEEPING)),
        *((4, "1", SPINNING), (4, "2", SLEEPING), (4, "many", SLEEPING), (None, "", SLEEPING)),
    ],
)
def test_threads_spin_where_each_has_a_core(running, given, spins, monkeypatch, tmp_path):
    """On a machine of four cores, of which the process may use two, with this many running threads."""
    monkeypatch.setenv("OMP_NUM_THREADS", given)
    monkeypatch.setattr(processes, "cores", lambda: 2)
    monkeypatch.setattr(processes.os, "cpu_count", lambda: 4)
    monkeypatch.setattr(processes, "LOAD", tmp_path / "loadavg")
    if running is not None:
        processes.LOAD.write_text(f"0.20 0.18 0.12 {running}/80 11206\n")
    assert choose_spins() == spins
