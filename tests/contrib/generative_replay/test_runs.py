"""Replay of text that the model writes: the same whoever writes it and whenever, and no past text is read."""

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


def assert_same(expected_run: Path, run: Path) -> None:
    assert matrix(expected_run) == matrix(run) and written_texts(expected_run) == written_texts(run)
    assert equal_tensors(load_model_weights(expected_run), load_model_weights(run))


def written_texts(folder: Path) -> dict[str, list]:
    paths = sorted(folder.glob("generated/*/*.arrow"))
    return {f"{path.parent.name}/{path.stem}": Dataset.from_file(str(path)).to_list() for path in paths}


@pytest.fixture
def blocks(monkeypatch):
    """Counts the blocks that are written, and dies in the one with the number `blocks["deadly"]`."""
    write_block = TextWriter.write_block
    counts = Counter()

    def counted(*arguments, **options):
        counts["written"] += 1
        if counts["written"] == counts["deadly"]:
            raise KilledError
        return write_block(*arguments, **options)

    monkeypatch.setattr(TextWriter, "write_block", counted)
    return counts


def test_the_mixture_is_that_of_real_text(start, small_gpt2, tmp_path, monkeypatch):
    """The rows of past domains are other ones; which domain a row is of, and the rows of the new one, are not."""
    getitem = TrainStream.__getitem__
    batches = {}  # of one run, by its domain and step

    def record_batch(stream, step):
        batch = getitem(stream, step)
        if stream.names[0] == "general":  # of the base, which the first test that needs it pre-trains
            return batch
        parts, rows, _ = stream.locate_step(step)
        rows_of_new_domain = rows[parts < len(stream.names)].tolist()
        batches[stream.names[0], step] = (batch["domains"].tolist(), rows_of_new_domain)
        return batch

    monkeypatch.setattr(TrainStream, "__getitem__", record_batch)
    start(small_gpt2(THREE, "replay=past", "replay.past_ratio=0.5", "replay.mode=append"), tmp_path / "past")
    batches_of_real_text = dict(batches)
    batches.clear()
    start(small_gpt2(THREE, *FEW, "replay.mode=append"), tmp_path / "generated")
    assert len(batches) == 3 * 6 and batches == batches_of_real_text


@pytest.fixture
def texts_read(monkeypatch):
    domains_read = defaultdict(set)
    sequences = []
    entered = DomainSequence.enter
    ids = Packed.ids

    def enter(data, domain):
        sequences.append(data)
        entered(data, domain)

    def record_ids(text, rows):
        if sequences:
            data = sequences[-1]
            for texts in (data.train, getattr(data.replay_source, "written_forms", {})):
                domains_read[data.domain.name] |= {name for name, packed in texts.items() if packed is text}
        return ids(text, rows)

    monkeypatch.setattr(DomainSequence, "enter", enter)
    monkeypatch.setattr(Packed, "ids", record_ids)
    return domains_read


def test_no_past_text_is_read_to_replay_it(start, small_gpt2, tmp_path, texts_read):
    start(small_gpt2(TWO, "replay=past"), tmp_path / "past")
    assert texts_read["food"] == {"law", "food"}  # so that the test can fail
    texts_read.clear()
    start(small_gpt2(TWO, *FEW), tmp_path / "generated")
    assert texts_read["law"] == {"law", "food"}  # of food where it begins, when its turn comes
    assert texts_read["food"] == {"food"}
    stored_prompts = json.loads((tmp_path / "generated/generated/kept/law.json").read_text())["kept"]
    assert len(stored_prompts) <= 5 and {len(ids) for ids in stored_prompts} == {3}


def test_a_run_killed_while_it_writes_resumes_with_the_same_bits(
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
    num_blocks = blocks["written"] + 2  # what was whole is not written again

    shutil.copytree(tmp_path / "killed", tmp_path / "cut")
    path = tmp_path / "cut/generated/002-food/law.arrow"
    path.write_bytes(path.read_bytes()[:-40])

    for name, anew in (("killed", False), ("cut", True)):
        blocks["written"] = 0
        start(small_gpt2(TWO, *FEW), tmp_path / name)
        assert blocks["written"] == num_blocks * anew
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
    texts_of_one = written_texts(tmp_path / "one" / "run")
    texts_of_two = written_texts(tmp_path / "two" / "run")
    # The first written texts come before any sum over processes can differ.
    assert texts_of_one["002-food/law"] == texts_of_two["002-food/law"]
    assert texts_of_one.keys() == texts_of_two.keys() and texts_of_one == texts_of_two
    matrix_of_one = np.array(matrix(tmp_path / "one" / "run"))
    matrix_of_two = np.array(matrix(tmp_path / "two" / "run"))
    np.testing.assert_allclose(matrix_of_one, matrix_of_two, atol=1e-4)


def test_verify_reads_generated_texts_and_a_run_needs_its_kept_ones_to_continue(start, small_gpt2, tmp_path):
    options = [*FEW, "replay.general_ratio=0.25"]  # what stands for the general text is written by the base
    start(small_gpt2(TWO, *options), tmp_path / "run")
    assert written_texts(tmp_path / "run").keys() == {"001-law/general", "002-food/general", "002-food/law"}
    assert verify.main([str(tmp_path / "run")]) == 0
    texts = tmp_path / "run/generated/002-food/law.jsonl"
    text_bytes = texts.read_bytes()
    texts.write_text("")
    assert verify.main([str(tmp_path / "run")]) == 1
    texts.write_bytes(text_bytes)
    (tmp_path / "run/generated/kept/law.json").unlink()
    with pytest.raises(ValueError, match=r"kept/law.json is missing; restore it from a backup, or"):
        start(small_gpt2(THREE, *options, f"extend={tmp_path / 'run'}"), tmp_path / "longer")


EXAMPLES = ["replay=generated", "replay.past_ratio=0.25", "replay.forms=0.25", "replay.batch_size=4"]
EXAMPLES += ["answers=none"]


@pytest.fixture
def gifted(monkeypatch):
    """Has every model write examples, of each block the second with a wrong answer and the third without an
    end; gives the contexts."""
    decoded_contexts = []
    before = writer.TextWriter.prepare

    def prepared(text_writer, *arguments, **options):
        def written_by_hand(model, contexts, uniforms, *, sampling):
            samples = []
            for index, context in enumerate(contexts):
                decoded_contexts.append(text_writer.tokenizer.decode(context, skip_special_tokens=True))
                number = round(float(uniforms[index, 0]) * 1e6)
                answer = "wide" if index == 1 else "short"
                text = f"Options: short\nevidence {number}\nAnswer: __ans__ {answer}"
                ids = text_writer.tokenizer(text, add_special_tokens=False)["input_ids"]
                if index != 2:
                    ids = [*ids, sampling.end]
                samples.append((ids, float(index)))
            return samples

        monkeypatch.setattr(writer, "sample_texts", written_by_hand)
        return before(text_writer, *arguments, **options)

    monkeypatch.setattr(writer.TextWriter, "prepare", prepared)
    return decoded_contexts


def test_valid_examples_are_replayed_and_learned_to_be_written_again(
    start, small_t5, tmp_path, gifted, texts_read, monkeypatch
):
    tasks = write_tasks(tmp_path, ("law", "food", "space"), train=60, test=20, size=(3, 6))
    data_options = ["domains=tasks", f"domains.root={tasks}", "model.max_seq_length=160"]
    getitem = TrainStream.__getitem__
    rows = defaultdict(list)
    streams = {}

    def record_batch(stream, number):
        rows[stream.names[0]] += stream.locate_step(number)[0].tolist()
        streams[stream.names[0]] = stream
        return getitem(stream, number)

    monkeypatch.setattr(TrainStream, "__getitem__", record_batch)
    start(small_t5(*data_options, *EXAMPLES, THREE, "replay.max_tokens=400"), tmp_path / "run")
    assert [texts_read[name] for name in ("law", "food", "space")] == [{"law"}, {"food"}, {"space"}]
    facts = json.loads((tmp_path / "run/generated/003-space/facts.json").read_text())
    assert set(facts) == {"law", "food"} and all(task_facts["texts"] > 0 for task_facts in facts.values())
    assert all(task_facts["tokens"] <= 400 and task_facts["invalid"] > 0 for task_facts in facts.values())
    assert {context.strip() for context in gifted} == {"An example of law:", "An example of food:"}
    of_law = written_texts(tmp_path / "run")["003-space/law"]
    assert len(of_law) == 2 * facts["law"]["texts"]
    for question_row, form in zip(
        of_law[::2], of_law[1::2], strict=True
    ):  # the form has all of it as its answer
        begin = question_row["answers"].index(1) - 1  # before it an end of the encoder's text
        answer_ids = form["ids"][form["answers"].index(1) :]
        assert answer_ids[:begin] == question_row["ids"][:begin]
        assert answer_ids[-5:] == question_row["ids"][-5:]
    assert json.loads((tmp_path / "run/generated/kept/law.json").read_text())["kept"] == ["short"]
    # A quarter of past tasks, a quarter of forms of its own: exact over the stage's 6 steps of 8.
    assert np.bincount(rows["space"], minlength=4).tolist() == [24, 6, 6, 12]
    assert [type(text) for text in streams["space"].texts] == [TokenizedTask] * 4
    assert np.bincount(rows["law"]).tolist() == [36, 12]
