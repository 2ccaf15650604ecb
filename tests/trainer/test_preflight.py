"""What is wrong with a config, a checkpoint or a tokenizer is told in one line, before any text is read."""

import json
import logging
import os
import re
import shutil
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from hydra.errors import HydraException
from omegaconf import OmegaConf
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForMaskedLM, AutoModelForSeq2SeqLM, AutoTokenizer

from cpt.core import memory
from cpt.core.config import identity, make_plain_config
from cpt.core.errors import find_reason
from cpt.data.corpora import Corpora
from cpt.models.loading import build_model, find_sentinel_ids, is_tied, load_model, train_tokenizer
from cpt.models.options import Freeze
from cpt.models.units import UnknownLayersError
from cpt.train import check_base_folder, check_start, open_run_dir
from cpt.trainer import check_model, hydra_callback
from cpt.trainer.check_checkpoint import check_file_kinds
from cpt.trainer.check_model import warn_of_other_ends
from cpt.trainer.hydra_callback import ConfigCheck
from cpt.trainer.plan import make_plan
from cpt.trainer.preflight import log_awaited_processes, prepare_run, warn_of_cpu_processes
from cpt.trainer.read_config import read_sections
from cpt.trainer.run_dir import RunDir, list_checkpoint_files
from tests.conftest import ROOT
from tests.runs.reading import read_scores
from tests.support.data_fixtures import tokenizer_with_template
from tests.support.wrong_options import AT_ONCE, ON_A_CAUSAL, ON_A_DECODER, ON_THE_MODEL, is_refused

SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 48}
WRONG = {"small": ON_THE_MODEL, "small_gpt2": ON_A_CAUSAL, "small_t5": ON_A_DECODER}
WRONG_OF_SIZES = []
for size, options in WRONG.items():
    WRONG_OF_SIZES += [(size, option) for option in options]


@pytest.fixture
def unread(monkeypatch, start, tmp_path):
    """A start whose texts may not be read; gives why it is refused."""

    def refusal(cfg):
        with pytest.raises(ValueError) as raised:
            start(cfg, tmp_path / "run")
        return find_reason(raised.value)

    monkeypatch.setattr(Corpora, "read", None)
    return refusal


@pytest.mark.parametrize(("size", "option"), WRONG_OF_SIZES)
def test_what_only_the_libraries_know_is_reported_before_any_text_is_read(size, option, request, unread):
    words = [option] if "{" in option else option.split()
    message = unread(request.getfixturevalue(size)(*words))
    assert is_refused(option, message), message


def train_small_tokenizer():
    lines = ["the court finds that a party must pay damages"] * 5
    return train_tokenizer(iter(lines), vocabulary=300, objective="masked")


def save_parts(folder, *parts):
    for part in parts:
        part.save_pretrained(folder)
    return folder


def test_a_tokenizer_without_sentinels_gets_them_and_the_embedding_rows(small, start, tmp_path):
    tokenizer = train_small_tokenizer()
    config = AutoConfig.for_model(
        "bart",
        d_model=32,
        max_position_embeddings=40,
        dropout=0.0,
        encoder_layers=1,
        encoder_attention_heads=2,
        encoder_ffn_dim=48,
        decoder_layers=1,
        decoder_attention_heads=2,
        decoder_ffn_dim=48,
        vocab_size=len(tokenizer),
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        decoder_start_token_id=tokenizer.eos_token_id,
    )
    bart = save_parts(tmp_path / "bart", AutoModelForSeq2SeqLM.from_config(config), tokenizer)
    options = [f"model.name_or_path={bart}", "model.mean_span=3", "order=[law]", "trainer.steps=2"]
    start(small(*options), tmp_path / "run")

    exported_tokenizer = AutoTokenizer.from_pretrained(tmp_path / "run" / "model")
    model = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "run" / "model")
    ids = find_sentinel_ids(exported_tokenizer)
    assert len(ids) == 100 and ids[0] == len(exported_tokenizer) - 1
    assert model.get_input_embeddings().num_embeddings == len(exported_tokenizer) and is_tied(model)
    scores = read_scores(tmp_path / "run")
    assert scores["run"]["objective"] == "span" and scores["nll"][1] != scores["nll"][0]


@pytest.fixture
def checkpoint(tmp_path):
    tokenizer = train_small_tokenizer()
    config = {"model_type": "roberta", **SIZES, "max_position_embeddings": 64}
    return save_parts(tmp_path / "checkpoint", build_model(config, tokenizer, "masked", seed=0), tokenizer)


def test_a_checkpoint_that_is_damaged_or_does_not_fit_is_reported(checkpoint, small, unread, tmp_path):
    option = f"model.name_or_path={checkpoint}"
    intact_checkpoint = shutil.copytree(checkpoint, tmp_path / "whole")
    config = (intact_checkpoint / "config.json").read_bytes()
    weights = (intact_checkpoint / "model.safetensors").read_bytes()
    quantized = config.replace(b"{", b'{"quantization_config": {"quant_method": "fp8"}, ', 1)
    emptied = config.replace(b"{", b'{"quantization_config": {}, ', 1)
    harms = [
        ("model.safetensors", weights[:-100], "model.safetensors is truncated or damaged ("),
        ("model.safetensors", None, f"{option} is invalid: it has no weights. Allowed: "),
        ("config.json", quantized, f"{option} is invalid: its weights are quantized"),
        ("config.json", emptied, f"{option} is invalid: quantization_config in its config.json is empty"),
        ("generation_config.json", b"", "generation_config.json is truncated or damaged (Expecting value"),
        ("generation_config.json", b"\xff\xfe{", "generation_config.json is truncated or damaged ("),
        ("generation_config.json", b"[2]", "generation_config.json is damaged (it has a list, not keys"),
        (
            "generation_config.json",
            b'{"eos_token_id": [[2]]}',
            "generation_config.json has eos_token_id=[[2]]",
        ),
        (
            "generation_config.json",
            b'{"eos_token_id": "2"}',
            f"{option} is invalid: generation_config.json has",
        ),
        (
            "tokenizer_config.json",
            b'{"model_max_length": "8k"}',
            "its model_max_length is '8k'. Allowed: a nu",
        ),
        ("adapter_config.json", b"{}", f"{option} is invalid: it has an adapter of peft"),
    ]
    for name, data, complaint in harms:
        if data is None:
            (checkpoint / name).unlink()
        else:
            (checkpoint / name).write_bytes(data)
        assert complaint in unread(small(option))
        shutil.rmtree(checkpoint)
        shutil.copytree(intact_checkpoint, checkpoint)

    for name in ("chat_template.jinja", "special_tokens_map.json", "generation_config.json"):
        (checkpoint / name).unlink(missing_ok=True)
        (checkpoint / name).mkdir()
        assert f"{option} is invalid: its {name} is a folder. Allowed: " in unread(small(option))
        (checkpoint / name).rmdir()
        (checkpoint / name).symlink_to(checkpoint / "unmounted")
        assert f"{option} is invalid: its {name} is a link to nothing" in unread(small(option))
        (checkpoint / name).unlink()
    for name in ("notes.json", "chat_template.bak"):  # which nothing reads
        (checkpoint / name).mkdir()
        assert name not in list_checkpoint_files(str(checkpoint))
        check_file_kinds(checkpoint, key="model.name_or_path")
        (checkpoint / name).rmdir()

    for path in checkpoint.glob("tokenizer*"):
        path.unlink()
    assert f"{option} is invalid: it has no tokenizer" in unread(small(option))
    tokenizer = AutoTokenizer.from_pretrained(intact_checkpoint)
    tokenizer.add_tokens(["contract", "section"])
    tokenizer.save_pretrained(checkpoint)
    assert "Allowed: model.resize=true" in unread(small(option))
    prepare_run(make_plan(small(option, "model.resize=true")), RunDir(checkpoint))


@pytest.mark.parametrize(
    ("file", "changes", "named"),
    [
        ("config.json", {"output_attentions": True}, "config.json has output_attentions, with which"),
        ("config.json", {"output_attentions": True, "dropout": 0.2}, "config.json has output_attentions"),
        ("generation_config.json", {"max_new_tokens": -1}, "generation_config.json has max_new_tokens"),
        ("generation_config.json", {"cache_implementation": "x"}, "generation_config.json has cache_impl"),
        ("generation_config.json", {"temperature": 0.5, "do_sample": False}, None),  # saved with a warning
        ("config.json", {"temperature": 0.5, "num_beams": 3}, None),
    ],
)
def test_what_transformers_loads_and_does_not_save_is_reported(
    file, changes, named, small_gpt2, unread, tmp_path
):
    tokenizer = train_tokenizer(iter(["the court finds that"] * 5), vocabulary=300, objective="causal")
    config = {"model_type": "gpt2", "n_embd": 32, "n_layer": 1, "n_head": 2, "n_positions": 64}
    folder = save_parts(tmp_path / "base", build_model(config, tokenizer, "causal", seed=0), tokenizer)
    path = folder / file
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    option = f"model.name_or_path={folder}"
    if named is None:
        prepare_run(make_plan(small_gpt2(option)), RunDir(tmp_path / "run"))
        return
    message = unread(small_gpt2(option))
    assert message.startswith(f"{option} is invalid: {named}") and f"Allowed: {file} without it" in message


def test_a_head_that_is_stored_apart_has_a_rate_of_its_own(small_gpt2, unread, tmp_path):
    """config.json ties it to the embedding, but transformers leaves it as it is stored."""
    tokenizer = train_small_tokenizer()
    config = {"model_type": "llama", **SIZES, "max_position_embeddings": 64, "tie_word_embeddings": False}
    folder = save_parts(tmp_path / "apart", build_model(config, tokenizer, "causal", seed=0), tokenizer)
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"tie_word_embeddings": True}))
    options = [f"model.name_or_path={folder}", "optim.lr_multipliers={embeddings: 0.1, head: 0.5}"]
    prepare_run(make_plan(small_gpt2(*options)), RunDir(tmp_path / "run"))

    state = load_file(folder / "model.safetensors")
    del state["lm_head.weight"]
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    message = unread(small_gpt2(*options))
    assert "model.embed_tokens.weight = lm_head.weight has 0.1 by embeddings" in message


def test_a_place_of_the_export_that_cannot_be_written_is_reported(small, unread, tmp_path, monkeypatch):
    model = tmp_path / "run" / "model"
    model.parent.mkdir()
    model.symlink_to(tmp_path / "unmounted")
    assert unread(small()).startswith(f"{model} is not a folder, ")
    model.unlink()
    model.mkdir()
    access = os.access
    monkeypatch.setattr(os, "access", lambda path, mode: path != model and access(path, mode))
    assert unread(small()).startswith(f"{model} cannot be written, ")


def edit_config(checkpoint, **changes):
    path = checkpoint / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_attention_weights_and_config_are_checked_before_any_text_is_read(checkpoint, small, unread):
    key = f"model.name_or_path={checkpoint}"
    weights = load_file(checkpoint / "model.safetensors")
    edit_config(checkpoint, architectures=["RobertaForPreTraining"])
    message = unread(small(key, "model.objective=causal", "model.mlm_probability=null"))
    assert message.startswith(f"{key} is invalid: the tokens of a roberta with is_decoder=false see those")
    edit_config(checkpoint, is_decoder=True)
    message = unread(small(key))
    assert "is_decoder=true do not see those that follow, as model.objective=masked needs" in message
    vocab_size = json.loads((checkpoint / "config.json").read_text())["vocab_size"]
    edit_config(checkpoint, is_decoder=False, vocab_size=310)
    assert re.search(r"lm_head.bias is \d+ in model.safetensors, but 310 by", unread(small(key)))
    edit_config(checkpoint, vocab_size=vocab_size, layer_norm_eps="1e-5")
    assert f"{key} is invalid: its config.json is refused by transformers (" in unread(small(key))
    edit_config(checkpoint, layer_norm_eps=1e-5)
    wrapped_weights = {f"module.{name}": weight for name, weight in weights.items()}
    save_file(wrapped_weights, checkpoint / "model.safetensors")
    assert "'module.', of a wrapper of the model, is in the names of tensors" in unread(small(key))


@pytest.mark.parametrize("key", ["cache_dir", "model.name_or_path", "loss.reference"])
def test_a_path_that_is_not_utf8_is_refused_at_once(key, small, tmp_path):
    """safetensors calls the files below it damaged, tokenizers and caches end in an error of a codec."""
    folder = tmp_path / "caf\udce9"
    folder.mkdir()
    plan = make_plan(small("loss=rho1", f'{key}="{folder}"'))
    refusal = f"{key}=.* is invalid: it is not UTF-8. Allowed: a path in UTF-8"
    with pytest.raises(ValueError, match=refusal):
        check_start(plan, RunDir(tmp_path / "run"))


def test_a_run_whose_path_is_not_utf8_is_refused_by_the_option_that_names_it(small, tmp_path):
    folder = tmp_path / "caf\udce9"
    (folder / "model").mkdir(parents=True)
    plan = make_plan(small(f'model.name_or_path="{folder}/model"'))
    plan = replace(plan, settings={**plan.settings, "init_from": str(folder)})
    with pytest.raises(ValueError, match="^init_from=.* is invalid: it is not UTF-8"):
        check_start(plan, RunDir(tmp_path / "run"))


def test_a_tokenizer_with_added_tokens_is_checked_before_any_text_is_read(
    checkpoint, small, unread, tmp_path, caplog
):
    words = AutoTokenizer.from_pretrained(checkpoint)
    words.add_tokens(["contract", "section"])
    words.save_pretrained(tmp_path / "more")
    option = f"model.name_or_path={checkpoint}"
    extended = [option, f"model.tokenizer={tmp_path / 'more'}"]
    with caplog.at_level("INFO", logger="cpt"):
        prepare_run(make_plan(small(*extended)), RunDir(checkpoint))
    assert "Adding 2 tokens of model.tokenizer=" in caplog.text
    for folder, complaint in (
        (tmp_path, "it has no tokenizer. Allowed: a folder with the files of one"),
        (tmp_path / "none", "no such folder, and not loaded from the Hub: "),
    ):
        key = f"model.tokenizer={folder}"
        assert unread(small(option, key)).startswith(f"{key} is invalid: {complaint}")
    words = train_tokenizer(iter(["other words"]), vocabulary=270, objective="masked")
    words.save_pretrained(tmp_path / "other")
    message = unread(small(option, f"model.tokenizer={tmp_path / 'other'}"))
    assert "it lacks " in message and "tokens of the checkpoint, like" in message
    assert unread(small("model.tokenizer=x")).startswith("model.tokenizer=x is invalid: the run trains")


def test_a_new_model_that_attends_to_both_sides_has_no_causal_objective(small_gpt2, unread):
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    options = [f"+model.config.{name}={size}" for name, size in sizes.items()]
    message = unread(small_gpt2("model.config.model_type=llama", "+model.config.is_causal=false", *options))
    assert message.startswith("model.config is invalid: the tokens of a llama with is_causal=false see those")


def test_a_tokenizer_without_a_token_that_is_needed_is_reported(checkpoint, small, unread):
    cfg = small(f"model.name_or_path={checkpoint}", "model.resize=true")
    lacks = {"a mask": {"eos_token": "</s>"}, "a token to separate": {"mask_token": "<mask>"}}
    for complaint, tokens in lacks.items():
        tokenizer_with_template("$A", **tokens).save_pretrained(checkpoint)
        message = unread(cfg)
        assert f"the tokenizer {checkpoint} has no{complaint[1:]}" in message
    assert message.endswith("for raw text also domains.separator=TOKEN or none")


ENDS = {  # what the files of a checkpoint stop at, and what is said of it
    "the tokenizer's own": ([2, 7], ""),
    "none is known": ([], ""),
    "another token": ([7], "stop at eos_token_id=[7], but its tokenizer ends texts with </s> (2)"),
    "no token": ([2, 99999], "stop at eos_token_id=[2,99999], but its tokenizer has no token 99999"),
}


@pytest.mark.parametrize("kind", ENDS)
def test_other_ends_in_the_files_of_a_checkpoint_than_in_its_tokenizer_are_a_warning(kind, caplog):
    ends, complaint = ENDS[kind]
    tokenizer = train_small_tokenizer()
    assert tokenizer.eos_token_id == 2
    warn_of_other_ends(tokenizer, ends, checkpoint="mine")
    assert len(caplog.messages) == bool(complaint)
    assert complaint in caplog.text


def test_a_start_warns_of_other_ends_in_the_files_of_a_checkpoint(small_gpt2, tmp_path, caplog):
    tokenizer = train_small_tokenizer()
    config = {"model_type": "llama", **SIZES, "max_position_embeddings": 64}
    model = build_model(config, tokenizer, "causal", seed=0)
    model.config.eos_token_id = model.generation_config.eos_token_id = 7
    folder = save_parts(tmp_path / "model", model, tokenizer)
    prepare_run(make_plan(small_gpt2(f"model.name_or_path={folder}")), RunDir(tmp_path / "run"))
    assert f"The files of {folder} stop at eos_token_id=" in caplog.text


@pytest.fixture
def headless(tmp_path):
    """A tiny MPNet of two blocks as sentence-transformers save it: without a language-model head."""
    tokenizer = train_small_tokenizer()
    config = {"model_type": "mpnet", **SIZES, "max_position_embeddings": 40}
    model = build_model(config, tokenizer, "masked", seed=3)
    return save_parts(tmp_path / "headless", model.base_model, tokenizer)


def test_a_checkpoint_without_a_head_is_refused(headless, small, unread):
    option = f"model.name_or_path={headless}"
    assert unread(small(option)).startswith(f"{option} is invalid: no language-model head (5 tensors). Allow")
    assert (
        unread(small(option, "+model.num_hidden_layers=3"))
        == "model.num_hidden_layers=3 is invalid. Allowed: null, or 1 to 2"
    )


@pytest.mark.parametrize("upper", [0, 1])
def test_a_head_is_trained_once_on_the_general_text_and_blocks_are_kept(
    upper, headless, small, start, tmp_path, monkeypatch
):
    cache = tmp_path / "cache"
    options = [f"model.name_or_path={headless}", "order=[law]", "trainer.steps=1", f"cache_dir={cache}"]
    options += [
        "+model.num_hidden_layers=2" if upper else "+model.num_hidden_layers=1",
        "+model.pretraining.head_steps=5",
    ]
    options += [f"+model.pretraining.head_layers={upper}"]
    start(small(*options), tmp_path / "run")

    (completed_folder,) = (path for path in (cache / "base").glob("headless-*") if path.is_dir())
    base = AutoModelForMaskedLM.from_pretrained(completed_folder).state_dict()
    headless_state = AutoModelForMaskedLM.from_pretrained(headless).state_dict()
    random = load_model(headless, "masked").state_dict()
    changed = {name for name in base if not torch.equal(base[name], random[name])}

    blocks = 1 + upper
    assert {name.split(".")[3] for name in base if ".layer." in name} == {*map(str, range(blocks))}
    trained = {name for name in base if "lm_head" in name and "decoder.weight" not in name}
    trained |= {name for name in base if ".layer.1." in name}  # the last block, with head_layers=1
    assert changed == trained and all(torch.equal(base[n], headless_state[n]) for n in {*base} - trained)

    monkeypatch.setattr("cpt.trainer.base_model.pretrain", None)  # another run takes it from the cache
    start(small(*options, "seed=1"), tmp_path / "other")
    assert read_scores(tmp_path / "other")["nll"][0] == read_scores(tmp_path / "run")["nll"][0]


@pytest.mark.parametrize("layers", [None, 1])
def test_a_run_with_added_tokens_exports_and_identifies_their_tokenizer(
    layers, checkpoint, small, start, tmp_path
):
    """Rows of new tokens begin as the mean, also of a base with fewer blocks, which is cached."""
    own_tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    words = AutoTokenizer.from_pretrained(checkpoint)
    words.add_tokens(["contract", "damages"])
    folder = tmp_path / "more"
    words.save_pretrained(folder)
    options = [f"model.name_or_path={checkpoint}", f"model.tokenizer={folder}", "order=[law]", "method=none"]
    options += [f"cache_dir={tmp_path / 'cache'}"]
    if layers is not None:
        options.append(f"+model.num_hidden_layers={layers}")
    run = tmp_path / "run"
    start(small(*options), run)
    table = load_model(checkpoint, "masked").get_input_embeddings().weight
    exported = load_model(run / "model", "masked").get_input_embeddings().weight
    assert len(exported) == len(words) == len(own_tokenizer) + 2
    for number, word in enumerate(("contract", "damages")):
        pieces = own_tokenizer(word, add_special_tokens=False)["input_ids"]
        torch.testing.assert_close(exported[len(own_tokenizer) + number], table[pieces].mean(0))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (run / "model" / name).read_bytes() == (folder / name).read_bytes()

    # The same command finds the run finished; with a tokenizer that has changed it is refused by name.
    start(small(*options), run)
    words.add_tokens(["party"])
    words.save_pretrained(folder)
    with pytest.raises(ValueError, match=f"tokenizer.json of model.tokenizer={folder} changed"):
        start(small(*options), run)
    assert read_scores(run)["base"]["adapted"].endswith(
        f"{len(own_tokenizer) + 2} entries of the tokenizer more"
    )


CHOICES = sorted((path.parent.name, path.stem) for path in ROOT.glob("conf/*/*.yaml"))


def read_complaint(read) -> str:
    with pytest.raises((ValueError, HydraException)) as raised:
        read()
    return find_reason(raised.value)


@pytest.mark.parametrize("options", AT_ONCE)
def test_a_wrong_value_is_reported_with_what_is_allowed(options, composed):
    words = [word.replace("=(", "='('") for word in options.split()]  # as on a command line
    message = read_complaint(lambda: make_plan(composed(*words)))
    assert is_refused(options, message), message


GIVEN = {  # values of required options that are not a text
    "benchmark.tasks": ["a"],
    "budget.kl": 0.1,
    "replay.sources": {"web": {"path": "texts", "ratio": 0.1}},
}


@pytest.mark.slow
@pytest.mark.parametrize(("group", "choice"), CHOICES)
def test_every_choice_of_the_config_is_right(group, choice, composed):
    options = ["model.name_or_path=somewhere"]
    if group == "routing":  # a group within another
        options += ["method=adapter", f"routing@method.routing={choice}"]
    else:
        options.append(f"{group}={choice}")
    if (group, choice) == ("domains", "hub"):  # the catalogue has no default
        options.append("+domains.catalogue.news={path: ag_news}")

    cfg = composed(*options)
    for missing in OmegaConf.missing_keys(cfg):
        OmegaConf.update(cfg, missing, GIVEN.get(missing, "given"))
    if choice == "drift" and group == "budget":  # a budget needs a bound
        cfg.budget.general = 0.1
    assert identity(make_plain_config(cfg))
    if cfg.domains.get("root") == "given":  # not here
        cfg.domains = composed().domains
    assert read_sections(cfg)


def test_the_jobs_of_a_sweep_may_set_what_is_missing(composed, monkeypatch, capsys):
    # The composed config has no settings of Hydra's own, which these two read.
    monkeypatch.setattr(hydra_callback, "check_working_folder", lambda config: None)
    monkeypatch.setattr(hydra_callback, "resolve_sweep_folder", lambda config: None)

    def start(override):
        ConfigCheck().on_multirun_start(composed(override))

    start("domains=texts")
    for wrong in ("trainer.steps=-1", "plan=true"):
        with pytest.raises(SystemExit):
            start(wrong)
        assert f"cpt: {wrong} is invalid" in capsys.readouterr().err


@pytest.mark.skipif(not memory.LINUX, reason="the C heap of Linux")
def test_small_blocks_alone_are_kept_with_gradient_checkpointing(small, tmp_path):
    try:
        for is_enabled, size in ((True, memory.SMALL), (False, memory.ANY_SIZE)):
            prepare_run(
                make_plan(small(f"trainer.gradient_checkpointing={is_enabled}")), RunDir(tmp_path / "run")
            )
            assert memory.kept_size == size
    finally:
        memory.keep_freed_blocks()


def test_a_gpu_that_is_not_there_is_refused_with_the_build_of_torch(unread, small):
    message = unread(small("trainer.accelerator=gpu"))
    assert message.startswith(f"trainer.accelerator=gpu is invalid: torch {torch.__version__} (a build for ")
    assert message.endswith(") finds no GPU. Allowed: auto, cpu")


@pytest.mark.parametrize(("accelerator", "is_warned"), [("auto", True), ("cpu", False)])
def test_unrequested_processes_on_the_cpu_give_a_warning(accelerator, is_warned, caplog):
    trainer = SimpleNamespace(strategy=SimpleNamespace(root_device=torch.device("cpu")), num_devices=4)
    warn_of_cpu_processes(SimpleNamespace(accelerator=accelerator, devices=4), trainer)
    assert ("No GPU found: starting 4 processes on the CPU (trainer.devices=4, " in caplog.text) == is_warned


@pytest.mark.parametrize(
    ("variables", "world_size", "is_told"),
    [
        ({"RANK": "0", "WORLD_SIZE": "4", "LOCAL_RANK": "0"}, 4, True),
        ({"RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1"}, 4, False),
        ({"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}, 1, False),
        ({}, 4, False),  # those that Lightning will start
    ],
)
def test_the_first_process_logs_which_processes_it_waits_for(
    variables, world_size, is_told, caplog, monkeypatch
):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    caplog.set_level("INFO")
    log_awaited_processes(world_size)
    line = "Waiting for 3 further processes of this run (LOCAL_RANK=0 RANK=0 WORLD_SIZE=4); "
    assert len(caplog.messages) == (line in caplog.text) == is_told


def test_a_checkpoint_below_a_path_that_does_not_exist_is_refused_before_torch_is_loaded(small, tmp_path):
    path = str(tmp_path / "nowhere")
    plan = make_plan(small(), run=RunDir(tmp_path / "run"))
    plan = replace(plan, model=replace(plan.model, name_or_path=path))
    with pytest.raises(
        ValueError, match=f"model.name_or_path={path} is invalid: no such folder. Allowed: an"
    ):
        check_base_folder(plan)
    similar = tmp_path / "nowhere_135m"
    similar.mkdir()
    with pytest.raises(ValueError, match=f"Did you mean {similar}\\? Allowed: an"):
        check_base_folder(plan)
    check_base_folder(replace(plan, model=replace(plan.model, name_or_path="owner/name")))


@pytest.mark.parametrize("rank", ["0", "1"])
def test_only_the_first_process_logs_what_the_files_give(
    rank, small, start, corpora, tmp_path, caplog, monkeypatch
):
    root = tmp_path / "texts"
    shutil.copytree(corpora, root)
    (root / "notes.txt").write_text("Of no domain.")
    caplog.set_level(logging.INFO, "cpt")
    monkeypatch.setenv("LOCAL_RANK", rank)
    with pytest.raises(ValueError, match="plan=true is invalid"):
        start(small("plan=true", f"domains.root={root}"), tmp_path / "run")
    assert ("Ignoring 1 text file " in caplog.text) == (rank == "0") == bool(caplog.messages)


@pytest.mark.parametrize("rank", ["0", "1"])
def test_only_the_first_process_warns_but_of_its_node(rank, small, start, tmp_path, caplog, monkeypatch):
    def warn(plan, run):
        with open_run_dir(plan, run):
            logging.getLogger("cpt.trainer.log_settings").warning("of the settings")
            logging.getLogger("cpt.core.cache").warning("of the cache of this node")
        raise ValueError("as far as this")

    monkeypatch.setattr("cpt.train.train_unless_finished", warn)
    monkeypatch.setenv("LOCAL_RANK", rank)
    with pytest.raises(ValueError, match="as far as this"):
        start(small(), tmp_path)
    warnings = (
        ["of the cache of this node"] if rank == "1" else ["of the settings", "of the cache of this node"]
    )
    assert caplog.messages[-len(warnings) :] == warnings and caplog.text.count("of the settings") == int(
        rank == "0"
    )


def test_a_model_whose_layers_a_choice_does_not_know_is_refused_with_the_choice(monkeypatch):
    monkeypatch.setattr(check_model, "build_context", lambda *arguments, **options: None)

    def make(context):
        raise UnknownLayersError("block.0: heads cannot be identified")

    model = SimpleNamespace(config=SimpleNamespace(model_type="deepseek_v3"))
    for mask, context in (("migu", "with mask=migu for a deepseek_v3"), ("none", "for a deepseek_v3")):
        plan = SimpleNamespace(
            method=SimpleNamespace(make=make),
            names={"method": "ncl", "mask": mask},
            trainer=SimpleNamespace(precision="32-true"),
        )
        with pytest.raises(ValueError, match=f"method=ncl is invalid {context}: block.0: "):
            check_model.try_method(plan, model, None)


@pytest.mark.parametrize(
    ("freeze", "message"),
    [
        (Freeze(embeddings=True, layers=0), "freeze.embeddings=true is invalid: it leaves nothing"),
        (Freeze(embeddings=True, layers=1), "freeze.layers=1 is invalid: it leaves nothing"),
        (Freeze(embeddings=True, layers=1, trainable="norms"), "trainable=norms is invalid: it leaves noth"),
    ],
)
def test_options_that_freeze_all_that_a_method_trains_are_refused(freeze, message):
    model = torch.nn.Embedding(3, 2)  # as with an adapter on the embedding alone
    plan = SimpleNamespace(freeze=freeze, names={"method": "peft"})
    check_model.check_trainable(plan, SimpleNamespace(model=model, frozen=[]))
    with pytest.raises(ValueError, match=f"^{message}"):
        check_model.check_trainable(plan, SimpleNamespace(model=model, frozen=[model.weight]))


def test_options_of_another_kind_of_model_than_that_of_init_from_are_explained():
    model = SimpleNamespace(name="tiny_modernbert", mlm_probability=0.3, mean_span=None)
    for earlier_run, allowed in (
        (None, "null"),
        ("out/a", "null, or model=hf model.name_or_path=out/a/model"),
    ):
        plan = SimpleNamespace(
            model=model, source=SimpleNamespace(encoding=None), settings={"init_from": earlier_run}
        )
        with pytest.raises(ValueError, match=f"the model is causal. Allowed: {allowed}$"):
            check_model.check_objective(plan, "causal")
