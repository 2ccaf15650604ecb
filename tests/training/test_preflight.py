"""What torch, Lightning and transformers say of a config is told in a line, before any text is read."""

import json
import shutil

import pytest
from omegaconf import OmegaConf
from transformers import AutoTokenizer

from cpt.core.errors import reason
from cpt.data.corpora import Corpora
from cpt.models.loading import build
from cpt.models.tokenizers import train_tokenizer
from cpt.training.plan import planned
from cpt.training.preflight import checked

THEIRS = "lightning.pytorch.callbacks"
SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 48}

WRONG = {
    "+method.tau=1": "method.tau is not known; allowed: none",
    "method=das +method.temprature=1": "method.temprature is not known; did you mean method.temperature?",
    "method=ewc +method.seed=3": "method.seed is not known; allowed: method.strength, method.estimator",
    "mask=migu +mask.foo=1": "mask.foo=1 has no class; allowed: null, or +mask.foo._target_=module",
    "method=demix +method.routing.foo=1": "method.routing.foo is not known; allowed: method.routing.learned",
    "method=adapter method.reduction=100000": "method.reduction=100000; allowed: 1 to 32, the model's hidde",
    "method=hat method.form=adapter method.reduction=33": "method.reduction=33; allowed: 1 to 32",
    "method=prompt method.tokens=497": "method.tokens=497; allowed: a whole number, 0 to 496, the pos",
    "+optim.nesterof=true": "optim.nesterof is not known; allowed: optim.lr",
    "optim=sgd +optim.nesterov=true": "optim: Nesterov momentum requires a momentum and zero dampening",
    "optim._target_=torch.optim.Nothing": "optim._target_=torch.optim.Nothing: module 'torch.optim' has no",
    "model.base.optim._target_=nowhere.Adam": "model.base.optim._target_=nowhere.Adam: No module named 'now",
    "model.config.num_attention_heads=5": "model.config: The hidden size (32) is not a multiple",
    "model.config.model_type=unheard": "model.config: Unrecognized model identifier: unheard",
    "model.config=null": "model.checkpoint=null of tiny_modernbert is nothing to start from; allowed",
    "model.mask_rate=null": "model.mask_rate=null; allowed: above 0 and below 1, as the model is masked",
    "model.objective=causal": "model.objective=causal does not go with a modernbert model; allowed: masked",
    "model.length=9999": "model.length=9999; allowed: 2 to 512, the positions of this modernbert",
    "freeze.layers=9": "freeze.layers=9; allowed: 0 to 2, the model's blocks",
    "trainer.accelerator=tpu": "trainer.accelerator=tpu trainer.devices=1 trainer.strategy=auto",
    "trainer.accelerator=abc": "trainer.accelerator=abc trainer.devices=1 trainer.strategy=auto trainer.pre",
    "callbacks=lr_monitor": "callbacks.lr_monitor=LearningRateMonitor writes to loggers, but there is none",
    "+callbacks.x._target_=nowhere.Class": "callbacks.x._target_=nowhere.Class: No module named 'nowhere'",
    "+callbacks.x._target_=builtins.dict": "callbacks.x._target_=builtins.dict; allowed: a lightning.pytorch",
    "callbacks=lr_monitor +callbacks.lr_monitor.foo=1": "callbacks.lr_monitor.foo is not known; allowed: ca",
    f"+callbacks.x={{_target_: {THEIRS}.EarlyStopping, monitor: a}}": "callbacks.x=EarlyStopping is not",
    f"+callbacks.x._target_={THEIRS}.ModelCheckpoint": "callbacks.x=ModelCheckpoint is not taken: trainer.c",
    f"+callbacks.x._target_={THEIRS}.TQDMProgressBar": "callbacks.x=TQDMProgressBar is not taken: cpt has",
    f"+logger.x._target_={THEIRS}.Timer": f"logger.x._target_={THEIRS}.Timer; allowed: a lightning.pytorch",
}


def overrides(given: str) -> list[str]:
    return [given] if "{" in given else given.split()


@pytest.fixture
def unread(monkeypatch, start, tmp_path):
    """A start whose texts may not be read."""

    def forbidden(*args, **kwargs):
        raise AssertionError("texts were read")

    monkeypatch.setattr(Corpora, "read", forbidden)
    return lambda cfg: start(cfg, tmp_path / "run")


@pytest.mark.parametrize("given", WRONG)
def test_what_only_the_libraries_know_is_told_before_any_text_is_read(given, small, unread):
    with pytest.raises(ValueError) as raised:
        unread(small(*overrides(given)))
    assert reason(raised.value).startswith(WRONG[given])


@pytest.mark.parametrize(("logger", "package"), [("tensorboard", "tensorboard"), ("mlflow", "mlflow")])
def test_a_logger_whose_package_is_missing_is_told(logger, package, small, unread, monkeypatch):
    kind = {"tensorboard": "TensorBoardLogger", "mlflow": "MLFlowLogger"}[logger]

    def lacking(self, *args, **kwargs):
        raise ModuleNotFoundError(f"Requirement '{package}' not met.\n HINT: Try running pip install")

    monkeypatch.setattr(f"lightning.pytorch.loggers.{kind}.__init__", lacking)
    with pytest.raises(ValueError, match=f"^logger.{logger}: Requirement '{package}' not met") as raised:
        unread(small(f"logger={logger}"))
    assert "\n" not in str(raised.value)


def test_what_is_right_is_built(small, tmp_path):
    cfg = small("callbacks=lr_monitor", "logger=csv", "method=lora", "mask=migu")
    ready = checked(planned(cfg), tmp_path)
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
    for part in (build(config, words, "masked", seed=0), words):
        part.save_pretrained(folder)
    return folder


@pytest.fixture
def checkpoint(saved, tmp_path):
    return shutil.copytree(saved, tmp_path / "checkpoint")


def test_a_truncated_checkpoint_is_told(checkpoint, small, unread):
    weights = checkpoint / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(ValueError, match=r"model.safetensors is truncated or damaged \(.*\); bring the"):
        unread(small(f"model.checkpoint={checkpoint}"))


def test_a_checkpoint_without_tokenizer_is_told(checkpoint, small, unread):
    for path in checkpoint.glob("tokenizer*"):
        path.unlink()
    with pytest.raises(ValueError, match=r"model.checkpoint=.*checkpoint has no tokenizer; allowed: "):
        unread(small(f"model.checkpoint={checkpoint}"))


def test_a_damaged_tokenizer_is_told(checkpoint, small, unread):
    (checkpoint / "tokenizer.json").write_text("{")
    with pytest.raises(ValueError, match=r"^the tokenizer of model.checkpoint=.*checkpoint: ") as raised:
        unread(small(f"model.checkpoint={checkpoint}"))
    assert "\n" not in reason(raised.value)


def test_a_tokenizer_larger_than_the_embedding_is_told_before_any_text_is_read(checkpoint, small, unread):
    words = AutoTokenizer.from_pretrained(checkpoint)
    rows = len(words)
    words.add_tokens(["contract", "section"])
    words.save_pretrained(checkpoint)
    expected = f"has {rows + 2} entries, its embedding {rows} rows; allowed: model.resize=true"
    with pytest.raises(ValueError, match=expected):
        unread(small(f"model.checkpoint={checkpoint}"))
    checked(planned(small(f"model.checkpoint={checkpoint}", "model.resize=true")), checkpoint)


@pytest.mark.parametrize(
    ("attach", "told"),
    [
        (None, "it starts with the part of food alone: cpt.adapters.export.load("),
        ("cpt.adapters.bottleneck.attach", "it starts without any of them: cpt.adapters.export.load("),
    ],
)
def test_an_exported_model_in_parts_says_which_is_used(attach, told, checkpoint, small, tmp_path, caplog):
    index = {"attach": attach, "options": {}, "parts": ["law", "food"]}
    (checkpoint / "parts.json").write_text(json.dumps(index))
    checked(planned(small(f"model.checkpoint={checkpoint}")), tmp_path)
    (line,) = [record.getMessage() for record in caplog.records if "has parts for" in record.getMessage()]
    assert f"{checkpoint} has parts for law, food; {told}" in line


def test_a_whole_checkpoint_says_nothing(checkpoint, small, tmp_path, caplog):
    checked(planned(small(f"model.checkpoint={checkpoint}")), tmp_path)
    assert not [record for record in caplog.records if record.name.startswith("cpt")]


def test_an_older_model_file_without_the_new_key_is_taken(small, tmp_path):
    cfg = small()
    OmegaConf.set_struct(cfg, False)
    del cfg.model.resize
    assert checked(planned(cfg), tmp_path).callbacks == {}
