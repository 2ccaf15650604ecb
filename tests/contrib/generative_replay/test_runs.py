"""Replay of text that the model writes: the same whoever writes it and whenever, and no past text is read."""

import json
import logging
import shutil
from collections import Counter, defaultdict
from pathlib import Path

import numpy as np
import pytest
import torch
from datasets import Dataset

from cpt.contrib.generative_replay.writer import TextWriter
from cpt.data.datamodule import DomainSequence
from cpt.data.packing import Packed
from cpt.data.sampler import TrainStream
from cpt.evaluation.scores import Scores
from tests.conftest import SMALL_GPT2
from tests.runs.test_distributed import DDP, launch
from tests.support.campaign import run_few
from tests.support.killing import KilledError, Killer

THREE, TWO = "order=[law,food,space]", "order=[law,food]"
FEW = ["replay=generated", "replay.past=0.5", "replay.prefix=3", "replay.starts=5", "replay.batch_size=2"]


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return torch.load(sorted((folder / "stages").glob("*.pt"))[-1], weights_only=True)


def assert_same(one: Path, other: Path) -> None:
    assert matrix(one) == matrix(other)
    here, there = weights(one), weights(other)
    assert here.keys() == there.keys() and all(torch.equal(here[name], there[name]) for name in here)
    assert written(one) == written(other)


def matrix(folder: Path) -> list:
    return Scores.load(folder / "scores.json").nll


def written(folder: Path) -> dict[str, list]:
    """What is replayed before each stage, by file: every row."""
    found = sorted(folder.glob("generated/*/*.arrow"))
    return {f"{path.parent.name}/{path.stem}": Dataset.from_file(str(path)).to_list() for path in found}


def facts(folder: Path, stage: str) -> dict:
    return json.loads((folder / "generated" / stage / "facts.json").read_text())


@pytest.fixture
def blocks(monkeypatch):
    """Counts the blocks that are written, and dies in the one with the number `blocks["deadly"]`."""
    made, counts = TextWriter.write_block, Counter()

    def counted(*arguments, **options):
        counts["written"] += 1
        if counts["written"] == counts["deadly"]:
            raise KilledError
        return made(*arguments, **options)

    monkeypatch.setattr(TextWriter, "write_block", counted)
    return counts


# --- the mixture


def test_without_a_share_it_is_ncl_and_nothing_is_written(start, small_gpt2, tmp_path, caplog):
    start(small_gpt2(THREE), tmp_path / "ncl")
    with caplog.at_level(logging.INFO):
        start(small_gpt2(THREE, "replay=generated", "replay.past=0"), tmp_path / "none")
    assert_same(tmp_path / "ncl", tmp_path / "none")
    assert not list(tmp_path.glob("none/generated/0*"))
    assert "replay=generated without effect: no stage has a past domain or a share to replay" in caplog.text
    start(small_gpt2(THREE, *FEW), tmp_path / "some")
    assert matrix(tmp_path / "some")[2] != matrix(tmp_path / "ncl")[2]
    assert matrix(tmp_path / "some")[1] == matrix(tmp_path / "ncl")[1]  # nothing is past yet


@pytest.mark.parametrize("given", [[], ["replay.adds=true"], ["replay.general=0.2", "replay.past=0.3"]])
def test_the_mixture_is_that_of_real_text(start, small_gpt2, tmp_path, monkeypatch, given):
    """Whose sample stands where in which step, and which new samples there are."""
    made, seen = TrainStream.__getitem__, defaultdict(list)
    monkeypatch.setattr(
        TrainStream, "__getitem__", lambda stream, number: noted(made(stream, number), stream, number)
    )

    def noted(batch, stream, number):
        parts, rows, _ = stream.samples(number)
        new = rows[parts < len(stream.names)].tolist()
        seen[now[0], stream.names[0]].append((batch["domains"].tolist(), new))
        return batch

    now = [""]
    for name, mixture in (("past", ["replay=past", "replay.past=0.5"]), ("generated", FEW)):
        now[0] = name
        start(small_gpt2(THREE, *mixture, *given), tmp_path / name)
    for domain in ("law", "food", "space"):
        assert seen["generated", domain] == seen["past", domain]
    drawn = Counter(each for domains, _ in seen["generated", "space"] for each in domains)
    assert min(drawn[0], drawn[1]) > 0 and abs(drawn[0] - drawn[1]) <= 1


def test_no_past_text_is_read_to_replay_it(start, small_gpt2, tmp_path, monkeypatch):
    read, sequences = defaultdict(set), []
    entered, table = DomainSequence.enter, Packed.table

    def enter(data, domain):
        sequences.append(data)
        entered(data, domain)

    def noted(text, *arguments):
        if sequences:
            data = sequences[-1]
            read[now[0], data.domain.name] |= {name for name, each in data.train.items() if each is text}
        return table(text, *arguments)

    now = [""]
    monkeypatch.setattr(DomainSequence, "enter", enter)
    monkeypatch.setattr(Packed, "table", noted)
    for name, mixture in (("past", ["replay=past"]), ("generated", FEW)):
        now[0], sequences[:] = name, []
        start(small_gpt2(THREE, *mixture), tmp_path / name)
    assert read["past", "space"] == {"law", "food", "space"}  # so that the test can fail
    assert read["generated", "law"] == {"law", "food"}  # of food where it begins, when its turn comes
    assert read["generated", "food"] == {"food", "space"}
    assert read["generated", "space"] == {"space"}
    kept = json.loads((tmp_path / "generated/generated/kept/law.json").read_text())["kept"]
    assert len(kept) <= 5 and {len(ids) for ids in kept} == {3}


# --- what is written


def test_the_budget_and_the_filter(start, small_gpt2, tmp_path):
    start(small_gpt2(THREE, *FEW, "replay.tokens=40", "replay.drop=0.5"), tmp_path)
    for stage in ("002-food", "003-space"):
        for text, told in facts(tmp_path, stage).items():
            lines = [
                json.loads(line)
                for line in (tmp_path / "generated" / stage / f"{text}.jsonl").read_text().splitlines()
            ]
            rows = written(tmp_path)[f"{stage}/{text}"]
            assert sum(len(row["ids"]) for row in rows) == told["tokens"] == 40
            assert told["nll"] < told["nll_left_out"] and told["left_out"] > 0
            kept = sorted(lines, key=lambda line: line["nll"])[: told["texts"]]
            held = [each for row in rows for each in row["ids"]]
            assert {tuple(line["ids"][:2]) for line in kept} >= {tuple(held[:2])}
            assert told["real"] == 3 * told["texts"]
    report = (tmp_path / "report.md").read_text()
    assert "## Generated text" in report and "| space | food |" in report


@pytest.mark.parametrize("size", [1, 7, 64])
def test_how_many_are_written_at_once_does_not_matter(start, small_gpt2, tmp_path, size):
    for name, given in (("two", []), ("other", [f"replay.batch_size={size}"])):
        start(small_gpt2(THREE, *FEW, "replay.drop=0.2", *given), tmp_path / name)
    assert_same(tmp_path / "two", tmp_path / "other")


def test_a_prompt_comes_first_and_is_not_replayed(start, small_gpt2, tmp_path, monkeypatch):
    seen, made = [], TextWriter.write_block

    def noted(generation, model, task, *arguments, **options):
        seen.append((task, generation.tokenizer))
        return made(generation, model, task, *arguments, **options)

    monkeypatch.setattr(TextWriter, "write_block", noted)
    start(small_gpt2(TWO, *FEW, "replay.prompt='on {domain}:'", "model.length=24"), tmp_path)
    task, tokenizer = seen[0]
    told = tokenizer("on law:", add_special_tokens=False)["input_ids"]
    begin = [tokenizer.bos_token_id]
    assert all(context[:-3] == [*begin, *told] for context in task.contexts)
    rows = written(tmp_path)["002-food/law"]
    assert all(row["ids"][: len(told)] != told for row in rows)
    assert any(row["ids"][:3] in [context[-3:] for context in task.contexts] for row in rows)


def test_what_stands_for_the_general_text_is_written_by_the_base(start, small_gpt2, tmp_path):
    start(small_gpt2(TWO, *FEW, "replay.past=0.0", "replay.general=0.5"), tmp_path)
    assert written(tmp_path).keys() == {"001-law/general", "002-food/general"}


def test_the_time_of_writing_is_not_in_the_plan(start, small_gpt2, tmp_path, capsys):
    start(small_gpt2(THREE, *FEW, "plan=json"), tmp_path / "run")
    said = json.loads(capsys.readouterr().out)
    assert "generated text" in said["not_included"] and not (tmp_path / "run").exists()


# --- killed, damaged, grown, shared out


def test_a_run_killed_while_it_writes_goes_on_with_the_same_bits(start, small_gpt2, tmp_path, blocks):
    start(small_gpt2(THREE, *FEW), tmp_path / "whole")
    total = blocks["written"]
    blocks["written"], blocks["deadly"] = 0, total - 3
    with pytest.raises(KilledError):
        start(small_gpt2(THREE, *FEW), tmp_path / "killed")
    assert (tmp_path / "killed/generated/003-space.partial").is_dir()
    blocks["written"], blocks["deadly"] = 0, 0
    start(small_gpt2(THREE, *FEW), tmp_path / "killed")
    assert blocks["written"] == 4  # what was whole is not written again
    assert_same(tmp_path / "whole", tmp_path / "killed")
    assert not list(tmp_path.glob("killed/generated/*.partial"))


def test_a_run_killed_in_a_stage_replays_what_was_written(start, small_gpt2, tmp_path, killing, blocks):
    start(small_gpt2(TWO, *FEW), tmp_path / "whole")
    killing(Killer(step=3, domain="food"))
    with pytest.raises(KilledError):
        start(small_gpt2(TWO, *FEW), tmp_path / "killed")
    killing(None)
    blocks["written"] = 0
    start(small_gpt2(TWO, *FEW), tmp_path / "killed")
    assert blocks["written"] == 0
    assert_same(tmp_path / "whole", tmp_path / "killed")


@pytest.mark.parametrize("damage", [lambda path: path.write_bytes(path.read_bytes()[:-40]), Path.unlink])
def test_what_is_damaged_is_written_again_alike(start, small_gpt2, tmp_path, killing, caplog, damage):
    start(small_gpt2(TWO, *FEW), tmp_path / "whole")
    killing(Killer(step=3, domain="food"))
    with pytest.raises(KilledError):
        start(small_gpt2(TWO, *FEW), tmp_path / "killed")
    killing(None)
    damage(tmp_path / "killed/generated/002-food/law.arrow")
    start(small_gpt2(TWO, *FEW), tmp_path / "killed")
    assert "002-food is damaged (law.arrow" in caplog.text
    assert_same(tmp_path / "whole", tmp_path / "killed")


@pytest.mark.adopts
def test_a_run_that_grows_writes_for_the_new_stage_alone(start, small_gpt2, tmp_path, blocks):
    start(small_gpt2(THREE, *FEW, "keep_stages=true"), tmp_path / "apart" / "whole")
    total = blocks["written"]
    start(small_gpt2(TWO, *FEW, "keep_stages=true"), tmp_path / "two")
    start(small_gpt2(THREE, *FEW, "keep_stages=true"), tmp_path / "three")
    assert blocks["written"] == 2 * total
    assert_same(tmp_path / "apart" / "whole", tmp_path / "three")


def test_without_its_beginnings_a_run_does_not_go_on(start, small_gpt2, tmp_path):
    start(small_gpt2(TWO, *FEW), tmp_path)
    (tmp_path / "generated/kept/law.json").unlink()
    with pytest.raises(ValueError, match=r"kept/law.json is gone; bring it back from a copy, or"):
        start(small_gpt2(THREE, *FEW), tmp_path)


def test_two_processes_write_what_one_writes(corpora, cache, tmp_path):
    command = [*SMALL_GPT2, "domains=texts", f"domains.root={corpora}", f"cache_dir={cache}", THREE, *FEW]
    for name, strategy in (("one", []), ("two", DDP)):
        (tmp_path / name).mkdir()
        code = launch(tmp_path / name, tmp_path / name / "out", *command, *strategy)
        assert code == 0, (tmp_path / name / "out" / "log").read_text()
    here, there = written(tmp_path / "one" / "run"), written(tmp_path / "two" / "run")
    assert here["002-food/law"] == there["002-food/law"]  # before any sum over processes can differ
    assert here.keys() == there.keys() and here == there
    np.testing.assert_allclose(
        np.array(matrix(tmp_path / "one" / "run")), matrix(tmp_path / "two" / "run"), atol=1e-4
    )


@pytest.mark.parametrize(
    "given",
    run_few(
        [
            ["method=demix", "routing@method.routing=posterior"],
            ["method=lora", "method.per_domain=true", "parts.keep=disk"],
            ["method=prompt", "method.tokens=3"],
            ["method=adapter", "trainer.offload=true"],
            ["method=kd", "mask=migu"],
            ["method=replay", "replay@method.mixture=generated", "replay=none"],
        ],
        [["method=demix", "routing@method.routing=posterior"]],
    ),
    ids=" ".join,
)
def test_it_goes_with_methods_of_every_kind(start, small_gpt2, tmp_path, given):
    mixture = [each.replace("replay.", "method.mixture.") for each in FEW[1:]]
    few = mixture if "replay=none" in given else FEW
    start(small_gpt2(THREE, *few, *given), tmp_path)
    assert len(written(tmp_path)) == 3


def test_rows_of_every_length_are_learned_as_they_are(start, small_gpt2, tmp_path, monkeypatch):
    """No row is longer than what was written: padding is no text."""
    seen, made = [], TrainStream.__getitem__

    def noted(stream, number):
        batch = made(stream, number)
        texts = stream.texts.values() if isinstance(stream.texts, dict) else stream.texts
        seen.extend(int(np.median(each.row_lengths)) for each in texts)
        present = batch.get("attention_mask", torch.ones_like(batch["input_ids"]))
        parts, rows, _ = stream.samples(number)
        sizes = [stream.texts[part].row_lengths[row] for part, row in zip(parts, rows, strict=True)]
        assert present.sum(1).tolist() == sizes
        return batch

    monkeypatch.setattr(TrainStream, "__getitem__", noted)
    start(small_gpt2(TWO, *FEW, "replay.prompt=here"), tmp_path)
    assert min(seen) < 16


def test_a_finished_run_is_read_through(start, small_gpt2, tmp_path, capsys):
    from cpt import verify

    start(small_gpt2(TWO, *FEW), tmp_path / "run")
    assert verify.main([str(tmp_path / "run")]) == 0
    copy = tmp_path / "copy"
    shutil.copytree(tmp_path / "run", copy)
    (copy / "generated/kept/law.json").write_text("{}")
    (copy / "generated/002-food/law.jsonl").write_text("")
    assert verify.main([str(copy)]) == 1
    told = capsys.readouterr().out
    assert "law.jsonl has 0 bytes" in told and "law.json is damaged" in told
