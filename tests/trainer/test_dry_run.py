"""What plan=true and plan=json say a run will cost, compared with the run."""

import hashlib
import json
import logging
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from lightning.pytorch.callbacks import Callback
from omegaconf import DictConfig

from cpt.core.config import identity, plain_config
from cpt.core.naming import name_run
from cpt.evaluation.scores import Scores
from cpt.trainer.dry_run import format_table
from tests.conftest import ROOT, SMALL, VOCABULARIES, sentences
from tests.support.campaign import run_few

METHODS = sorted(path.stem for path in (ROOT / "conf" / "method").glob("*.yaml"))
DOMAINS = ["law", "food", "space", "tax", "sea"]  # two more stages than are tried
ORDER = f"order=[{','.join(DOMAINS)}]"
FEW = ["trainer.steps=2", "eval.rows=last", "eval.columns=seen", "eval.tokens=64"]


@pytest.fixture(scope="module")
def five(tmp_path_factory) -> Path:
    """Five domains and general text."""
    root, words = tmp_path_factory.mktemp("five"), list(VOCABULARIES.values())
    for seed, name in enumerate(["general", *DOMAINS]):
        (root / name).mkdir()
        lines = sentences(words[seed % len(words)], count=60, seed=seed)
        (root / name / "all.txt").write_text("\n".join(lines) + "\n")
    return root


@pytest.fixture
def long(composed: Callable[..., DictConfig], five: Path, cache: Path) -> Callable[..., DictConfig]:
    """The config of a small run of five domains."""
    places = ["domains=texts", f"domains.root={five}", f"cache_dir={cache}", ORDER]
    return lambda *overrides: composed(*places, *SMALL, *FEW, *overrides)


@pytest.fixture
def planned(start, capsys) -> Callable[[DictConfig, Path], dict]:
    """What plan=json prints."""

    def tell(cfg: DictConfig, folder: Path) -> dict:
        capsys.readouterr()
        folder.mkdir(exist_ok=True)  # as Hydra does
        cfg.plan = "json"
        level = logging.getLogger("cpt").level
        start(cfg, folder)
        assert logging.getLogger("cpt").level == level  # what is told later is told
        return json.loads(capsys.readouterr().out)

    return tell


GROWING = {"elle", "lifelong_moe", "sapt"}  # what they add differs from stage to stage


@pytest.mark.parametrize("method", run_few(METHODS, ["ncl", "joint", "ewc", "demix"]))
def test_bytes_steps_and_tokens_are_those_of_the_run(start, long, planned, tmp_path, method):
    said = planned(long(f"method={method}"), tmp_path / "said")
    start(long(f"method={method}", "keep_stages=true"), tmp_path / "done")
    done = Scores.load(tmp_path / "done" / "scores.json")
    assert [each["stage"] for each in said["stages"]] == done.rows
    stored = [each["stored"] for each in said["stages"]]
    assert stored[:4] == done.stored[:4]  # of the stages that were profiled
    assert all(
        low == now or method in GROWING and low < now for low, now in zip(stored, done.stored, strict=True)
    )
    assert said["lower_bound"] == (method in ("elle", "lifelong_moe"))
    if len(done.rows) == 1:
        return
    assert said["memory"]["first"]["gradients"] == 4 * done.trained[1]  # of parameters in 32 bits
    assert [each["tokens"] for each in said["stages"][1:]] == pytest.approx(done.seen[1:], rel=0.05)
    assert said["memory"]["last"]["peak"] == pytest.approx(max(done.memory), rel=0.15)
    files = sum(path.stat().st_size for path in (tmp_path / "done" / "stages").glob("*.pt"))
    expected = said["disk"]["all stage files (keep_stages=true)"]
    assert expected == pytest.approx(files, rel=0.03) or (said["lower_bound"] and expected < files)
    documents = sum(path.stat().st_size for path in (tmp_path / "done" / "documents").iterdir())
    assert said["disk"]["losses by document"] == pytest.approx(documents, rel=0.05)
    assert all(said["seconds"][kind] > 0 for kind in ("training", "checkpoints", "evaluation"))


@pytest.mark.parametrize(
    "given",
    run_few(
        [
            ["optim.carry=moments", "schedule=wsd", "schedule.decay=0.5"],
            ["method=ewc", "mask=migu", "replay=past", "replay.memory=8"],
            ["method=das", "method.contrast_every=3"],
            ["method=lora", "method.per_domain=true", "trainer.precision=bf16-mixed", "parts.keep=disk"],
            ["method=derpp", "optim=sgd", "trainer.accumulate_grad_batches=2"],
        ],
        [["method=ewc", "mask=migu", "replay=past", "replay.memory=8"]],
    ),
    ids=lambda given: " ".join(given),
)
def test_options_of_all_methods_are_profiled(start, long, planned, tmp_path, given):
    said = planned(long(*given), tmp_path / "said")
    start(long(*given), tmp_path / "done")
    done = Scores.load(tmp_path / "done" / "scores.json")
    assert [each["stored"] for each in said["stages"]] == done.stored
    assert said["trained_parameters"] == max(done.trained) and said["step_seconds"] > 0


THREE = "order=[law,food,space]"


def contents(folder: Path) -> dict[str, str]:
    """A hash of each file below a folder, and its time."""
    return {
        str(
            path.relative_to(folder)
        ): f"{hashlib.sha256(path.read_bytes()).hexdigest()} {path.stat().st_mtime_ns}"
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def left(said: dict) -> dict[str, tuple[int, int]]:
    """Steps and scored tokens that are left, by stage."""
    return {each["stage"]: (each["left_steps"], each["left_scored_tokens"]) for each in said["stages"]}


def test_nothing_is_left_behind_and_no_base_is_made(start, small, planned, tmp_path):
    cfg = small(THREE, f"cache_dir={tmp_path / 'cache'}")
    said = planned(cfg, tmp_path / "run")
    assert said["state"] == "new" and said["not_included"] == ["training of the base model"]
    assert not (tmp_path / "run").exists() and not (tmp_path / "cache" / "base").exists()
    cfg.plan = False
    start(cfg, tmp_path / "run")
    before = contents(tmp_path)
    assert planned(small(THREE, f"cache_dir={tmp_path / 'cache'}"), tmp_path / "run")["left"] == "nothing"
    assert planned(cfg, tmp_path / "other")["not_included"] == []
    assert {name: each for name, each in contents(tmp_path).items() if ".lock" not in name} == {
        name: each for name, each in before.items() if ".lock" not in name
    }


def test_cells_are_counted_as_they_are_measured(start, small, planned, tmp_path):
    few_cells = [THREE, "eval.rows=last", "eval.columns=near:1", "eval.tokens=64"]
    said = planned(small(*few_cells), tmp_path / "run")
    start(small(*few_cells), tmp_path / "run")
    done = Scores.load(tmp_path / "run" / "scores.json")
    scored = dict(zip(done.domains, done.scored, strict=True))
    for number, each in enumerate(said["stages"]):
        measured = done.measured(number)
        assert each["scored_texts"] == len(measured)
        assert each["scored_tokens"] == sum(scored[text] for text in measured)


def test_what_is_left_of_a_run_that_was_killed_or_is_to_have_more(start, small, planned, killing, tmp_path):
    class Dies(Callback):
        def on_train_batch_end(self, trainer, module, *args):
            if module.domain.name == "food" and trainer.global_step == 5:
                raise KeyboardInterrupt

    seen = ["eval.columns=seen", "keep_stages=true"]
    killing(Dies())
    with pytest.raises((KeyboardInterrupt, SystemExit)):
        start(small(THREE, *seen), tmp_path / "run")
    killing(None)
    before = contents(tmp_path / "run")
    said = planned(small(THREE, *seen), tmp_path / "run")
    assert contents(tmp_path / "run") == before
    assert said["state"] == "unfinished, 2 rows done, the last: law"
    steps = {name: steps for name, (steps, _) in left(said).items()}
    assert steps == {"base": 0, "law": 0, "food": 2, "space": 6}  # a checkpoint after 4 of 6 steps
    assert left(said)["law"][1] == 0 < left(said)["food"][1]
    start(small(THREE, *seen), tmp_path / "run")
    wider = left(planned(small(THREE, "keep_stages=true"), tmp_path / "run"))
    assert wider["law"][1] > wider["food"][1] > wider["base"][1] == wider["space"][1] == 0
    assert not any(steps for steps, _ in wider.values())


def test_a_run_that_goes_on_from_another_has_its_last_domains_left(start, small, planned, tmp_path):
    start(small("order=[law,food]"), tmp_path / "two")
    said = planned(small(THREE), tmp_path / "three")
    assert str(tmp_path / "two") in said["state"] and not (tmp_path / "three").exists()
    assert [steps for steps, _ in left(said).values()] == [0, 0, 0, 6]
    joint = planned(small(THREE, "method=joint"), tmp_path / "joint")
    assert joint["state"] == "new"


def test_a_folder_of_another_config_is_refused(start, small, planned, tmp_path):
    start(small("order=[law]"), tmp_path / "run")
    with pytest.raises(ValueError, match=r"made with another config \(seed: 0 -> 1\)"):
        planned(small("order=[law]", "seed=1"), tmp_path / "run")
    with pytest.raises(ValueError, match="order=.* means other domains"):
        planned(small("order=[food]"), tmp_path / "run")
    assert (tmp_path / "run" / "scores.json").exists()


def test_more_processes_share_the_work(small, planned, tmp_path):
    alone = planned(small("order=[law]"), tmp_path / "one")
    both = planned(small("order=[law]", "strategy=ddp", "trainer.devices=2"), tmp_path / "two")
    assert both["processes"] == 2 and both["stages"][1]["tokens"] == alone["stages"][1]["tokens"]
    memory = both["memory"]["last"]
    assert memory["gradient buckets"] == memory["gradients"] == alone["memory"]["last"]["gradients"]
    shared = planned(small("order=[law]", "strategy=fsdp", "trainer.devices=2"), tmp_path / "fsdp")
    assert shared["memory"]["last"]["weights"] == alone["memory"]["last"]["weights"] // 2
    assert alone["memory"]["last"]["gradient buckets"] == shared["memory"]["last"]["gradient buckets"] == 0


def test_processes_of_one_run_are_refused(small, tmp_path, monkeypatch):
    from cpt.train import train

    for rank in ("0", "1"):
        monkeypatch.setenv("LOCAL_RANK", rank)
        with pytest.raises(ValueError, match="plan=true is made by one process"):
            train(small("plan=true"), run_dir=tmp_path / "run")


@pytest.mark.slow
def test_the_command_prints_tables_and_leaves_no_folder(corpora, tmp_path):
    given = ["domains=texts", f"domains.root={corpora}", f"cache_dir={tmp_path / 'cache'}", *SMALL]
    command = [sys.executable, str(ROOT / "run.py"), *given]
    ended = subprocess.run([*command, "plan=true"], cwd=tmp_path, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    for told in ("train_tokens", "optimizer state", "checkpoint while training", "time left: total"):
        assert told in ended.stdout
    assert [path for path in (tmp_path / "outputs").rglob("*") if path.is_file()] == []
    assert not list((tmp_path / "outputs" / "default").iterdir())
    swept = subprocess.run([*command, "plan=true", "-m"], cwd=tmp_path, capture_output=True, text=True)
    assert swept.returncode == 1 and "plan=true is of one run; allowed: without --multirun" in swept.stderr


def test_it_is_no_part_of_a_runs_identity_or_name(composed):
    plain, planned = (plain_config(composed(*given)) for given in ([], ["plan=true"]))
    plain.pop("hydra", None), planned.pop("hydra", None)
    assert identity(plain) == identity(planned)
    assert name_run(["plan=true", "method=ewc"], "ewc", 0, 0) == name_run(["method=ewc"], "ewc", 0, 0)


def test_of_many_stages_the_first_and_last_are_shown():
    row = {"steps": 2, "left_steps": 2, "tokens": 9, "scored_texts": 1, "scored_tokens": 1}
    run = dict.fromkeys(("folder", "method", "mask", "replay", "model", "seed"), "x")
    texts = [{"text": f"d{number}", "train_tokens": 1000 * number} for number in range(236)]
    stages = [{"stage": f"d{number}", **row} for number in range(236)]
    said = {"run": run, "state": "new", "processes": 1, "device": "cpu", "texts": texts, "stages": stages}
    told = format_table(said)
    assert len(told.splitlines()) < 30 and "235,000" in told and "27,730,000" in told and "d100" not in told
    assert "nothing is left to train or to evaluate" in told
