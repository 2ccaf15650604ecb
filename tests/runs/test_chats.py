"""Whole runs on chats: a decoder with a chat template learns the assistant's turns and is asked for them."""

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer

from tests.runs.reading import answers_of, killed, told_by
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
def place(tmp_path_factory):
    place = tmp_path_factory.mktemp("chats")
    write_chats(place / "texts", DOMAINS, train=60, test=10)
    write_checkpoint(place / "decoder")
    return place


@pytest.fixture
def config(composed, place, cache):
    """A run on chats that takes seconds."""

    def build(*overrides, root=place / "texts", model=place / "decoder"):
        places = [f"domains.root={root}", f"model.name_or_path={model}", f"cache_dir={cache}"]
        how = ["model.max_seq_length=128", "trainer.steps=30", "trainer.batch_size=8", "optim.lr=1e-2"]
        how += ["trainer.checkpoint_every=4", "answers.max_new_tokens=12", "logger=none"]
        return composed("domains=instructions", "model=hf", *places, *how, *overrides)

    return build


def test_chats_are_learned_and_answered(config, start, tmp_path):
    """What is written ends where the template ends a turn, which is what was learned."""
    start(config(), tmp_path)
    scores = told_by(tmp_path)
    assert scores["run"]["finished"] and scores["run"]["objective"] == "causal"
    assert scores["domains"] == [*DOMAINS, "general"]
    assert all(scores["nll"][2][place] < scores["nll"][0][place] - 1 for place in (0, 1))
    answers, files = scores["answers"]["tasks"], answers_of(tmp_path)
    assert answers["law"]["measures"]["rouge_l"][-1] > 0.3 > answers["law"]["measures"]["rouge_l"][0]
    last = files["answers/002-law/law.parquet"]
    assert len(files) == 6
    assert sum(row["written"].startswith("It is") and row["written"].endswith(".") for row in last) > 5


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
    assert count == len(batch["positions"]) and loss == pytest.approx(total / count, rel=1e-5)


def test_another_template_is_another_text(config, start, killing, tmp_path):
    """Rows in the cache are not those of a template that has changed, and a run does not go on with it."""
    folder = write_checkpoint(tmp_path / "decoder")
    cfg = config("trainer.steps=2", model=folder)
    before = made(cfg).data.train["law"].ids(np.arange(1))
    killed(start, killing, cfg, tmp_path / "run", step=1, domain="law")
    write_checkpoint(folder, template=TEMPLATE.replace(":\n", " says "))
    assert made(cfg).data.train["law"].ids(np.arange(1)).tolist() != before.tolist()
    with pytest.raises(ValueError, match="chat_template.jinja of model.name_or_path=.* changed"):
        start(cfg, tmp_path / "run")
