"""The program that writes a run's tasks for the lm-evaluation-harness."""

import json

import pytest
import yaml

from cpt.contrib.lm_eval_export.__main__ import export, main
from cpt.trainer.plan import make_plan
from tests.support.task_fixtures import write_tasks


@pytest.fixture(scope="module")
def tasks(tmp_path_factory):
    return write_tasks(tmp_path_factory.mktemp("exported"), ("food", "law"), train=30, test=12)


@pytest.mark.slow
def test_the_command_line_writes_a_run_s_tasks_and_says_how_to_ask_them(tasks, cache, tmp_path, capsys):
    given = ["domains=tasks", f"domains.root={tasks}", f"cache_dir={cache}", "model=tiny_gpt2"]
    main([str(tmp_path / "out"), *given, "model.vocabulary=300", "order=[law]", "answers.most=5"])
    assert capsys.readouterr().out.splitlines() == [
        "cpt_law: 5 examples",
        f"probe=lm_eval probe.include={tmp_path / 'out'} 'probe.tasks=[cpt_tasks]'",
    ]
    rows = [json.loads(line) for line in (tmp_path / "out" / "law.jsonl").read_text().splitlines()]
    assert [row["id"] for row in rows] == [f"law-test-{number}" for number in range(5)]
    assert yaml.safe_load((tmp_path / "out" / "_all.yaml").read_text())["task"] == ["cpt_law"]


def test_tasks_without_choices_are_told(small_gpt2, tasks, tmp_path):
    plan = make_plan(
        small_gpt2("domains=tasks", f"domains.root={tasks}", "domains.choices=none", "model.length=64")
    )
    with pytest.raises(ValueError, match="no task of food, law has choices, which the harness is to rank"):
        export(plan, tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ([], "cpt: nothing is given; needed: a folder to write to"),
        (["domains=tasks"], "cpt: domains=tasks is given; needed: a folder to write to"),
        (["out", "model=tiny_gpt2"], "cpt: domains=installed_docs asks nothing; allowed: domains=tasks"),
        (["out", "domains=task"], "cpt: domains=task is not known; did you mean tasks?"),
        (["out", "domains=tasks", "answers.mots=5"], "cpt: answers.mots is not known; did you mean"),
    ],
)
def test_what_is_wrong_is_one_line(given, told, capsys):
    with pytest.raises(SystemExit):
        main(given)
    said = capsys.readouterr().err
    assert said.startswith(told) and said.count("\n") == 1
