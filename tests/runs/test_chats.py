"""Whole runs on chats: a decoder with a chat template learns the assistant's turns and is asked for them."""

import json
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from cpt.trainer import loop
from tests.methods.test_contract import KilledError, Killer, bits, dying
from tests.support.chat_fixtures import (
    MARKED_TEMPLATE,
    TEMPLATE,
    TURN_ENDS,
    conversations,
    write_chats,
    write_checkpoint,
)
from tests.support.making import made

DOMAINS = ("food", "law")


@pytest.fixture(scope="module")
def chats(tmp_path_factory):
    return write_chats(tmp_path_factory.mktemp("chats"), DOMAINS, train=60, test=10)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("decoder"))


@pytest.fixture
def config(composed, chats, checkpoint, cache):
    """A run on chats that takes seconds."""

    def build(*overrides: str, root: Path = chats, model: Path = checkpoint):
        places = [f"domains.root={root}", f"model.checkpoint={model}", f"cache_dir={cache}"]
        sizes = ["model.length=128", "trainer.steps=30", "trainer.batch_size=8", "trainer.checkpoint_every=4"]
        how = ["optim.lr=1e-2", "answers.tokens=12", "logger=none"]
        return composed("domains=instructions", "model=checkpoint", *places, *sizes, *how, *overrides)

    return build


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    return tmp_path_factory.mktemp("whole")


@pytest.fixture
def whole(finished, config, start):
    """The folder of a run that nothing interrupted."""
    if not (finished / "scores.json").exists():
        start(config(), finished)
    return finished


def scores_of(folder):
    return json.loads((folder / "scores.json").read_text())


def answers_of(folder):
    """Every file of answers as its rows."""
    found = sorted((folder / "answers").rglob("*.parquet"))
    return {str(path.relative_to(folder)): pq.read_table(path).to_pylist() for path in found}


def test_chats_are_learned_and_answered(whole):
    scores = scores_of(whole)
    assert scores["run"]["finished"] and scores["run"]["objective"] == "causal"
    assert scores["domains"] == [*DOMAINS, "general"]
    assert scores["nll"][2][0] < scores["nll"][0][0] - 1 and scores["nll"][2][1] < scores["nll"][0][1] - 1
    answers = scores["answers"]["tasks"]
    assert list(answers) == list(DOMAINS)
    for name in DOMAINS:
        assert answers[name]["examples"] == 10
        assert list(answers[name]["measures"]) == ["rouge_l", "exact_match", "edit_similarity"]
    assert answers["law"]["measures"]["rouge_l"][-1] > 0.3 > answers["law"]["measures"]["rouge_l"][0]


def test_what_is_written_ends_where_the_template_ends_a_turn(whole):
    """The end of a turn is what was learned: the end of a sequence never stood behind an answer."""
    files = answers_of(whole)
    assert len(files) == 6
    last = files["answers/002-law/law.parquet"]
    assert {row["reference"][:5] for row in last} == {"It is"}
    assert all(row["ranked"] is None for row in last)
    assert sum(row["written"].startswith("It is") for row in last) > 5
    assert sum(row["written"].endswith(".") and len(row["written"]) < 20 for row in last) > 5


def test_the_exported_model_is_the_one_that_answered(whole, config):
    """Loaded with transformers alone it gives the learned model's logits, and has the template."""
    run = made(config())
    run.module.load_state_dict(torch.load(next((whole / "stages").iterdir()), weights_only=True))
    loaded = AutoModelForCausalLM.from_pretrained(whole / "model").eval()
    tokenizer = AutoTokenizer.from_pretrained(whole / "model")
    assert tokenizer.chat_template == TEMPLATE
    ids = torch.as_tensor(run.data.held_out["law"].ids(np.arange(4)))
    with torch.no_grad():
        assert torch.equal(loaded(input_ids=ids).logits, run.module.model.eval()(input_ids=ids).logits)
    chats = {row["id"]: row for row in answers_of(whole)["answers/002-law/law.parquet"]}
    asked = next(conversations("law", count=1, exchanges=1, seed=11))
    ids = tokenizer.apply_chat_template(asked[:-1], add_generation_prompt=True, return_tensors="pt")
    ids = ids if torch.is_tensor(ids) else ids["input_ids"]
    end = tokenizer.convert_tokens_to_ids(TURN_ENDS)
    written = loaded.generate(ids, max_new_tokens=12, do_sample=False, eos_token_id=end)[0, ids.shape[1] :]
    assert tokenizer.decode(written, skip_special_tokens=True).strip() == chats["law-test-0"]["written"]


@pytest.mark.parametrize("template", [TEMPLATE, MARKED_TEMPLATE], ids=["derived", "marked"])
def test_the_loss_of_the_first_batch_is_that_of_a_loop_over_its_answers(config, tmp_path, template):
    """Rendered and tokenised here by transformers alone: the sum over the tokens of the answers, the ends of
    their turns included, over their number."""
    run = made(config(model=write_checkpoint(tmp_path / "decoder", template=template)))
    batch = run.batches()[0]
    tokenizer, model = AutoTokenizer.from_pretrained(tmp_path / "decoder"), run.module.model.eval()
    with torch.no_grad():
        loss = run.module.losses(batch)["lm"].item()
    known = {
        tokenizer.apply_chat_template(turns, tokenize=False).removesuffix("\n"): turns
        for turns in conversations("law", count=60, exchanges=1, seed=10)
    }
    total, count = 0.0, 0
    for row, ids in enumerate(batch["input_ids"]):
        present = batch.get("attention_mask", torch.ones_like(batch["input_ids"]))[row].bool()
        turns = known[tokenizer.decode(ids[present], clean_up_tokenization_spaces=False)]
        before = tokenizer.apply_chat_template(turns[:-1], tokenize=False, add_generation_prompt=True)
        asked = tokenizer(before, add_special_tokens=False)["input_ids"]
        answer = tokenizer(turns[-1]["content"] + TURN_ENDS, add_special_tokens=False)["input_ids"]
        with torch.no_grad():
            logs = model(input_ids=torch.tensor([asked + answer])).logits[0].log_softmax(-1)
        total -= sum(logs[len(asked) - 1 + at, each].item() for at, each in enumerate(answer))
        count += len(answer)
    assert count == len(batch["positions"])
    assert loss == pytest.approx(total / count, rel=1e-5)


def test_killed_within_a_domain_it_ends_with_the_same_bits(whole, config, start, tmp_path, monkeypatch):
    trainer = loop.make_trainer
    for step, domain in ((3, "food"), (14, "food"), (30, "law")):

        def deadly(options, *, callbacks=(), at=(step, domain), **others):
            killer = [Killer(step=at[0], domain=at[1])] if callbacks else []
            return trainer(options, callbacks=[*callbacks, *killer], **others)

        with monkeypatch.context() as patched:
            patched.setattr(loop, "make_trainer", deadly)
            with pytest.raises(KilledError):
                start(config(), tmp_path)
    start(config(), tmp_path)
    assert bits(tmp_path) == bits(whole)
    assert answers_of(tmp_path) == answers_of(whole)


@pytest.mark.parametrize("moment", ["save_documents", "cleanup"], ids=["before a commit", "after a commit"])
def test_killed_between_domains_it_ends_with_the_same_bits(
    moment, whole, config, start, tmp_path, monkeypatch
):
    for number in range(3):
        with monkeypatch.context() as patched:
            patched.setattr(loop.RunDir, moment, dying(getattr(loop.RunDir, moment), at=number))
            with pytest.raises(KilledError):
                start(config(), tmp_path)
    start(config(), tmp_path)
    assert bits(tmp_path) == bits(whole)
    assert answers_of(tmp_path) == answers_of(whole)


def test_another_template_is_another_text(config, start, tmp_path, monkeypatch):
    """Rows in the cache are not those of a template that has changed, and a run does not go on with it."""
    folder = write_checkpoint(tmp_path / "decoder")
    cfg = config("trainer.steps=2", model=folder)
    before = made(cfg).data.train["law"].ids(np.arange(1))
    with monkeypatch.context() as patched:
        patched.setattr(loop.RunDir, "cleanup", dying(loop.RunDir.cleanup, at=1))
        with pytest.raises(KilledError):
            start(cfg, tmp_path / "run")
    write_checkpoint(folder, template=TEMPLATE.replace(":\n", " says "))
    assert made(cfg).data.train["law"].ids(np.arange(1)).tolist() != before.tolist()
    with pytest.raises(ValueError, match="chat_template.jinja of model.checkpoint=.* changed"):
        start(cfg, tmp_path / "run")


def test_long_chats_lose_their_oldest_exchanges(config, start, tmp_path, caplog):
    """Ten exchanges, of which few fit; of those the last answer alone is scored."""
    root = write_chats(tmp_path / "chats", DOMAINS, train=40, test=8, exchanges=10)
    cfg = config("domains.scored_turns=last", root=root)
    with caplog.at_level("INFO"):
        start(cfg, tmp_path / "run")
    assert "law, train: " in caplog.text and "examples are cut to model.length=128" in caplog.text
    run, tokenizer = made(cfg), AutoTokenizer.from_pretrained(tmp_path / "run" / "model")
    for text in (*run.data.train.values(), *run.data.held_out.values()):
        if not hasattr(text, "answer_tokens"):
            continue
        assert text.row_lengths.max() <= 128
        rows = np.arange(len(text.rows))
        for ids, length, marks in zip(text.ids(rows), text.row_lengths, text.answers(rows), strict=True):
            shown = tokenizer.decode(ids[:length], clean_up_tokenization_spaces=False)
            assert shown.startswith("<s>system:\nYou know ")
            assert 1 <= shown.count("assistant:") < 10
            answer = tokenizer.decode(ids[marks[: len(ids)].astype(bool)], clean_up_tokenization_spaces=False)
            assert shown.endswith(f"assistant:\n{answer}") and answer.count(TURN_ENDS) == 1
    scores = scores_of(tmp_path / "run")
    expected = [sum(text.answer_tokens) for name, text in run.data.held_out.items() if name != "general"]
    assert scores["run"]["finished"] and scores["scored"][:2] == expected
    assert len(answers_of(tmp_path / "run")) == 6
