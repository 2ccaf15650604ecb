"""Models built here, as their users load them: `pipeline("fill-mask")` and `pipeline("text-generation")`."""

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import pipeline

from cpt.core.config import digest
from cpt.data.corpora import Corpora
from cpt.data.packing import terminator
from cpt.models import loading as models
from cpt.trainer.base_model import learn_tokenizer, make_base
from cpt.trainer.plan import make_plan
from tests.conftest import VOCABULARIES

WORDS = set(VOCABULARIES["general"].split())
TRAINED = ["model.base.steps=120", "model.vocabulary=420", "model.base.optim.lr=1e-2"]


def folder(cfg):
    """The base model of a config, trained."""
    plan = make_plan(cfg)
    texts = Corpora.read(plan.source, plan.order, cache=Path(cfg.cache_dir))
    return make_base(make_plan(cfg).model, texts, accelerator="cpu").checkpoint


@pytest.fixture(scope="module")
def kept():
    return {}


@pytest.fixture
def masked(small, kept):
    return kept.setdefault("masked", folder(small(*TRAINED)))


@pytest.fixture
def causal(small_gpt2, kept):
    return kept.setdefault("causal", folder(small_gpt2(*TRAINED)))


@pytest.fixture
def texts(small):
    """The small texts, read."""
    plan = make_plan(small())
    return Corpora.read(plan.source, plan.order, cache=Path(plan.run.cache_dir))


@pytest.mark.parametrize("text", ["the house <mask> near", "people walk <mask>", "a<mask> and the river"])
def test_a_masked_word_is_filled_with_a_word(masked, text):
    before, after = (part.rstrip() for part in text.split("<mask>"))
    for guess in pipeline("fill-mask", model=masked)(text):
        assert guess["token_str"].startswith(" ")
        assert guess["token_str"].strip() in WORDS
        assert guess["sequence"] == f"{before}{guess['token_str']}{after}"


def test_a_prompt_is_continued_within_its_document(causal):
    generate, prompt = pipeline("text-generation", model=causal), "people walk along"
    (told,) = generate(prompt, max_new_tokens=5, do_sample=False)
    continued = told["generated_text"].removeprefix(prompt)
    assert continued.startswith(" ")
    assert set(continued.split()) <= WORDS
    ids = generate.tokenizer(prompt).input_ids
    assert ids[0] == generate.tokenizer.bos_token_id
    assert generate.tokenizer.eos_token_id not in ids
    torch.manual_seed(0)
    (told,) = generate("", max_new_tokens=200, do_sample=True, return_full_text=False)
    new = generate.tokenizer(told["generated_text"], add_special_tokens=False).input_ids
    assert 8 <= len(new) < 200  # documents have 8 to 30 words and a number: it knows where one ends


def test_a_run_exports_the_tokenizer_of_its_base(masked, small, start, tmp_path):
    start(small(*TRAINED, "trainer.steps=1"), tmp_path / "run")
    for guess in pipeline("fill-mask", model=str(tmp_path / "run" / "model"))("the house <mask> near"):
        assert guess["token_str"].startswith(" ")


def test_both_objectives_pack_the_same_rows(texts):
    rows = {}
    for objective in ("masked", "causal"):
        learned = learn_tokenizer(texts.general, 300, objective=objective, cache=texts.cache)
        tokenizer = models.load_tokenizer(learned)
        packed = texts.packed("law", "test", tokenizer=tokenizer, length=16)
        rows[objective] = np.concatenate([row["ids"] for row in packed.rows])
        assert terminator(tokenizer) == ([] if objective == "masked" else [tokenizer.eos_token_id])
    assert np.array_equal(rows["masked"], rows["causal"])
    documents = list(texts.by_name["law"].documents("test")["text"])
    bare = tokenizer(documents, add_special_tokens=False).input_ids
    framed = [[tokenizer.bos_token_id, *ids, tokenizer.eos_token_id] for ids in bare]
    assert rows["causal"].tolist() == [each for ids in framed for each in ids]


def test_two_texts_are_apart_for_both_objectives(texts):
    told = {}
    for objective in ("masked", "causal"):
        learned = learn_tokenizer(texts.general, 300, objective=objective, cache=texts.cache)
        tokenizer = models.load_tokenizer(learned)
        told[objective] = tokenizer.decode(tokenizer("a", "b").input_ids)
    assert told == {"masked": "<s>a</s></s>b</s>", "causal": "<s>a</s><s>b"}


def test_a_tokenizer_that_an_earlier_version_cached_is_not_taken(texts, tmp_path):
    old = tmp_path / "tokenizers" / digest([1, texts.general.facts["train_digest"], 300])
    old.mkdir(parents=True)
    made = {
        learn_tokenizer(texts.general, 300, objective=each, cache=tmp_path) for each in models.AUTO_MODELS
    }
    assert len(made - {old}) == len(models.AUTO_MODELS)
