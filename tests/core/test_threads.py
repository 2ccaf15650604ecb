"""How threads wait: they spin where the machine has a core for each."""

import pytest

from cpt.core import threads
from cpt.core.threads import SLEEPING, SPINNING, choose_spins, count_running


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """A machine of four cores, of which the process may use two, with so many threads that run."""

    def of(running: int | None) -> None:
        monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
        monkeypatch.setattr(threads, "BETWEEN", 0)
        monkeypatch.setattr(threads, "cores", lambda: 2)
        monkeypatch.setattr(threads.os, "cpu_count", lambda: 4)
        monkeypatch.setattr(threads, "LOAD", tmp_path / "loadavg")
        if running is not None:
            threads.LOAD.write_text(f"0.20 0.18 0.12 {running}/80 11206\n")

    return of


@pytest.mark.parametrize(("running", "spins"), [(1, SPINNING), (3, SPINNING), (4, SLEEPING), (9, SLEEPING)])
def test_threads_spin_where_each_has_a_core(running, spins, machine):
    machine(running)
    assert choose_spins() == spins


@pytest.mark.parametrize(("given", "spins"), [("1", SPINNING), ("2", SLEEPING), ("many", SLEEPING)])
def test_how_many_there_are_is_what_the_environment_says(given, spins, machine, monkeypatch):
    machine(4)
    monkeypatch.setenv("OMP_NUM_THREADS", given)
    assert choose_spins() == spins


def test_where_nothing_tells_who_else_is_there_they_sleep(machine):
    machine(None)
    assert count_running() == float("inf") and choose_spins() == SLEEPING
