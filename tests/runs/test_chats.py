"""Whole runs on chats: a decoder with a chat template learns the assistant's turns and is asked for them."""

import datetime
import json
import logging
import random
from itertools import product
from types import SimpleNamespace

import pytest
from transformers import AutoConfig, AutoTokenizer

from cpt.trainer import chat_date
from tests.conftest import VOCABULARIES
from tests.runs.reading import answers_of, read_scores
from tests.support.chat_decoder import TEMPLATE, write_checkpoint

DOMAINS = ("food", "law")


def write_chats(root):
    for name, (split, count) in product(DOMAINS, {"train": 60, "test": 10}.items()):
        seed = (10 if name == "law" else 0) + (1 if split == "test" else 0)
        draw = random.Random(seed)
        rows = []
        for number in range(count):
            question_words = draw.choices(VOCABULARIES[name].split(), k=draw.randint(4, 8))
            messages = [
                {"role": "system", "content": f"You know {name}."},
                {"role": "user", "content": f"{' '.join(question_words)} {number}?"},
                {"role": "assistant", "content": f"It is {question_words[0]}."},
            ]
            rows.append(json.dumps({"messages": messages}))
        (root / name).mkdir(parents=True, exist_ok=True)
        (root / name / f"{split}.jsonl").write_text("\n".join(rows))


def test_chats_are_learned_and_answered(composed, corpora, cache, start, tmp_path):
    write_chats(tmp_path / "texts")
    (tmp_path / "texts" / "general").symlink_to(corpora / "general")
    write_checkpoint(tmp_path / "decoder")
    options = [f"domains.root={tmp_path / 'texts'}", f"model.name_or_path={tmp_path / 'decoder'}"]
    options += ["model.max_seq_length=128", "trainer.steps=30", "trainer.batch_size=8", "optim.lr=1e-2"]
    options += [
        "trainer.checkpoint_every_n_steps=4",
        "answers.max_new_tokens=12",
        "chats=none",
        "logger=none",
        f"cache_dir={cache}",
    ]

    start(composed("domains=instructions", "model=hf", *options), tmp_path / "run")
    scores = read_scores(tmp_path / "run")
    assert scores["run"]["finished"] and scores["run"]["objective"] == "causal"
    assert scores["domains"] == [*DOMAINS, "general"]
    assert all(scores["nll"][2][column] < scores["nll"][0][column] - 1 for column in (0, 1))

    answers = scores["answers"]["tasks"]
    files = answers_of(tmp_path / "run")
    assert answers["law"]["measures"]["rouge_l"][-1] > 0.3 > answers["law"]["measures"]["rouge_l"][0]
    last = files["answers/002-law/law.parquet"]
    assert len(files) == 6
    assert sum(row["written"].startswith("It is") and row["written"].endswith(".") for row in last) > 5


DATED = "{{ bos_token }}{{ strftime_now('%d %B %Y') }}\n" + TEMPLATE.removeprefix("{{ bos_token }}")
UNUSABLE = {  # by what is said of them
    "an empty answer": [{"role": "user", "content": "a"}, {"role": "assistant", "content": " "}],
    "a weight that is not 0 or 1": [{"role": "assistant", "content": "b", "weight": 2}],
    "a first turn of the assistant": [{"role": "assistant", "content": "b"}],
}


class LaterDay(datetime.date):
    @classmethod
    def today(cls):
        return cls(2031, 5, 6)


def test_bad_chats_are_counted_and_the_date_stays_that_of_the_first_start(
    composed, corpora, cache, start, tmp_path, monkeypatch, caplog
):
    write_chats(tmp_path / "texts")
    (tmp_path / "texts" / "general").symlink_to(corpora / "general")
    write_checkpoint(tmp_path / "decoder", DATED)
    caplog.set_level(logging.INFO, logger="cpt")
    with (tmp_path / "texts" / "law" / "train.jsonl").open("a") as file:
        for messages in UNUSABLE.values():
            file.write("\n" + json.dumps({"messages": messages}))
    options = [
        f"domains.root={tmp_path / 'texts'}",
        f"model.name_or_path={tmp_path / 'decoder'}",
        "order=[law]",
    ]
    options += [
        "model.max_seq_length=128",
        "trainer.steps=2",
        "trainer.batch_size=4",
        "answers=none",
        "chats=none",
    ]
    options += ["logger=none", f"cache_dir={cache}"]

    def configured(*overrides):
        return composed("domains=instructions", "model=hf", *options, *overrides)

    with pytest.raises(ValueError, match=r"train.jsonl, line 61.*is empty.*on_bad_example=skip"):
        start(configured(), tmp_path / "stopped")
    start(configured("domains.on_bad_example=skip"), tmp_path / "run")
    today = datetime.date.today().isoformat()
    assert read_scores(tmp_path / "run")["texts"]["law"]["skipped"] == dict.fromkeys(UNUSABLE, 1)
    assert f"date: '{today}'" in (tmp_path / "run" / "config.yaml").read_text()
    assert all("Skipping 1 example of law" in caplog.text and kind in caplog.text for kind in UNUSABLE)

    monkeypatch.setattr(chat_date, "datetime", SimpleNamespace(date=LaterDay))
    scores = (tmp_path / "run" / "scores.json").read_bytes()
    (tmp_path / "run" / "report.html").unlink()  # so that it is started again
    start(configured("domains.on_bad_example=skip"), tmp_path / "run")
    assert f"prints a date: {today}" in caplog.text and "2031" not in caplog.text
    assert json.loads(scores)["nll"] == read_scores(tmp_path / "run")["nll"]
    with pytest.raises(ValueError, match=f"domains.date: {today} -> 2031-05-06"):
        start(configured("domains.on_bad_example=skip", "domains.date=2031-05-06"), tmp_path / "run")
    with pytest.raises(ValueError, match="date=2031-13-06 is invalid"):
        start(configured("domains.date=2031-13-06"), tmp_path / "other")


def test_a_chat_model_with_longer_positions_is_exported_with_all_of_its_files(
    small_gpt2, corpora, start, tmp_path
):
    base = tmp_path / "decoder"
    write_checkpoint(base)
    tokenizer = AutoTokenizer.from_pretrained(base)
    tokenizer.model_max_length = 256
    tokenizer.save_pretrained(base)
    (base / "generation_config.json").write_text('{"eos_token_id": [2, 400], "max_new_tokens": 7}')
    options = [f"model.name_or_path={base}", "model.rope_parameters={rope_type: yarn, factor: 2}"]
    start(small_gpt2("method=none", "order=[law]", "chats=none", *options), tmp_path / "run")

    exported = tmp_path / "run" / "model"
    for name in ("tokenizer.json", "chat_template.jinja", "generation_config.json"):
        assert (exported / name).read_bytes() == (base / name).read_bytes()
    loaded = AutoTokenizer.from_pretrained(exported)
    assert loaded.model_max_length == AutoConfig.from_pretrained(exported).max_position_embeddings == 512
    assert loaded.special_tokens_map == tokenizer.special_tokens_map
    assert loaded.chat_template == tokenizer.chat_template
