"""The command line: one program under three names, and what it says of what Hydra cannot compose."""

import json
import os
import signal
import subprocess
import sys

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser

from cpt import __version__
from cpt.cli import check_assignments, check_command_line, check_flags, keep_text, to_hydra
from cpt.core.output import UNREAD
from tests.conftest import ROOT
from tests.support.forked_scripts import run_script
from tests.support.wrong_options import is_refused

pytestmark = pytest.mark.slow
CANNOT = {  # and the choice or option that is meant
    "method=unheard_of": "",
    "+unknown=1": "",
    "trainer.setps=5": "trainer.steps",
    "trainer.learning_rate=1e-4": "optim.lr",
    "--seed=1": "",
    "+=x": "",
    "-m seed=0,1 mask=migu,mgui": "migu",
    "-m method.routing=last,first method=hat": "",
    "--config-dir=mine method=mine": "",
    "+trainer.steps=3": "",
    "~trainer.steps=3": "",
    "~method=ewc": "",
    "--unknown --options": "",
    "--unknown method=?": "",
    "+hydra.job.name=x": "",
    "method=[ncl,ewc]": "",
    "-m trainer.steps=2 hydra.job.chdir=false,true": "",
    "trainer.steps=range(2,4)": "",
    "--config-name=mine": "",
    "--config-path=mine": "",
    "hydra.run.dir=\\${seed}": "",
}
SAID = {  # what is allowed instead, in the words of the command line
    "+trainer.steps=3": "Allowed: trainer.steps=3, without +",
    "method=[ncl,ewc]": "Allowed: method=ncl, -m method=ncl,ewc for a run of each",
    "--config-name=mine": "Allowed: config, which is the default",
    "hydra.run.dir=\\${seed}": "hydra.run.dir=${seed} is invalid: ${…} in it would be replaced once more",
}


def call(*arguments, cwd, program=(str(ROOT / "run.py"),), stdout=subprocess.PIPE):
    """The process of a command that has ended, with what it wrote."""
    command = [sys.executable, *program, *arguments]
    return subprocess.run(
        command, cwd=cwd, stdout=stdout, stderr=subprocess.PIPE, encoding="utf-8", timeout=120
    )


@pytest.mark.parametrize("arguments", CANNOT)
def test_what_cannot_be_composed_is_reported_in_one_line_and_leaves_nothing(arguments, tmp_path):
    (tmp_path / "mine/method").mkdir(parents=True)
    (tmp_path / "mine/method/mine.yaml").write_text("name: mine\n_target_: [\n")
    process = run_script(ROOT / "run.py", *arguments.split(), cwd=tmp_path)
    message = process.stderr
    assert (process.returncode, process.stdout, len(message.splitlines())) == (1, "", 1), message
    if arguments.startswith("--config-dir"):  # the message of PyYAML with the file and line
        assert "mine.yaml" in message and "line 3" in message
    else:
        assert is_refused(arguments, message.removeprefix("cpt: ").strip()), message
        assert SAID.get(arguments, "") in message
        assert (f". Did you mean {CANNOT[arguments]}? Allowed: " in message) == bool(CANNOT[arguments])
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


def test_a_question_mark_describes_all_choices_of_a_group(tmp_path):
    (tmp_path / "mine/method").mkdir(parents=True)
    (tmp_path / "mine/method/mine.yaml").write_text("# @package method\n# Of my own,\n# tried once. More.\n")
    process = run_script(ROOT / "run.py", "--config-dir=mine", "method=?", cwd=tmp_path)
    lines = dict(line.split(maxsplit=1) for line in process.stdout.splitlines())
    assert lines.keys() == {path.stem for path in (ROOT / "conf/method").glob("*.yaml")} | {"mine"}
    assert lines["mine"] == "Of my own, tried once."
    assert lines["none"] == "No training: evaluates the base model (zero-shot)."
    assert (process.returncode, process.stderr) == (0, "")
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


def test_routing_is_asked_for_by_the_name_of_its_option_and_what_is_no_group_is_refused(tmp_path):
    process = run_script(ROOT / "run.py", "method.routing=?", cwd=tmp_path)
    assert process.stdout.startswith("domain ") and process.returncode == 0
    process = run_script(ROOT / "run.py", "seed=?", cwd=tmp_path)
    assert process.returncode == 1 and "seed is no group of choices. Allowed: answers, " in process.stderr


def test_the_program_has_the_same_config_under_both_names(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    by_path = call("seed=3", "--cfg", "all", cwd=tmp_path)
    by_name = call("--cfg=all", "seed=3", cwd=tmp_path, program=["-m", "cpt"])
    assert by_path.returncode == by_name.returncode == 0
    assert by_path.stdout == by_name.stdout and "seed: 3" in by_name.stdout and "name: run" in by_name.stdout

    process = call("--help", cwd=tmp_path)
    assert process.returncode == 0 and "Groups (group=choice):" in process.stdout
    # All groups but those within others, the trainer and Hydra's own; and commands of an installed package.
    words = process.stdout.split("Groups (group=choice):")[1].split()
    groups = {path.name for path in (ROOT / "conf").iterdir() if path.is_dir()}
    assert groups - set(words) == {"hydra", "routing", "trainer"}
    assert "\n  cpt -m method=" in process.stdout
    assert call("--version", cwd=tmp_path).stdout == f"cpt {__version__}\n"


def test_a_list_of_launchers_is_no_sweep_over_them():
    with pytest.raises(ValueError, match="one choice of hydra/launcher. Allowed: hydra/launcher=processes$"):
        check_command_line(["hydra/launcher=[processes,submitit_slurm]"])


def test_a_flag_between_options_is_named():
    with pytest.raises(ValueError, match="^seed=1 is invalid: a flag is between it and other options"):
        check_flags(["name=a", "-m", "seed=1"])
    assert check_flags(["-m", "name=a", "seed=1"]) == check_flags(["name=a", "seed=1", "-m"])


@pytest.mark.parametrize("program", ["cpt", "cpt.status"])
def test_a_removed_working_folder_is_reported(program, tmp_path):
    folder = tmp_path / "gone"
    folder.mkdir()
    line = f"rmdir {folder}; {sys.executable} -m {program} x"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    process = subprocess.run(["sh", "-c", line], cwd=folder, env=environment, capture_output=True, text=True)
    expected = (
        "cpt: the working folder is gone (No such file or directory); run the command in one that exists"
    )
    assert (process.returncode, process.stderr.splitlines()[-1]) == (1, expected)
    assert "Traceback" not in process.stderr


def test_a_working_folder_whose_name_would_be_replaced_is_reported(tmp_path):
    folder = tmp_path / "${now:%Y}"
    folder.mkdir()
    process = call("trainer.steps=1", cwd=folder)
    assert process.returncode == 1 and list(folder.iterdir()) == []
    (line,) = process.stderr.splitlines()
    assert line.startswith(f"cpt: the working folder {folder} is invalid: ${{…}} in it would be replaced")


def test_closed_streams_end_no_program(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.yaml").write_text("name: x\n")
    closed = "<&- >&- 2>&-"
    line = f"{sys.executable} -m cpt.status {tmp_path} {closed}; {sys.executable} -m cpt --version {closed}"
    process = subprocess.run(["bash", "-c", f"set -e; {line}"], cwd=ROOT, capture_output=True, text=True)
    assert (process.returncode, process.stderr) == (0, "")


def test_a_reader_that_leaves_ends_a_program_without_a_traceback(tmp_path):
    reading, writing = os.pipe()
    os.close(reading)
    process = call("method=das", "--options", cwd=tmp_path, stdout=writing)
    os.close(writing)
    assert process.stderr == "" and process.returncode in (UNREAD, 0)  # 0: argparse's own --help


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        ("name=2024_05", "2024_05"), ("name=1e5", "1e5"), ("name=1.50", "1.50"), ("name=12", 12),
        ("name=0x10", "0x10"), ("name=007", "007"), ("name=off", "off"), ("name=2024-05-01", "2024-05-01"),
        ("name=5_0/1e2", "5_0/1e2"), ("order=[2020_01,b,1e3, 12]", ["2020_01", "b", "1e3", 12]),
        ("domains.only=[true,no,1_0]", ["true", "no", "1_0"]), ("+init_from=1_0", "1_0"),
        ("order=0", 0), ("name='1_0'", "1_0"), ("trainer.steps=1_000", 1000), ("trainer.tokens=1e6", 1e6),
        ("name=null", None), ("seed=1_0", 10),
    ],
)  # fmt: skip
def test_names_keep_the_form_in_which_they_are_typed(argument, value):
    quoted = keep_text(argument)
    (override,) = OverridesParser.create().parse_overrides([quoted])
    assert override.value() == value and type(override.value()) is type(value)
    assert keep_text(quoted) == quoted


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["seed", "1"], "seed is invalid: it assigns no value. Allowed: key=value, like seed=1"),
        (["name=a", "seed"], "with spaces in quotes, like 'name=a seed'"),
        (
            ["domains.root=/my", "own", "text", "seed=1"],
            "own is invalid: .* like 'domains.root=/my own text'",
        ),
        (["order=[a,", "b", ",c]"], r"order=\[a, b ,c\] is invalid: .* Allowed: order=\[a,b,c\]"),
    ],
)
def test_an_argument_without_a_value_is_refused_with_what_was_probably_meant(arguments, message):
    with pytest.raises(ValueError, match=f"{message}$"):
        check_assignments(arguments)


def test_arguments_with_values_and_removed_options_are_taken():
    check_assignments(["seed=1", "~optim.betas", "tags=[a, b]", "name="])


@pytest.mark.parametrize(
    ("argument", "expanded"),
    [
        ("domains.root=~/x", "domains.root=/people/me/x"), ("init_from=~", "init_from=/people/me"),
        ("domains.root=~/x,~/y", "domains.root=/people/me/x,/people/me/y"), ("a=[~/x]", "a=[/people/me/x]"),
        ("~optim.betas", "~optim.betas"), ("a=b~/x", "a=b~/x"), ("a=~you/x", "a=~you/x"),
    ],
)  # fmt: skip
def test_a_tilde_is_the_home_folder_where_a_path_begins(argument, expanded, monkeypatch):
    monkeypatch.setenv("HOME", "/people/me")
    assert to_hydra(["run.py", argument]) == ["run.py", expanded]


def test_the_device_of_a_plan_is_also_given_with_a_dot():
    assert to_hydra(["run.py", "plan=true", "plan.device=h100"]) == [
        "run.py",
        "plan=true",
        "plan_device=h100",
    ]


def test_names_in_a_sweep_keep_their_form_too():
    (override,) = OverridesParser.create().parse_overrides([keep_text("name=2024_05,2024_06,b")])
    assert list(override.sweep_string_iterator()) == ["'2024_05'", "'2024_06'", "b"]
    (override,) = OverridesParser.create().parse_overrides([keep_text("order=[1_0],[b]")])
    assert list(override.sweep_string_iterator()) == ["['1_0']", "[b]"]
    assert to_hydra(["run.py", "-m", "name=1_0"]) == ["run.py", "-m", "name='1_0'"]
    assert to_hydra(["run.py", "chats=my/chats.jsonl"]) == ["run.py", "chats.path=my/chats.jsonl"]
    assert to_hydra(["run.py", "chats=none"]) == ["run.py", "chats=none"]
    assert keep_text("name=my 1_0") == "name=my 1_0" and keep_text("--config-dir=1_0") == "--config-dir=1_0"


def test_a_json_plan_is_all_that_is_written_to_standard_output(tmp_path):
    (tmp_path / "texts" / "law").mkdir(parents=True)
    (tmp_path / "texts" / "law" / "all.txt").write_text("A court decides.\n\n" * 50)
    options = ["domains=texts", "domains.root=texts", "order=[law]", "model=tiny_gpt2", "cache_dir=cache"]
    options += ["trainer.steps=2", "plan=json", "plan_device=h100"]
    process = run_script(ROOT / "run.py", *options, cwd=tmp_path)
    assert process.returncode == 0, process.stderr
    assert json.loads(process.stdout)["figures"] == "computed"
    assert "General text: docstrings of Python's standard library" in process.stderr


def test_interrupted_while_it_imports_a_program_ends_in_a_line(tmp_path):
    (tmp_path / "torch.py").write_text("raise KeyboardInterrupt\n")
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}:{ROOT}"}
    program = subprocess.run(
        [sys.executable, "-m", "cpt.write_chats", "model"], env=environment, capture_output=True, text=True
    )
    assert (program.returncode, program.stderr) == (-signal.SIGINT, "cpt: interrupted\n")
