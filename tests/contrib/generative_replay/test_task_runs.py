"""Examples of past tasks that the model writes itself, LFPT5's way of replay: whole runs of both kinds."""

import json
import logging
from collections import defaultdict

import numpy as np
import pytest

from cpt.contrib.generative_replay import writer
from cpt.data.sampler import TrainStream
from cpt.data.tokenized_tasks import TokenizedTask
from tests.contrib.generative_replay.test_runs import (  # noqa: F401
    assert_same,
    blocks,
    facts,
    matrix,
    read,
    written,
)
from tests.support.killing import KilledError, Killer
from tests.support.task_fixtures import write_tasks

THREE, TWO = "order=[law,food,space]", "order=[law,food]"
FEW = ["replay=generated", "replay.past=0.25", "replay.forms=0.25", "replay.batch_size=4", "answers=none"]
LENGTH = 160


@pytest.fixture(scope="module")
def tasks(tmp_path_factory):
    return write_tasks(
        tmp_path_factory.mktemp("tasks"), ("law", "food", "space"), train=60, test=20, size=(3, 6)
    )


@pytest.fixture(params=["causal", "two stacks"])
def config(request, small_gpt2, small_t5, tasks):
    """The config of a run on tasks by a kind of model."""
    made = small_gpt2 if request.param == "causal" else small_t5
    places = ["domains=tasks", f"domains.root={tasks}", f"model.length={LENGTH}"]
    return lambda *overrides: made(*places, *FEW, *overrides)


@pytest.fixture
def gifted(monkeypatch):
    """Has every model write examples, of which the second of each block has a wrong answer and the third no
    end; what the contexts were is in the list that this gives."""
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
    start, config, tmp_path, gifted, monkeypatch, caplog
):
    made, rows, streams = TrainStream.__getitem__, defaultdict(list), {}

    def noted(stream, number):
        rows[stream.names[0]] += stream.samples(number)[0].tolist()
        streams[stream.names[0]] = stream
        return made(stream, number)

    monkeypatch.setattr(TrainStream, "__getitem__", noted)
    with caplog.at_level(logging.INFO):
        start(config(THREE, "replay.tokens=400"), tmp_path)
    told = facts(tmp_path, "003-space")
    assert set(told) == {"law", "food"} and all(each["texts"] > 0 for each in told.values())
    assert all(each["tokens"] <= 400 and each["invalid"] > 0 for each in told.values())
    assert all(f"examples written for {name} are no examples of it" in caplog.text for name in told)
    assert {context.strip() for context in gifted} == {"An example of law:", "An example of food:"}
    assert len(written(tmp_path)["003-space/law"]) == 2 * told["law"]["texts"]
    assert json.loads((tmp_path / "generated/kept/law.json").read_text())["kept"] == ["short"]
    # A quarter of past tasks, a quarter of forms of its own: exact over the stage's 6 steps of 8.
    assert np.bincount(rows["space"], minlength=4).tolist() == [24, 6, 6, 12]
    assert [type(text) for text in streams["space"].texts] == [TokenizedTask] * 4
    assert np.bincount(rows["law"]).tolist() == [36, 12]


def test_without_a_share_it_is_ncl(start, config, tmp_path, caplog):
    start(config(TWO, "replay.past=0"), tmp_path / "none")
    plain = config(TWO)
    plain.replay = {"name": "none", "_target_": None}
    start(plain, tmp_path / "ncl")
    assert_same(tmp_path / "ncl", tmp_path / "none")
    with caplog.at_level(logging.INFO):
        start(config(TWO, "replay.tokens=50"), tmp_path / "some")
    assert matrix(tmp_path / "some")[1] != matrix(tmp_path / "ncl")[1]  # it learns to write at once
    # What has no valid answer is not replayed: a model of six steps writes none.
    assert "examples written for law are no examples of it: nothing of it is replayed" in caplog.text
    assert facts(tmp_path / "some", "002-food")["law"]["texts"] == 0
    assert "| food | law |" in (tmp_path / "some" / "report.md").read_text()


def test_killed_it_goes_on_with_the_same_bits(start, config, tmp_path, gifted, killing, blocks):  # noqa: F811
    start(config(TWO), tmp_path / "whole")
    blocks["written"], blocks["deadly"] = 0, 2
    with pytest.raises(KilledError):
        start(config(TWO), tmp_path / "killed")
    blocks["deadly"] = 0
    killing(Killer(step=3, domain="food"))
    with pytest.raises(KilledError):
        start(config(TWO), tmp_path / "killed")
    killing(None)
    start(config(TWO), tmp_path / "killed")
    assert_same(tmp_path / "whole", tmp_path / "killed")


def test_no_example_of_the_past_is_read(start, config, tmp_path, gifted, read):  # noqa: F811
    start(config(THREE), tmp_path)
    for name in ("law", "food", "space"):
        assert read[name] == {name}


@pytest.mark.parametrize("config", ["causal"], indirect=True)
@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["replay.prompt=Write:"], "replay.prompt=Write: does not say of which domain an example is to be"),
        (["replay.general=0.1"], "replay.general=0.1 with replay=generated and domains of examples, which"),
        (["replay.past=0.6", "replay.forms=0.4"], "replay.past=0.6 and replay.forms=0.4, which leaves 0 new"),
        (["replay.forms=0", f"replay.prompt='{'{domain} ' * 90}'"], "tokens, and model.length=160; allowed"),
    ],
)
def test_what_cannot_be_is_refused(start, config, tmp_path, given, said):
    with pytest.raises(ValueError) as error:
        start(config(TWO, *given), tmp_path / "run")
    assert said in str(error.value) and "\n" not in str(error.value)
