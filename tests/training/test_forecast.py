"""What a run is said to cost, beside what it costs."""

import hashlib
import json
import logging
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from cpt.training.forecast.live import Live, bytes_of
from cpt.training.forecast.outlook import BEFORE, go_on
from cpt.training.forecast.table import aligned, duration, few
from lightning.pytorch.callbacks import Callback
from omegaconf import DictConfig
from torch import nn

from cpt.core.config import identity, plain_config
from cpt.core.naming import name_run
from cpt.evaluation.scores import Scores
from cpt.training.run_folder import RunFolder
from tests.conftest import ROOT, SMALL, VOCABULARIES, sentences
from tests.runs.test_parts_on_disk import mapped
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
def foretold(start, capsys) -> Callable[[DictConfig, Path], dict]:
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


@pytest.mark.parametrize("method", run_few(METHODS, ["ncl", "joint", "ewc", "demix"]))
def test_what_a_method_stores_is_foretold_for_every_stage(start, long, foretold, tmp_path, method):
    said = foretold(long(f"method={method}"), tmp_path / "said")
    start(long(f"method={method}", "keep_stages=true"), tmp_path / "done")
    done = Scores.load(tmp_path / "done" / "scores.json")
    stages = said["stages"][1:]
    assert [each["stage"] for each in said["stages"]] == done.rows
    # Of stages beyond the third Lifelong-MoE's shape is tried alone, not the 20 bytes that it notes after.
    noted = {"lifelong_moe": 20}.get(method, 0)
    for number, (each, stored) in enumerate(zip(stages, done.stored[1:], strict=True), start=1):
        assert each["stored"] + noted * max(0, number - 3) == stored
    if not stages:
        return
    assert said["trained_parameters"] == max(done.trained)
    assert said["memory"]["first"]["gradients"] == 4 * done.trained[1]  # of parameters in 32 bits
    assert [each["tokens"] for each in stages] == pytest.approx(done.seen[1:], rel=0.05)
    assert said["memory"]["last"]["peak"] == pytest.approx(max(done.memory), rel=0.15)
    files = sorted((tmp_path / "done" / "stages").glob("*.pt"))
    sizes = [path.stat().st_size for path in files]
    assert said["disk"]["stage files, all (keep_stages=true)"] == pytest.approx(
        sum(sizes), rel=0.03
    )  # names within a file
    documents = sum(path.stat().st_size for path in (tmp_path / "done" / "documents").iterdir())
    assert said["disk"]["losses by document"] == pytest.approx(documents, rel=0.05)


@pytest.mark.parametrize(
    "given",
    run_few(
        [
            ["optim.carry=moments", "schedule=wsd", "schedule.decay=0.5"],
            ["method=joint", "optim.carry=moments"],
            ["method=ewc", "mask=migu", "replay=past", "replay.memory=8"],
            ["method=olora", "method.stored=pairs", "trainer.accumulate_grad_batches=2"],
            ["method=lora", "method.per_domain=true", "trainer.precision=bf16-mixed"],
            ["method=hat", "method.form=adapter", "freeze.layers=1"],
            ["method=derpp", "optim=sgd"],
        ],
        [["method=ewc", "mask=migu", "replay=past", "replay.memory=8"]],
    ),
    ids=lambda given: " ".join(given),
)
def test_what_is_laid_over_a_method_is_in_it(start, long, foretold, tmp_path, given):
    said = foretold(long(*given), tmp_path / "said")
    start(long(*given), tmp_path / "done")
    done = Scores.load(tmp_path / "done" / "scores.json")
    assert [each["stored"] for each in said["stages"][1:]] == done.stored[1:]
    assert said["trained_parameters"] == max(done.trained)
    assert said["step_seconds"] > 0 and said["disk"]["checkpoint, while learning"] > 0


KEPT = ["demix", "lora method.per_domain=true", "prompt", "hat", "olora"]


@pytest.mark.parametrize("method", run_few(KEPT, ["demix"]))
def test_parts_that_lie_in_a_file_are_not_in_memory(start, long, foretold, killing, tmp_path, method):
    class Held(Callback):
        def on_train_batch_end(self, trainer, module, *args):
            inside = {id(each) for each in module.model.buffers()}
            for each in (buffer for buffer in module.buffers() if id(buffer) not in inside):
                where = held[-1] if trainer.global_step == 2 else {}
                where[mapped(each)] = where.get(mapped(each), 0) + each.nbytes

        def on_train_start(self, *args):
            held.append({})

    held: list[dict[bool, int]] = []
    given = [*f"method={method}".split(), "parts.keep=disk"]
    said = foretold(long(*given), tmp_path / "said")
    killing(Held())
    start(long(*given), tmp_path / "done")
    first, last = held[0], held[-1]
    assert len(held) == 5 and last[True] > 0 and True not in first
    assert said["memory"]["first"]["state"] == first[False]
    assert said["memory"]["last"]["state"] == last[False] < first[False] + 100  # of demix: which, how near
    assert said["mapped"] == {"first": 0, "last": last[True]}
    grown = said["grows_by_domain"]
    # O-LoRA's term asks for the pairs' A of all domains: while it learns they are in memory, and foretold.
    memory = grown["stored"] if method == "olora" else 0
    assert memory <= grown["memory"] < memory + 100 and grown["stored"] * 4 >= last[True] > 2000
    done = Scores.load(tmp_path / "done" / "scores.json")
    assert [each["stored"] for each in said["stages"][1:]] == done.stored[1:]
    assert said["memory"]["last"]["peak"] + last[True] == pytest.approx(max(done.memory), rel=0.15)


def test_the_stage_before_lies_on_disk_until_the_last_is_committed(
    start, long, foretold, tmp_path, monkeypatch
):
    there, tidy = [], RunFolder.tidy

    def watched(self, *args, **options):
        there.append(sum(path.stat().st_size for path in (self.path / "stages").glob("*")))
        tidy(self, *args, **options)

    said = foretold(long("method=demix"), tmp_path / "said")["disk"]
    monkeypatch.setattr(RunFolder, "tidy", watched)
    start(long("method=demix"), tmp_path / "done")
    both, alone = (said[name] for name in (BEFORE, "stage files, the last alone"))
    assert both == pytest.approx(max(there), rel=0.03) and 1.5 * alone < both < 2 * alone
    assert foretold(long("order=[law]"), tmp_path / "one")["disk"][BEFORE] == 0


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


def test_nothing_is_left_behind_and_no_base_is_made(start, small, foretold, tmp_path):
    cfg = small(THREE, f"cache_dir={tmp_path / 'cache'}")
    said = foretold(cfg, tmp_path / "run")
    assert said["state"] == "new" and said["seconds"]["base model"] > 0 and said["seconds"]["looks"] == 0
    assert not (tmp_path / "run").exists() and not (tmp_path / "cache" / "base").exists()
    cfg.plan = False
    start(cfg, tmp_path / "run")
    before = contents(tmp_path)
    assert foretold(small(THREE, f"cache_dir={tmp_path / 'cache'}"), tmp_path / "run")["left"] == "nothing"
    assert foretold(cfg, tmp_path / "other")["seconds"]["base model"] == 0
    assert {name: each for name, each in contents(tmp_path).items() if ".lock" not in name} == {
        name: each for name, each in before.items() if ".lock" not in name
    }
    watched = foretold(small(THREE, f"cache_dir={tmp_path / 'cache'}", "monitor.every=2"), tmp_path / "other")
    assert watched["seconds"]["looks"] > 0


def test_cells_are_counted_as_they_are_measured(start, small, foretold, tmp_path):
    few_cells = [THREE, "eval.rows=last", "eval.columns=near:1", "eval.tokens=64"]
    said = foretold(small(*few_cells), tmp_path / "run")
    start(small(*few_cells), tmp_path / "run")
    done = Scores.load(tmp_path / "run" / "scores.json")
    scored = dict(zip(done.domains, done.scored, strict=True))
    for number, each in enumerate(said["stages"]):
        measured = done.measured(number)
        assert each["scored_texts"] == len(measured)
        assert each["scored_tokens"] == sum(scored[text] for text in measured)
    assert said["scored_tokens"]["full_matrix"] > said["scored_tokens"]["scored_tokens"]
    whole = foretold(small(THREE), tmp_path / "whole")["scored_tokens"]
    assert whole["full_matrix"] == whole["scored_tokens"] == said["scored_tokens"]["full_matrix"]


def test_what_is_left_of_a_run_that_was_killed_or_is_to_have_more(start, small, foretold, killing, tmp_path):
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
    said = foretold(small(THREE, *seen), tmp_path / "run")
    assert contents(tmp_path / "run") == before
    assert said["state"] == "unfinished, 2 rows done, the last: law"
    steps = {name: steps for name, (steps, _) in left(said).items()}
    assert steps == {"base": 0, "law": 0, "food": 2, "space": 6}  # a checkpoint after 4 of 6 steps
    assert left(said)["law"][1] == 0 < left(said)["food"][1]
    start(small(THREE, *seen), tmp_path / "run")
    wider = left(foretold(small(THREE, "keep_stages=true"), tmp_path / "run"))
    assert wider["law"][1] > wider["food"][1] > wider["base"][1] == wider["space"][1] == 0
    assert not any(steps for steps, _ in wider.values())


def test_a_run_that_goes_on_from_another_has_its_last_domains_left(start, small, foretold, tmp_path):
    start(small("order=[law,food]"), tmp_path / "two")
    said = foretold(small(THREE), tmp_path / "three")
    assert str(tmp_path / "two") in said["state"] and not (tmp_path / "three").exists()
    assert [steps for steps, _ in left(said).values()] == [0, 0, 0, 6]
    joint = foretold(small(THREE, "method=joint"), tmp_path / "joint")
    assert joint["state"] == "new"


def test_a_folder_of_another_config_is_refused(start, small, foretold, tmp_path):
    start(small("order=[law]"), tmp_path / "run")
    with pytest.raises(ValueError, match=r"made with another config \(seed: 0 -> 1\)"):
        foretold(small("order=[law]", "seed=1"), tmp_path / "run")
    with pytest.raises(ValueError, match="order=.* means other domains"):
        foretold(small("order=[food]"), tmp_path / "run")
    assert (tmp_path / "run" / "scores.json").exists()


def test_more_processes_share_the_work(small, foretold, tmp_path):
    alone = foretold(small("order=[law]"), tmp_path / "one")
    both = foretold(small("order=[law]", "strategy=ddp", "trainer.devices=2"), tmp_path / "two")
    assert both["processes"] == 2 and both["stages"][1]["tokens"] == alone["stages"][1]["tokens"]
    memory = both["memory"]["last"]
    assert memory["buckets"] == memory["gradients"] == alone["memory"]["last"]["gradients"]
    assert alone["memory"]["last"]["buckets"] == 0


def test_what_is_shared_out_is_divided_by_the_processes(small, foretold, tmp_path):
    how = ["order=[law,food]", "method=ewc", "trainer.devices=4"]
    alone = foretold(small(*how[:2]), tmp_path / "one")["memory"]["last"]
    four = foretold(small(*how, "strategy=fsdp"), tmp_path / "four")["memory"]["last"]
    for part in ("weights", "state", "gradients", "optimizer"):
        assert alone[part] > 100_000 and four[part] == pytest.approx(alone[part] / 4, rel=0.01), part
    assert four["buckets"] == 0 < four["gathered"] < alone["weights"] * 2
    pairs = [
        foretold(small(*how[:1], "method=lora", *each), tmp_path / str(len(each)))["memory"]["last"]
        for each in ([], [how[2], "strategy=fsdp"])
    ]
    assert pairs[0]["gradients"] == pairs[1]["gradients"] and pairs[0]["optimizer"] == pairs[1]["optimizer"]


def test_processes_of_one_run_are_refused(small, tmp_path, monkeypatch):
    from cpt.run import run

    for rank in ("0", "1"):
        monkeypatch.setenv("LOCAL_RANK", rank)
        with pytest.raises(ValueError, match="plan=true is made by one process"):
            run(small("plan=true"), folder=tmp_path / "run")


@pytest.mark.slow
def test_the_command_prints_tables_and_leaves_no_folder(corpora, tmp_path):
    given = ["domains=texts", f"domains.root={corpora}", f"cache_dir={tmp_path / 'cache'}", *SMALL]
    command = [sys.executable, str(ROOT / "run.py"), *given]
    ended = subprocess.run([*command, "plan=true"], cwd=tmp_path, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    for told in ("tokens to learn from", "optimizer's state", "checkpoint, while learning", "an estimate: "):
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


def test_live_tensors_are_counted_until_they_are_freed():
    live = Live(torch.device("cpu"))
    weight = torch.zeros(100)
    live.hold([weight, weight[:10]])
    assert live.now == live.peak == 400
    with live:
        view = weight.view(10, 10)
        one = view + 1
        two = one * 2
        assert live.now == 1200
        del one
        assert live.now == 800
    del two
    assert (live.now, live.peak) == (400, 1200)


def test_the_peak_of_a_step_is_that_of_its_tensors():
    model, live = nn.Linear(50, 40, bias=False), Live(torch.device("cpu"))
    live.hold(model.parameters())
    batch = torch.ones(8, 50)
    with live:
        loss = model(batch).sum()
        loss.backward()
    assert live.now == 2 * 8000 + 4 <= live.peak < 2 * 8000 + 3 * 8 * 40 * 4


def test_bytes_count_once_for_each_storage():
    weight = torch.zeros(100)
    assert bytes_of([weight, weight[:50], torch.zeros(5), torch.zeros(0)]) == 420


@pytest.mark.parametrize(
    "values, number, value",
    [
        *[([1000, 2000, 3004], 4, 4012), ([1000, 2000, 3004], 6, 6040), ([0, 900, 2000], 4, 3100)],
        ([3, 5, 9], 1, 3),
        ([3, 5, 9], 3, 9),
        ([3, 5, 9], 236, 9 + 233 * 4),
        ([3, 5], 9, 5),
        ([], 4, 0),
    ],
)
def test_what_was_seen_goes_on_in_a_line(values, number, value):
    assert go_on(values, number) == value


def test_the_columns_stand_in_line_and_of_many_rows_the_ends_are_shown():
    rows = [[f"d{number}", str(number)] for number in range(236)]
    shown = few(rows)
    assert len(shown) == 7 and shown[3][0] == "… 230 more" and shown[-1] == rows[-1]
    told = [*aligned([["text", "tokens"], *shown])]
    assert len({len(line) for line in told if "more" not in line}) == 1
    assert [duration(each) for each in (1, 600, 90000)] == ["1.0 s", "10.0 min", "25.0 h"]
