"""Tasks measured by the lm-evaluation-harness itself, on small models in memory, offline."""

import random
import socket
from copy import deepcopy

import datasets
import numpy as np
import pytest
import torch
from torch import log_softmax

pytest.importorskip("lm_eval", reason="the extra: pip install -e '.[lm-eval]'")

from cpt.core import hub_access
from cpt.evaluation.lm_eval import HFLM, Harness
from cpt.models.loading import train_tokenizer
from tests.conftest import VOCABULARIES
from tests.support import endtask_fixtures
from tests.support.harness_tasks import GENERATION, make_options, make_rows, write_choice_task, write_task

COUNT = 40
pytestmark = pytest.mark.slow  # the harness takes eight seconds to be read in


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    tasks_folder = write_choice_task(tmp_path_factory.mktemp("tasks"), count=COUNT)
    return write_task(tasks_folder, "say_word", count=6, kind="generate_until", answer=GENERATION)


@pytest.fixture(scope="module")
def words():
    return train_tokenizer(iter([" ".join(VOCABULARIES.values())] * 5), vocabulary=400, objective="causal")


@pytest.fixture
def model(words):
    """Its weights are large, so that its answers differ."""
    model = endtask_fixtures.model("gpt2", words, dropout=0.1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(8)
    return model


def harness(folder, *tasks, **options):
    return Harness(make_options(*tasks, include=str(folder), **options))


def rank_choices(model, words, text, choices):
    scores = []
    for choice in choices:
        before, text_ids = words([text, f"{text} {choice}"], add_special_tokens=False)["input_ids"]
        logits = model(torch.tensor([text_ids])).logits[0]
        positions = range(len(before), len(text_ids))
        scores.append(sum(log_softmax(logits[at - 1], -1)[text_ids[at]].item() for at in positions))
    return int(np.argmax(scores))


@torch.no_grad()
def test_accuracy_is_that_of_the_likeliest_choice_with_the_tokenizer_of_a_masked_model(folder, model):
    words = endtask_fixtures.tokenizer()
    assert words("a")["input_ids"][-1] == words.eos_token_id
    measurement = harness(folder, "next_word", max_documents=0.5).measure(
        "next_word", model, words, step=list
    )
    model.eval()
    rows = make_rows(count=COUNT, seed=0)[: COUNT // 2]
    ranked = [rank_choices(model, words, row["text"], row["choices"]) for row in rows]
    right = [choice == row["label"] for choice, row in zip(ranked, rows, strict=True)]
    acc = measurement["metrics"]["acc"]
    assert acc["value"] == pytest.approx(np.mean(right)) and 0 < np.mean(right) < 1
    assert acc["error"] == pytest.approx(np.std(right, ddof=1) / len(rows) ** 0.5)
    assert acc["higher"] and list(measurement["metrics"]) == ["acc", "acc_norm"]
    assert {
        "chance": 0.25,
        "examples": COUNT // 2,
        "shots": 0,
        "version": "3.0",
    }.items() <= measurement.items()


@pytest.mark.parametrize("shots", [0, 2])
def test_the_model_is_asked_after_as_many_examples_as_there_are_shots(
    shots, folder, model, words, monkeypatch
):
    prompts = []
    loglikelihood = HFLM.loglikelihood

    def note_prompts(lm, requests, **options):
        prompts.extend(request.args[0] for request in requests)
        return loglikelihood(lm, requests, **options)

    monkeypatch.setattr(HFLM, "loglikelihood", note_prompts)
    harness(folder, "next_word", shots=shots).measure("next_word", model, words, step=list)
    assert {prompt.count("\n\n") for prompt in prompts} == {shots}


def test_weights_generators_and_tokenizer_stay_and_nothing_is_said(folder, model, words, capfd):
    tested_harness = harness(folder, "next_word", "say_word", shots=2)
    words = deepcopy(words)
    words.pad_token = None  # the harness looks for another
    model.train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    entries = len(words)

    def draw():
        return random.random(), np.random.rand(), torch.rand(1).item()

    states = []
    for names in ((), ("next_word", "say_word", "next_word")):
        random.seed(5), np.random.seed(5), torch.manual_seed(5)
        measurements = [tested_harness.measure(name, model, words, step=list) for name in names]
        states.append(draw())
    assert states[0] == states[1] and all(part.training for part in model.modules())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert (len(words), words.pad_token) == (entries, None)
    assert measurements[0] == measurements[2], "the same shots are drawn each time"
    assert measurements[0]["shots"] == 2
    assert measurements[1]["metrics"].keys() == {"exact_match"} and measurements[1]["chance"] is None
    assert capfd.readouterr() == ("", "")


def test_a_data_set_of_the_hub_without_a_network_is_refused_at_once(folder, tmp_path, monkeypatch):
    def fail(host, port):
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", fail)
    monkeypatch.setattr(hub_access.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(hub_access, "getproxies", dict)
    load = datasets.load_dataset
    loaded_paths = []

    def note_load(path, *arguments, **options):
        loaded_paths.append(path)
        if path == "json":
            return load(path, *arguments, **options)
        raise OSError("asked")

    monkeypatch.setattr(datasets, "load_dataset", note_load)
    text = (folder / "next_word.yaml").read_text()
    begin = text.index("dataset_kwargs")
    end = text.index("test_split")
    on_hub = text[:begin] + text[end:]
    for name, path in (("far_word", "nobody/words"), ("old_word", "words")):
        changed = on_hub.replace("task: next_word", f"task: {name}")
        (tmp_path / f"{name}.yaml").write_text(changed.replace("dataset_path: json", f"dataset_path: {path}"))
        reason = "no such folder, and not loaded from the Hub: huggingface.co has no address here; bring its"
        message = f"^benchmark.tasks={name} is invalid: its data set {path}: {reason}"
        with pytest.raises(ValueError, match=message):
            harness(tmp_path, name)
    assert not loaded_paths

    # What is in the cache is left to the client, and files are read without the Hub.
    with monkeypatch.context() as cached, pytest.raises(ValueError, match="is invalid: asked; bring its"):
        cached.setattr(hub_access, "is_in_hub_cache", lambda name, kind: True)
        harness(tmp_path, "far_word")
    harness(folder, "next_word")
    assert loaded_paths == ["nobody/words", "json"] and datasets.load_dataset is note_load


def test_what_decides_a_number_is_in_its_digest(folder, tmp_path):
    plain = harness(folder, "next_word").digest("next_word")
    assert harness(folder, "next_word", batch_size=1, when="each").digest("next_word") == plain
    changed_settings = [{"shots": 1}, {"max_documents": 3}, {"max_length": 9}]
    digests = {harness(folder, "next_word", **settings).digest("next_word") for settings in changed_settings}
    changed = harness(write_choice_task(tmp_path, count=COUNT - 1), "next_word").digest("next_word")
    assert len(digests | {plain, changed}) == 5
