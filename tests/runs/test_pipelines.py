"""Models built here, as their users load them: `pipeline("fill-mask")` and `pipeline("text-generation")`."""

from pathlib import Path

import pytest
import torch
from transformers import pipeline

from cpt.data.corpora import Corpora
from cpt.trainer.base_model import make_base
from cpt.trainer.plan import make_plan
from tests.conftest import VOCABULARIES

WORDS = set(VOCABULARIES["general"].split())
TRAINED = ["model.base.steps=120", "model.vocabulary=420", "model.base.optim.lr=1e-2"]


@pytest.fixture
def texts(small):
    """The small texts, read."""
    plan = make_plan(small())
    return Corpora.read(plan.source, plan.order, cache=Path(plan.run.cache_dir))


def test_a_prompt_is_continued_within_its_document(small_gpt2, texts):
    base = make_base(make_plan(small_gpt2(*TRAINED)).model, texts, accelerator="cpu").checkpoint
    generate, prompt = pipeline("text-generation", model=base), "people walk along"
    (told,) = generate(prompt, max_new_tokens=5, do_sample=False)
    continued = told["generated_text"].removeprefix(prompt)
    assert continued.startswith(" ") and set(continued.split()) <= WORDS
    ids = generate.tokenizer(prompt).input_ids
    assert ids[0] == generate.tokenizer.bos_token_id and generate.tokenizer.eos_token_id not in ids
    torch.manual_seed(0)
    (told,) = generate("", max_new_tokens=200, do_sample=True, return_full_text=False)
    new = generate.tokenizer(told["generated_text"], add_special_tokens=False).input_ids
    assert 8 <= len(new) < 200  # documents have 8 to 30 words and a number: it knows where one ends
