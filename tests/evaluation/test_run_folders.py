"""Programs of one run that are given the folder of an experiment."""

import pytest

from cpt import card, gate, graft, load_run, withdraw
from cpt.evaluation.run_folders import choose_run
from cpt.trainer.plan import check_init_from
from tests.support.example_runs import save_scores

PROGRAMS = {
    card: [],
    gate: [],
    graft: ["--instruct", "a", "--base", "b"],
    withdraw: ["law"],
}


def test_the_only_finished_run_is_taken_and_several_are_named(tmp_path, capsys):
    experiment = tmp_path / "first"
    save_scores(experiment / "half", finished=False)
    with pytest.raises(ValueError, match="none of 1 run below it is finished"):
        choose_run(experiment)
    save_scores(experiment / "ncl")
    assert choose_run(experiment / "half") == experiment / "half" and choose_run(tmp_path / "no").name == "no"
    assert not capsys.readouterr().err
    assert load_run(experiment).folder == choose_run(experiment) == experiment / "ncl"
    assert f"RUN={experiment}: taking {experiment / 'ncl'}, the only" in capsys.readouterr().err

    for name in ("das", "ewc", "kd"):
        save_scores(experiment / name)
    named = f"{experiment / 'das'}, {experiment / 'ewc'}, {experiment / 'kd'}, … 1 more"
    for program, arguments in PROGRAMS.items():
        with pytest.raises(SystemExit):
            program.main([str(experiment), *arguments])
        message = f"RUN={experiment} is invalid: 4 finished runs are below it. Allowed: one of them: {named}"
        assert capsys.readouterr().err == f"cpt: {message}\n"
    with pytest.raises(ValueError, match="4 finished runs"):
        load_run(experiment)
    with pytest.raises(ValueError, match="no finished run. Allowed: .*; below this folder: .*das, "):
        check_init_from(experiment, full=False)
