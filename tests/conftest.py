"""What the tests share: small texts, a small model, and runs in this process."""

from __future__ import annotations

import functools
import gc
import logging
import os
import pickle
import random
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("WANDB_MODE", "offline")
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")  # tests/test_gpu.py says how to have one

import pytest

from tests.support.campaign import is_campaign_row
from tests.support.slow_tests import name_test, read_slow_tests

if TYPE_CHECKING:  # the process that hands out the tests reads this file too, and needs no torch
    from omegaconf import DictConfig

ROOT = Path(__file__).parent.parent
SHARED = ROOT.parent / "shared"
GOLDEN = SHARED / "golden"  # numbers of the authors' code
needs_golden = pytest.mark.skipif(not GOLDEN.exists(), reason="the authors' numbers are not here")
VOCABULARIES = {
    "general": "the house stands near a river and people walk along its quiet old streets every morning",
    "law": "the court finds that a party to this contract must pay damages under section four of the act",
    "food": "we ordered fresh pasta with basil and the waiter brought warm bread and a sweet lemon dessert",
    "space": "a telescope measures faint light from distant galaxies whose dust hides young massive stars",
}
SIZES = """
model.max_seq_length=16 model.vocab_size=300 model.config.hidden_size=32 model.config.intermediate_size=48
model.config.num_hidden_layers=2 model.config.num_attention_heads=2
model.pretraining.steps=6 model.pretraining.batch_size=8
trainer.steps=6 trainer.batch_size=8 trainer.eval_batch_size=64 trainer.importance_samples=16
trainer.checkpoint_every_n_steps=2 trainer.log_every_n_steps=2 trainer.precision=32-true logger=none
"""
SMALL = SIZES.split()
SMALL_GPT2 = ["model=tiny_gpt2", *(option for option in SMALL if not option.startswith("model.config."))]
SMALL_GPT2 += ["model.config.n_embd=32", "model.config.n_head=2"]
SMALL_T5 = ["model=tiny_t5", "model.mlm_probability=0.15", "model.mean_span=3"]
SMALL_T5 += [option for option in SMALL if not option.startswith(("model.config.", "model.vocab_size"))]
SMALL_T5 += [f"model.config.{size}" for size in ("d_model=32", "d_kv=16", "d_ff=48", "num_heads=2")]
SMALL_T5 += ["model.vocab_size=400"]
LEARNING = {"start", "small", "small_gpt2", "small_t5", "cache"}  # fixtures of tests in which a model learns


def pytest_configure() -> None:
    """Has programs that tests start heed signals, though these tests may be started where some are ignored:
    in the background of a shell, by nohup."""
    if threading.current_thread() is not threading.main_thread():
        return  # Python sets handlers in the main thread only
    for signal_number in (signal.SIGINT, signal.SIGHUP):
        if signal.getsignal(signal_number) == signal.SIG_IGN:
            signal.signal(signal_number, signal.default_int_handler)


@pytest.hookimpl(tryfirst=True)  # before what -m leaves out is found
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests in which a model learns are slow, whatever they look at, and so are those of the campaign and
    those that were measured as slow: `-m "not slow"` leaves them out. Rows that others stand for are the
    campaign's."""
    slow_tests = read_slow_tests()
    for item in items:
        if is_campaign_row(item.nodeid):
            item.add_marker(pytest.mark.campaign)

        # A parameter may be the name of a fixture that the test asks for by request.getfixturevalue.
        parameters = item.callspec.params.values() if hasattr(item, "callspec") else ()
        names = {*getattr(item, "fixturenames", ()), *map(str, parameters)}
        is_measured_slow = name_test(item.nodeid) in slow_tests
        if names & LEARNING or is_measured_slow or item.get_closest_marker("campaign"):
            item.add_marker(pytest.mark.slow)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Excludes the imported modules from garbage collection, which took a tenth of the time of all tests."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.set_threshold(50_000, 20, 50)
        gc.enable()


@pytest.fixture(scope="session", autouse=True)
def fast_libraries() -> None:
    import torch

    import cpt.core.naming  # noqa: F401  (registers the resolvers)
    from tests.support.fast_libraries import make_libraries_fast

    torch.set_num_threads(1)
    make_libraries_fast()


def sentences(words: str, *, count: int, seed: int, size: tuple[int, int] = (8, 30)) -> list[str]:
    draw = random.Random(seed)
    return [
        " ".join(draw.choices(words.split(), k=draw.randint(*size))) + f" {number}."
        for number in range(count)
    ]


@pytest.fixture(scope="session")
def corpora(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("corpora")
    for seed, (name, words) in enumerate(VOCABULARIES.items()):
        (root / name).mkdir()
        (root / name / "all.txt").write_text("\n".join(sentences(words, count=120, seed=seed)) + "\n")
    return root


@pytest.fixture(autouse=True)
def restored_log_level() -> Iterator[None]:
    """A run that is not the first process raises the level, which would silence the next test."""
    loggers = [logging.getLogger("cpt"), logging.getLogger("cpt.core.cache")]
    levels = [logger.level for logger in loggers]
    yield
    for logger, level in zip(loggers, levels, strict=True):
        logger.setLevel(level)


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def composed() -> Iterator[Callable[..., DictConfig]]:
    from hydra import initialize_config_dir

    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        yield compose_in_two_steps


def compose_in_two_steps(*overrides: str) -> DictConfig:
    """The config as Hydra composes it, in its two steps: to choose from the groups takes 0.1 s and is done
    once for each choice, to set values takes almost no time."""
    from hydra._internal.config_loader_impl import ConfigLoaderImpl
    from hydra.core.override_parser.overrides_parser import OverridesParser

    choices = tuple(override for override in overrides if is_choice(override))
    values = [override for override in overrides if override not in choices]
    cfg = pickle.loads(compose_choices(choices))  # a copy in a sixth of deepcopy's time
    ConfigLoaderImpl._apply_overrides_to_config(OverridesParser.create().parse_overrides(values), cfg)
    return cfg


def is_choice(override: str) -> bool:
    key = override.lstrip("+~").partition("=")[0].partition("@")[0]
    return (ROOT / "conf" / key).is_dir() or key.startswith("hydra")


@functools.cache
def compose_choices(choices: tuple[str, ...]) -> bytes:
    from hydra import compose

    import cpt.core.naming  # noqa: F401  (registers the resolvers)

    return pickle.dumps(compose("config", overrides=list(choices)))


@pytest.fixture
def killing(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """A function that adds a callback to the trainers of later stages, or none: `killing(Killer(step=3))`."""
    from cpt.trainer import stage  # not at the start of every test

    make_trainer = stage.make_trainer

    def add_killer(killer: Any) -> None:
        def make_trainer_with_killer(options: Any, *, callbacks: Any, **arguments: Any) -> Any:
            killers = [] if killer is None else [killer]
            return make_trainer(options, callbacks=[*callbacks, *killers], **arguments)

        monkeypatch.setattr(stage, "make_trainer", make_trainer_with_killer)

    return add_killer


def make_config_fixture(name: str, sizes: list[str]) -> Any:
    """A fixture: the config of a run that takes a second: the small texts, a small model, a few steps."""

    @pytest.fixture(name=name)
    def config(composed: Callable[..., DictConfig], corpora: Path, cache: Path) -> Callable[..., DictConfig]:
        texts = ["domains=texts", f"domains.root={corpora}", f"cache_dir={cache}"]
        return lambda *overrides: composed(*texts, *sizes, *overrides)

    return config


small = make_config_fixture("small", SMALL)
small_gpt2 = make_config_fixture("small_gpt2", SMALL_GPT2)  # a causal model
small_t5 = make_config_fixture("small_t5", SMALL_T5)  # of encoder and decoder


@pytest.fixture
def no_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    """They take a third of a small run; tests/reporting/test_snapshots.py draws them."""
    names = ["matrix", "text_curves", "training", "monitor", "modules", "overlap", "layers", "distributions"]
    for name in names:
        monkeypatch.setattr(f"cpt.reporting.run_figures.draw_{name}", lambda *args, **kwargs: None)


@pytest.fixture
def start(no_pictures: None) -> Callable[[DictConfig, Path], Any]:
    def run(cfg: DictConfig, folder: Path) -> Any:
        from cpt.train import train

        return train(cfg, run_dir=folder)

    return run
