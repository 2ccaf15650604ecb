"""Replay of text that the model writes: the same whoever writes it and whenever, and no past text is read."""

import itertools
import json
import shutil
from collections import Counter, defaultdict
from pathlib import Path

import numpy as np
import pytest
from datasets import Dataset

from cpt import verify
from cpt.contrib.generative_replay import writer
from cpt.contrib.generative_replay.writer import TextWriter
from cpt.data.datamodule import DomainSequence
from cpt.data.packing import Packed
from cpt.data.sampler import TrainStream
from cpt.data.tokenized_tasks import TokenizedTask
from cpt.evaluation.scores import Scores
from tests.conftest import SMALL_GPT2
from tests.runs.test_distributed import DDP, launch
from tests.support.kill_callback import KilledError, Killer
from tests.support.method_fixtures import equal_tensors, load_model_weights
from tests.support.task_fixtures import write_tasks

THREE, TWO = "order=[law,food,space]", "order=[law,food]"
FEW = ["replay=generated", "replay.past_ratio=0.5", "replay.prefix=3", "replay.starts=5"]
FEW += ["replay.batch_size=2"]


def matrix(folder: Path) -> list:
    return Scores.load(folder / "scores.json").nll


def assert_same(one: Path, other: Path) -> None:
    assert matrix(one) == matrix(other) and written(one) == written(other)
    assert equal_tensors(load_model_weights(one), load_model_weights(other))


def written(folder: Path) -> dict[str, list]:
    found = sorted(folder.glob("generated/*/*.arrow"))
    return {f"{path.parent.name}/{path.stem}": Dataset.from_file(str(path)).to_list() for path in found}


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


def test_the_mixture_is_that_of_real_text(start, small_gpt2, tmp_path, monkeypatch):
    made, seen = TrainStream.__getitem__, {}

    def noted(stream, number):
        batch, (parts, rows, _) = made(stream, number), stream.locate_step(number)
        new = rows[parts < len(stream.names)].tolist()
        seen[name, stream.names[0], number] = (batch["domains"].tolist(), new)
        return batch

    monkeypatch.setattr(TrainStream, "__getitem__", noted)
    for name, mixture in (("past", ["replay=past", "replay.past_ratio=0.5"]), ("generated", FEW)):
        start(small_gpt2(THREE, *mixture, "replay.mode=append"), tmp_path / name)
    for domain, step in itertools.product(("law", "food", "space"), range(6)):
        assert seen["generated", domain, step] == seen["past", domain, step]


@pytest.fixture
def read(monkeypatch):
    found, sequences = defaultdict(set), []
    entered, table = DomainSequence.enter, Packed.table

    def enter(data, domain):
        sequences.append(data)
        entered(data, domain)

    def noted(text, *arguments):
        if sequences:
            data = sequences[-1]
            for texts in (data.train, getattr(data.replay_source, "forms", {})):
                found[data.domain.name] |= {name for name, each in texts.items() if each is text}
        return table(text, *arguments)

    monkeypatch.setattr(DomainSequence, "enter", enter)
    monkeypatch.setattr(Packed, "table", noted)
    return found


def test_no_past_text_is_read_to_replay_it(start, small_gpt2, tmp_path, read):
    start(small_gpt2(TWO, "replay=past"), tmp_path / "past")
    assert read["food"] == {"law", "food"}  # so that the test can fail
    read.clear()
    start(small_gpt2(TWO, *FEW), tmp_path / "generated")
    assert read["law"] == {"law", "food"}  # of food where it begins, when its turn comes
    assert read["food"] == {"food"}
    kept = json.loads((tmp_path / "generated/generated/kept/law.json").read_text())["kept"]
    assert len(kept) <= 5 and {len(ids) for ids in kept} == {3}


def test_a_run_killed_while_it_writes_goes_on_with_the_same_bits(
    start, small_gpt2, tmp_path, blocks, killing, caplog
):
    start(small_gpt2(TWO, *FEW, "replay.batch_size=64"), tmp_path / "whole")
    blocks["written"], blocks["deadly"] = 0, 3
    with pytest.raises(KilledError):
        start(small_gpt2(TWO, *FEW), tmp_path / "killed")
    assert (tmp_path / "killed/generated/002-food.partial").is_dir()
    blocks["written"], blocks["deadly"] = 0, 0
    killing(Killer(step=3, domain="food"))
    with pytest.raises(KilledError):
        start(small_gpt2(TWO, *FEW), tmp_path / "killed")
    killing(None)
    every = blocks["written"] + 2  # what was whole is not written again
    shutil.copytree(tmp_path / "killed", tmp_path / "cut")
    path = tmp_path / "cut/generated/002-food/law.arrow"
    path.write_bytes(path.read_bytes()[:-40])
    for name, anew in (("killed", False), ("cut", True)):
        blocks["written"] = 0
        start(small_gpt2(TWO, *FEW), tmp_path / name)
        assert blocks["written"] == every * anew
        assert anew == ("002-food, which is damaged (law.arrow" in caplog.text)
        assert_same(tmp_path / "whole", tmp_path / name)
        assert not list((tmp_path / name).glob("generated/*.partial"))


def test_an_extended_run_writes_for_the_new_stage_alone(start, small_gpt2, tmp_path, blocks):
    start(small_gpt2(THREE, *FEW, "save_all_stages=true"), tmp_path / "whole")
    total = blocks["written"]
    start(small_gpt2(TWO, *FEW, "save_all_stages=true"), tmp_path / "two")
    extend = f"extend={tmp_path / 'two'}"
    start(small_gpt2(THREE, *FEW, "save_all_stages=true", extend), tmp_path / "three")
    assert blocks["written"] == 2 * total
    assert_same(tmp_path / "whole", tmp_path / "three")


def test_two_processes_write_what_one_writes(corpora, cache, tmp_path):
    command = [*SMALL_GPT2, "domains=texts", f"domains.root={corpora}", f"cache_dir={cache}", THREE, *FEW]
    for name, strategy in (("one", []), ("two", DDP)):
        (tmp_path / name).mkdir()
        code = launch(tmp_path / name, tmp_path / name / "out", *command, *strategy)
        assert code == 0, (tmp_path / name / "out" / "log").read_text()
    here, there = written(tmp_path / "one" / "run"), written(tmp_path / "two" / "run")
    assert here["002-food/law"] == there["002-food/law"]  # before any sum over processes can differ
    assert here.keys() == there.keys() and here == there
    one, two = (np.array(matrix(tmp_path / name / "run")) for name in ("one", "two"))
    np.testing.assert_allclose(one, two, atol=1e-4)


def test_a_finished_run_is_read_through_and_needs_its_beginnings_to_go_on(start, small_gpt2, tmp_path):
    given = [*FEW, "replay.general_ratio=0.25"]  # what stands for the general text is written by the base
    start(small_gpt2(TWO, *given), tmp_path / "run")
    assert written(tmp_path / "run").keys() == {"001-law/general", "002-food/general", "002-food/law"}
    assert verify.main([str(tmp_path / "run")]) == 0
    texts = tmp_path / "run/generated/002-food/law.jsonl"
    whole = texts.read_bytes()
    texts.write_text("")
    assert verify.main([str(tmp_path / "run")]) == 1
    texts.write_bytes(whole)
    (tmp_path / "run/generated/kept/law.json").unlink()
    with pytest.raises(ValueError, match=r"kept/law.json is missing; restore it from a backup, or"):
        start(small_gpt2(THREE, *given), tmp_path / "run")


EXAMPLES = ["replay=generated", "replay.past_ratio=0.25", "replay.forms=0.25", "replay.batch_size=4"]
EXAMPLES += ["answers=none"]


@pytest.fixture
def gifted(monkeypatch):
    """Has every model write examples, of each block the second with a wrong answer and the third without an
    end; gives the contexts."""
    seen, before = [], writer.TextWriter.prepare

    def prepared(made, *arguments, **options):
        def written_by_hand(model, contexts, uniforms, *, sampling):
            found = []
            for place, context in enumerate(contexts):
                seen.append(made.tokenizer.decode(context, skip_special_tokens=True))
                text = f"Options: short\nevidence {round(float(uniforms[place, 0]) * 1e6)}\nAnswer: __ans__ "
                ids = made.tokenizer(text + ("wide" if place == 1 else "short"), add_special_tokens=False)
                found.append(([*ids["input_ids"], *[sampling.end] * (place != 2)], float(place)))
            return found

        monkeypatch.setattr(writer, "sample_texts", written_by_hand)
        return before(made, *arguments, **options)

    monkeypatch.setattr(writer.TextWriter, "prepare", prepared)
    return seen


def test_valid_examples_are_replayed_and_learned_to_be_written_again(
    start, small_t5, tmp_path, gifted, read, monkeypatch
):
    tasks = write_tasks(tmp_path, ("law", "food", "space"), train=60, test=20, size=(3, 6))
    places = ["domains=tasks", f"domains.root={tasks}", "model.max_seq_length=160"]
    made, rows, streams = TrainStream.__getitem__, defaultdict(list), {}

    def noted(stream, number):
        rows[stream.names[0]] += stream.locate_step(number)[0].tolist()
        streams[stream.names[0]] = stream
        return made(stream, number)

    monkeypatch.setattr(TrainStream, "__getitem__", noted)
    start(small_t5(*places, *EXAMPLES, THREE, "replay.max_tokens=400"), tmp_path / "run")
    assert [read[name] for name in ("law", "food", "space")] == [{"law"}, {"food"}, {"space"}]
    told = json.loads((tmp_path / "run/generated/003-space/facts.json").read_text())
    assert set(told) == {"law", "food"} and all(each["texts"] > 0 for each in told.values())
    assert all(each["tokens"] <= 400 and each["invalid"] > 0 for each in told.values())
    assert {context.strip() for context in gifted} == {"An example of law:", "An example of food:"}
    of_law = written(tmp_path / "run")["003-space/law"]
    assert len(of_law) == 2 * told["law"]["texts"]
    for asked, form in zip(of_law[::2], of_law[1::2], strict=True):  # the form has all of it as its answer
        begin = asked["answers"].index(1) - 1  # before it an end of the encoder's text
        whole = form["ids"][form["answers"].index(1) :]
        assert whole[:begin] == asked["ids"][:begin] and whole[-5:] == asked["ids"][-5:]
    assert json.loads((tmp_path / "run/generated/kept/law.json").read_text())["kept"] == ["short"]
    # A quarter of past tasks, a quarter of forms of its own: exact over the stage's 6 steps of 8.
    assert np.bincount(rows["space"], minlength=4).tolist() == [24, 6, 6, 12]
    assert [type(text) for text in streams["space"].texts] == [TokenizedTask] * 4
    assert np.bincount(rows["law"]).tolist() == [36, 12]
