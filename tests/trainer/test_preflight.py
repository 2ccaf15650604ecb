"""What torch, Lightning and transformers say of a config is told in a line, before any text is read."""

import json
import shutil

import pytest
import torch
from transformers import AutoConfig, AutoModelForSeq2SeqLM, AutoTokenizer

from cpt.core.errors import reason
from cpt.data.corpora import Corpora
from cpt.models.loading import build_model, is_tied, sentinel_ids, train_tokenizer
from cpt.trainer.plan import make_plan
from cpt.trainer.preflight import prepare
from cpt.trainer.run_dir import RunDir
from tests.support.chat_fixtures import write_chats, write_checkpoint
from tests.support.wrong_options import ON_A_CAUSAL, ON_A_DECODER, ON_THE_MODEL

FORGETTING = (
    "{% for m in messages %}{{ loop.revindex }}{{ m['content'] }}</s>{% endfor %}"  # what follows counts
)
SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 48}


def overrides(given: str) -> list[str]:
    return [given] if "{" in given else given.split()


@pytest.fixture
def unread(monkeypatch, start, tmp_path):
    """A start whose texts may not be read."""

    def forbidden(*args, **kwargs):
        raise AssertionError("texts were read")

    monkeypatch.setattr(Corpora, "read", forbidden)
    return lambda cfg: start(cfg, tmp_path / "run")


@pytest.mark.parametrize("given", ON_THE_MODEL)
def test_what_only_the_libraries_know_is_told_before_any_text_is_read(given, small, unread):
    with pytest.raises(ValueError) as raised:
        unread(small(*overrides(given)))
    assert reason(raised.value).startswith(ON_THE_MODEL[given])


@pytest.mark.parametrize("given", ON_A_CAUSAL)
def test_what_a_causal_model_cannot_do_is_told_before_any_text_is_read(given, small_gpt2, unread):
    with pytest.raises(ValueError) as raised:
        unread(small_gpt2(*given.split()))
    assert reason(raised.value).startswith(ON_A_CAUSAL[given])


@pytest.mark.parametrize("given", ON_A_DECODER)
def test_what_a_model_with_a_decoder_cannot_do_is_told_before_any_text_is_read(given, small_t5, unread):
    with pytest.raises(ValueError) as raised:
        unread(small_t5(*given.split()))
    assert reason(raised.value).startswith(ON_A_DECODER[given])


@pytest.fixture
def chats(tmp_path):
    return [
        "domains=instructions",
        f"domains.root={write_chats(tmp_path / 'chats', ['law'], train=9, test=3)}",
    ]


STRICT = "{{ raise_exception('I take no chats') }}"


@pytest.mark.parametrize(
    ("template", "told"),
    [
        (
            None,
            "model=checkpoint does not go with chats, as it has no chat template; allowed: ",
        ),
        (STRICT, "does not take its turns .user, assistant.: I take no chats; allowed: roles that it knows"),
        (
            FORGETTING,
            r"changes earlier turns when a turn follows .turn 2 of example a question and its answer",
        ),
    ],
    ids=["none", "strict", "forgetting"],
)
def test_a_template_that_takes_no_chats_is_told_before_any_text_is_read(
    template, told, chats, composed, unread, tmp_path
):
    folder = write_checkpoint(tmp_path / "decoder", template=template)
    with pytest.raises(ValueError, match=told):
        unread(composed(*chats, "model=checkpoint", f"model.checkpoint={folder}", "logger=none"))


def test_a_model_that_takes_no_chats_is_told_before_any_text_is_read(chats, small_t5, small_gpt2, unread):
    with pytest.raises(
        ValueError, match="^model=tiny_t5 does not go with chats, as it is an encoder-decoder; all"
    ):
        unread(small_t5(*chats))
    with pytest.raises(ValueError, match="^model=tiny_gpt2 does not go with chats, as it has no chat templ"):
        unread(small_gpt2(*chats))


@pytest.fixture(scope="module")
def bart(tmp_path_factory):
    """A tiny BART with its tokenizer, which has no sentinels."""
    folder = tmp_path_factory.mktemp("bart")
    words = train_tokenizer(
        iter(["the court finds that a party must pay damages"] * 5), vocabulary=300, objective="masked"
    )
    config = {"model_type": "bart", "d_model": 32, "max_position_embeddings": 40, "dropout": 0.0}
    for side in ("encoder", "decoder"):
        config |= {f"{side}_layers": 1, f"{side}_attention_heads": 2, f"{side}_ffn_dim": 48}
    config |= {"vocab_size": len(words), "decoder_start_token_id": words.eos_token_id}
    config |= {f"{name}_token_id": getattr(words, f"{name}_token_id") for name in ("pad", "bos", "eos")}
    torch.manual_seed(0)
    model = AutoModelForSeq2SeqLM.from_config(AutoConfig.for_model(config.pop("model_type"), **config))
    for part in (model, words):
        part.save_pretrained(folder)
    return folder


def test_a_tokenizer_without_sentinels_gets_them_and_the_embedding_rows(bart, small, start, tmp_path, caplog):
    options = [f"model.checkpoint={bart}", "model.mean_span=3", "order=[law]", "trainer.steps=2"]
    with caplog.at_level("INFO"):
        start(small(*options), tmp_path)
    assert f"the tokenizer of {bart} has no sentinels: it gets 100" in caplog.text
    words = AutoTokenizer.from_pretrained(tmp_path / "model")
    model = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "model")
    ids = sentinel_ids(words)
    assert len(ids) == 100 and ids[0] == len(words) - 1
    assert model.get_input_embeddings().num_embeddings == len(words)
    assert is_tied(model)
    scores = json.loads((tmp_path / "scores.json").read_text())
    assert scores["run"]["objective"] == "span" and scores["nll"][1] != scores["nll"][0]


def test_a_model_whose_head_gets_no_rows_for_sentinels_is_told(bart, small, unread, monkeypatch):
    monkeypatch.setattr("transformers.BartForConditionalGeneration.get_output_embeddings", lambda self: None)
    with pytest.raises(ValueError, match="^model.resize=true: transformers finds no head of BartFor.*span$"):
        unread(small(f"model.checkpoint={bart}", "model.mean_span=3"))


def test_what_is_right_is_built(small, tmp_path):
    cfg = small("callbacks=lr_monitor", "logger=csv", "method=lora", "mask=migu")
    ready = prepare(make_plan(cfg), RunDir(tmp_path))
    assert (ready.loggers, list(ready.callbacks), ready.processes) == ([], ["lr_monitor"], 1)
    assert ready.device.type == "cpu"
    assert list(tmp_path.iterdir()) == []


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A tiny RoBERTa with its tokenizer."""
    folder = tmp_path_factory.mktemp("saved")
    words = train_tokenizer(
        iter(["the court finds that a party must pay damages"] * 5), vocabulary=300, objective="masked"
    )
    config = {"model_type": "roberta", **SIZES, "max_position_embeddings": 64}
    for part in (build_model(config, words, "masked", seed=0), words):
        part.save_pretrained(folder)
    return folder


@pytest.fixture
def checkpoint(saved, tmp_path):
    return shutil.copytree(saved, tmp_path / "checkpoint")


def test_a_truncated_checkpoint_is_told(checkpoint, small, unread):
    weights = checkpoint / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(ValueError, match=r"model.safetensors is truncated or damaged \(.*\); bring it"):
        unread(small(f"model.checkpoint={checkpoint}"))


def test_a_checkpoint_without_tokenizer_is_told(checkpoint, small, unread):
    for path in checkpoint.glob("tokenizer*"):
        path.unlink()
    with pytest.raises(ValueError, match=r"model.checkpoint=.*checkpoint has no tokenizer; allowed: "):
        unread(small(f"model.checkpoint={checkpoint}"))


def test_a_tokenizer_larger_than_the_embedding_is_told_before_any_text_is_read(checkpoint, small, unread):
    words = AutoTokenizer.from_pretrained(checkpoint)
    rows = len(words)
    words.add_tokens(["contract", "section"])
    words.save_pretrained(checkpoint)
    expected = f"has {rows + 2} entries, its embedding {rows} rows; allowed: model.resize=true"
    with pytest.raises(ValueError, match=expected):
        unread(small(f"model.checkpoint={checkpoint}"))
    prepare(make_plan(small(f"model.checkpoint={checkpoint}", "model.resize=true")), RunDir(checkpoint))


@pytest.mark.parametrize(
    ("attach", "told"),
    [(None, "it starts with those of food"), ("cpt.adapters.x", "it starts without any of them")],
)
def test_an_exported_model_in_parts_says_which_is_used(attach, told, checkpoint, small, tmp_path, caplog):
    index = {"attach": attach, "options": {}, "parts": ["law", "food"]}
    (checkpoint / "parts.json").write_text(json.dumps(index))
    prepare(make_plan(small(f"model.checkpoint={checkpoint}")), RunDir(tmp_path))
    assert f"{checkpoint} has modules for law, food; {told}" in caplog.text
