"""Whole runs on chats: a decoder with a chat template learns the assistant's turns and is asked for them."""

import json
import random

import pytest
import torch
from tokenizers import AddedToken
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from cpt.models.loading import train_tokenizer
from tests.conftest import VOCABULARIES, sentences
from tests.runs.reading import answers_of, told_by
from tests.support.making import made

DOMAINS = ("food", "law")
TURN_ENDS = "<|end|>"  # what the template ends a turn with: not the end of the sequence
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{{ m['role'] }}:\n{{ m['content'] }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:\n{% endif %}"
)


def conversations(name, *, count, seed):
    """Chats over a domain's words; an answer names the first word of its question."""
    draw = random.Random(seed)
    for number in range(count):
        asked = draw.choices(VOCABULARIES[name].split(), k=draw.randint(4, 8))
        turns = {"system": f"You know {name}.", "user": f"{' '.join(asked)} {number}?"}
        turns |= {"assistant": f"It is {asked[0]}."}
        yield [{"role": role, "content": content} for role, content in turns.items()]


def write_chats(root):
    for seed, name in enumerate(DOMAINS):
        (root / name).mkdir(parents=True)
        for split, count in {"train": 60, "test": 10}.items():
            chats = conversations(name, count=count, seed=10 * seed + (split == "test"))
            rows = [json.dumps({"messages": turns}) for turns in chats]
            (root / name / f"{split}.jsonl").write_text("\n".join(rows))
    (root / "general").mkdir()
    (root / "general" / "all.txt").write_text(
        "\n".join(sentences(VOCABULARIES["general"], count=120, seed=0))
    )


def write_checkpoint(folder):
    """A decoder of 40 thousand parameters with a chat template, as `save_pretrained` leaves it."""
    texts = [text for words in VOCABULARIES.values() for text in sentences(words, count=60, seed=1)]
    tokenizer = train_tokenizer(iter(texts), vocabulary=400, objective="causal")
    tokenizer.add_special_tokens({"additional_special_tokens": [AddedToken(TURN_ENDS, special=True)]})
    tokenizer.chat_template = TEMPLATE
    ids = {f"{name}_token_id": getattr(tokenizer, f"{name}_token_id") for name in ("bos", "eos", "pad")}
    sizes = {"hidden_size": 32, "intermediate_size": 64, "max_position_embeddings": 256}
    heads = {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1}
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), **sizes, **heads, **ids)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    place = tmp_path_factory.mktemp("chats")
    write_chats(place / "texts")
    write_checkpoint(place / "decoder")
    return place


@pytest.fixture
def config(composed, place, cache):
    places = [
        f"domains.root={place / 'texts'}",
        f"model.name_or_path={place / 'decoder'}",
        f"cache_dir={cache}",
    ]
    how = ["model.max_seq_length=128", "trainer.steps=30", "trainer.batch_size=8", "optim.lr=1e-2"]
    how += ["trainer.checkpoint_every=4", "answers.max_new_tokens=12", "logger=none"]
    return composed("domains=instructions", "model=hf", *places, *how)


def test_chats_are_learned_and_answered(config, start, tmp_path):
    """What is written ends where the template ends a turn, which is what was learned."""
    start(config, tmp_path)
    scores = told_by(tmp_path)
    assert scores["run"]["finished"] and scores["run"]["objective"] == "causal"
    assert scores["domains"] == [*DOMAINS, "general"]
    assert all(scores["nll"][2][place] < scores["nll"][0][place] - 1 for place in (0, 1))
    answers, files = scores["answers"]["tasks"], answers_of(tmp_path)
    assert answers["law"]["measures"]["rouge_l"][-1] > 0.3 > answers["law"]["measures"]["rouge_l"][0]
    last = files["answers/002-law/law.parquet"]
    assert len(files) == 6
    assert sum(row["written"].startswith("It is") and row["written"].endswith(".") for row in last) > 5


def test_the_loss_of_the_first_batch_is_that_of_a_loop_over_its_answers(config, place):
    """Rendered and tokenised here by transformers alone: the sum over the tokens of the answers, the ends of
    their turns included, over their number."""
    run = made(config)
    batch = run.batches()[0]
    tokenizer, model = AutoTokenizer.from_pretrained(place / "decoder"), run.module.model.eval()
    with torch.no_grad():
        loss = run.module.losses(batch)["lm"].item()
    known = {
        tokenizer.apply_chat_template(turns, tokenize=False).removesuffix("\n"): turns
        for turns in conversations("law", count=60, seed=10)
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
