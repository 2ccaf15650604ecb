"""What a config may say: every wrong value, key and combination in one line, before any text is read."""

import importlib
import inspect
import subprocess
import sys
from dataclasses import fields

import pytest
from hydra.errors import HydraException
from omegaconf import OmegaConf

from cpt.core.errors import reason
from cpt.core.options import Options, options_of
from cpt.core.rules import MAPPING, Rule, one_of, or_null, some_of
from cpt.core.sections import GIVEN
from cpt.training import lightning_options
from cpt.training import options as run_options
from cpt.training.checks import read_sections
from cpt.training.plan import planned
from tests.conftest import ROOT

CHOICES = sorted((path.parent.name, path.stem) for path in ROOT.glob("conf/*/*.yaml"))
SHARE, WHOLE, BOOL = "0 to 1", "a whole number, 1 or more", "true, false"
BUDGET = "is not taken: trainer.steps, trainer.epochs or trainer.tokens say"
SCORED = "is not taken: every domain is scored as a whole"

# What is given, and what is said of it. Nothing here reads text or needs torch.
WRONG = {
    "seed=abc": "seed=abc; allowed: a whole number, 0 or more",
    "seed=1.5": "seed=1.5; allowed: a whole number, 0 or more",
    "seed=null": "seed=null; allowed: a whole number, 0 or more",
    "seed=true": "seed=true; allowed: a whole number, 0 or more",
    "name=../../x": "name=../../x; allowed: a folder below outputs/",
    "name=a/../../x": "name=a/../../x; allowed: a folder below outputs/",
    "name=/x": "name=/x; allowed: a folder below outputs/",
    "name=null": "name=null; allowed: a folder below outputs/",
    "order=true": "order=true; allowed: the number of a named order, reverse, random, or a list",
    "order=1.5": "order=1.5; allowed: the number of a named order",
    "objective=5": "objective=5; allowed: METRIC.UNIT, or a list of such",
    "freeze=null": "freeze=null; allowed: keys with values",
    "freeze.embeddings=1": f"freeze.embeddings=1; allowed: {BOOL}",
    "+freeze.heads=1": "freeze.heads is not known; allowed: freeze.embeddings, freeze.layers",
    "keep_stages=abc": f"keep_stages=abc; allowed: {BOOL}",
    "cache_dir=null": "cache_dir=null; allowed: a folder",
    "tags=a": "tags=a; allowed: a list of texts, 1 to 64 characters each",
    "+unknown=1": "unknown is not known; allowed: name, variant, ",
    "+callback.x=1": "callback is not known; did you mean callbacks? allowed: name, variant, ",
    "~method": "method is missing; allowed: method=…, one of conf/method",
    "+callbacks.early.patience=3": "callbacks.early={'patience': 3} has no class; allowed: null, or +callba",
    "+logger.mine=5": "logger.mine=5 has no class; allowed: null, or +logger.mine._target_=module.Class",
    "logger.mode=sometimes": "logger.mode=sometimes; allowed: online, offline, disabled",
    "logger.csv=abc": f"logger.csv=abc; allowed: {BOOL}",
    "trainer.steps=true": f"trainer.steps=true; allowed: null or {WHOLE}",
    "trainer.steps=[1]": f"trainer.steps=[1]; allowed: null or {WHOLE}",
    "trainer.steps=1.5": f"trainer.steps=1.5; allowed: null or {WHOLE}",
    "trainer.batch_size=abc": f"trainer.batch_size=abc; allowed: {WHOLE}",
    "trainer.batch_size=8.0": f"trainer.batch_size=8.0; allowed: {WHOLE}",
    "trainer.gradient_clip_val=-1": "trainer.gradient_clip_val=-1; allowed: null or 0 or more",
    "trainer.gradient_clip_val=nan": "trainer.gradient_clip_val=nan; allowed: null or 0 or more",
    "trainer.checkpoint_every=1.5": f"trainer.checkpoint_every=1.5; allowed: {WHOLE}",
    "trainer.log_every_n_steps=0": f"trainer.log_every_n_steps=0; allowed: {WHOLE}",
    "trainer.strategy=fsdp": "trainer.strategy=fsdp; allowed: auto, ddp, ddp_find_unused_parameters_true, "
    "ddp_find_unused_parameters_false",
    "trainer.workers=abc": "trainer.workers=abc; allowed: a whole number, 0 or more",
    "trainer.devices=0": "trainer.devices=0; allowed: 1, 2, …; auto or -1 for all; a list like [0,2]",
    "trainer.devices=true": "trainer.devices=true; allowed: 1, 2, …",
    "trainer.precision=8": "trainer.precision=8; allowed: 32-true, 32, 16-mixed, bf16-mixed",
    "+trainer.max_time=00:00:10": f"trainer.max_time=00:00:10 {BUDGET}",
    "+trainer.max_epochs=1": f"trainer.max_epochs=1 {BUDGET}",
    "+trainer.max_steps=1": f"trainer.max_steps=1 {BUDGET}",
    "+trainer.limit_train_batches=0": f"trainer.limit_train_batches=0 {BUDGET}",
    "+trainer.overfit_batches=1": f"trainer.overfit_batches=1 {BUDGET}",
    "+trainer.fast_dev_run=true": f"trainer.fast_dev_run=true {BUDGET}",
    "+trainer.limit_val_batches=1": f"trainer.limit_val_batches=1 {SCORED}",
    "+trainer.val_check_interval=1": f"trainer.val_check_interval=1 {SCORED}",
    "+trainer.callbacks=[]": "trainer.callbacks=[] is not taken: callbacks=…, or '+callbacks.my._target_=",
    "+trainer.logger=false": "trainer.logger=false is not taken: logger=…, or '+logger.my._target_=",
    "+trainer.default_root_dir=x": "trainer.default_root_dir=x is not taken: hydra.run.dir=…",
    "+trainer.enable_checkpointing=true": "trainer.enable_checkpointing=true is not taken: trainer.checkpoin",
    "optim.lr=abc": "optim.lr=abc; allowed: 0 or more",
    "optim.lr=-1": "optim.lr=-1; allowed: 0 or more",
    "optim.betas=[0.9]": "optim.betas=[0.9]; allowed: two numbers, 0 or more and below 1",
    "schedule.warmup=2": f"schedule.warmup=2; allowed: {SHARE}",
    "schedule.warmup=abc": f"schedule.warmup=abc; allowed: {SHARE}",
    "+schedule.warmpu=1": "schedule.warmpu is not known; did you mean schedule.warmup? allowed: schedule.war",
    "model.lr=abc": "model.lr=abc; allowed: 0 or more",
    "model.lr=null": "model.lr=null; allowed: 0 or more",
    "model.length=abc": "model.length=abc; allowed: a whole number, 2 or more",
    "model.mask_rate=abc": "model.mask_rate=abc; allowed: null or above 0 and below 1",
    "model.vocabulary=-1": "model.vocabulary=-1; allowed: null or a whole number, 261 or more",
    "model.config.hidden_size=0": f"model.config.hidden_size=0; allowed: {WHOLE}",
    "model.base.warmup=5": f"model.base.warmup=5; allowed: {SHARE}",
    "model.base.steps=abc": "model.base.steps=abc; allowed: a whole number, 0 or more",
    "model.base.optim.lr=abc": "model.base.optim.lr=abc; allowed: 0 or more",
    "model.base=5": "model.base=5; allowed: null or keys with values",
    "model.resize=5": f"model.resize=5; allowed: {BOOL}",
    "+model.lenght=5": "model.lenght is not known; did you mean model.length? allowed: model.name",
    "domains.packages=5": "domains.packages=5; allowed: keys with values",
    "domains.orders=5": "domains.orders=5; allowed: null or a list of orders like [[a,b],[b,a]]",
    "domains.held_out.valid=abc": "domains.held_out.valid=abc; allowed: shares above 0 and below 0.5",
    "+domains.colunm=x domains=texts domains.root=.": "domains.colunm is not known; did you mean domains.col",
    "endtask=submodules endtask.seeds=5": "endtask.seeds=5; allowed: a list of different whole numbers",
    "endtask=submodules endtask.tasks=5": "endtask.tasks=5; allowed: null or for each task its own values",
    "endtask=submodules +endtask.tasks.pandas=5": "endtask.tasks={'pandas': 5}; allowed: null or for each t",
    "method=adapter method.reduction=0": f"method.reduction=0; allowed: {WHOLE}",
    "method=adapter method.per_domain=1": f"method.per_domain=1; allowed: {BOOL}",
    "method=das method.units=[head]": "method.units=[head]; allowed: one or more of heads, neurons, out",
    "method=das method.general=x": "method.general=x; allowed: null or logits, hidden",
    "method=derpp method.memory_bytes=5": "method.memory=512 and memory_bytes=5; allowed: exactly one",
    "method=hat method.units=[]": "method.shared=frozen leaves nothing to train without units",
    "method=lora method.r=abc": f"method.r=abc; allowed: {WHOLE}",
    "method=lora method.targets=(": "method.targets=(; allowed: all-linear, a regular expression, or a list",
    "method=lora method.rate=abc": "method.rate=abc; allowed: 0 or more",
    "method=migu method.mask.threshold=1": "method.mask.threshold=1; allowed: 0 or more and below",
    "method=replay method.mixture.past=2": "method.mixture.past=2; allowed: 0 or more and below 1",
    "mask=migu mask.migu.acts_on=x": "mask.migu.acts_on=x; allowed: gradient, update, frozen",
    "method=demix method.routing.top_k=0": f"method.routing.top_k=0; allowed: null or {WHOLE}",
}


def told(cfg, look) -> str:
    with pytest.raises((ValueError, HydraException)) as raised:
        look(cfg)
    return reason(raised.value)


def overrides(given: str) -> list[str]:
    """Of what stands between quotes on a command line."""
    return [
        f"{key}='{value}'" if value == "(" else f"{key}{sign}{value}" for key, sign, value in split(given)
    ]


def split(given: str) -> list[tuple[str, str, str]]:
    return [each.partition("=") for each in given.split()]


@pytest.mark.parametrize("given", WRONG)
def test_a_wrong_value_is_told_with_what_is_allowed(given, composed):
    assert told(composed(*overrides(given)), planned).startswith(WRONG[given])


def test_a_misspelt_name_of_lightnings_trainer_is_told_with_what_was_meant(composed):
    expected = "trainer.detect_anamoly is not known; did you mean trainer.detect_anomaly? allowed: what conf/"
    assert told(composed("+trainer.detect_anamoly=true"), read_sections).startswith(expected)


@pytest.mark.parametrize(
    "given",
    [
        "seed=3 name=sizes/small tags=[a,b] order=[pandas,sympy] trainer.steps=1e3 optim.lr=0",
        "+trainer.detect_anomaly=true +trainer.deterministic=true trainer.gradient_clip_val=0",
        "trainer.devices=auto trainer.precision=bf16-mixed trainer.log_every_n_steps=1",
        "trainer.steps=null trainer.tokens=1e6 objective=[LC.nats,FG.nats] freeze.layers=1",
        "method=das method.general=null method=das method.units=[tokens] domains.held_out.most=3",
        "endtask=submodules +endtask.tasks.pandas=null endtask.seeds=[4]",
        "+method.rate=2 +model.config.attention_dropout=0.1 +domains.packages.torch=[torch]",
        "model.resize=true schedule.warmup=1",
        "callbacks=[lr_monitor,device_stats] logger=[csv,wandb] logger.mode=online",
        "+dim=48 model.config.hidden_size=${dim}",
    ],
)
def test_what_may_be_said(given, composed):
    assert planned(composed(*overrides(given))).order


@pytest.mark.parametrize(("group", "choice"), CHOICES)
def test_every_choice_of_the_config_is_right(group, choice, composed):
    chosen = {"routing": ["method=adapter", f"routing@method.routing={choice}"]}.get(
        group, [f"{group}={choice}"]
    )
    hub = ["+domains.catalogue.news={path: ag_news}"] * (choice == "hub" and group == "domains")
    assert read_sections(composed(*chosen, *hub, "model.checkpoint=somewhere")).run


@pytest.mark.parametrize("choice", [name for group, name in CHOICES if group == "method"])
def test_every_option_of_every_method_is_typed_with_a_help_and_a_rule(choice, composed):
    method = composed(f"method={choice}").method
    kind = options_of(method._target_, place="method") or Options
    assert set(method) - set(GIVEN) == {each.name for each in fields(kind)}
    for each in fields(kind):
        assert each.metadata["help"] and each.type
        assert each.metadata["rule"] or "_target_" in method[each.name]


@pytest.mark.parametrize("choice", [name for group, name in CHOICES if group == "method"])
def test_the_options_that_are_had_at_once_are_those_of_the_file(choice, composed):
    target = composed(f"method={choice}").method._target_
    at_once, whole = options_of(target, place="method"), importlib.import_module(target.rpartition(".")[0])
    theirs = getattr(whole, f"{target.rpartition('.')[2]}Options", None)
    assert (at_once is None) == (theirs is None)
    if theirs:
        assert [(f.name, f.metadata["help"]) for f in fields(at_once)] == [
            (f.name, f.metadata["help"]) for f in fields(theirs)
        ]


def test_every_option_of_lightnings_trainer_is_decided_on():
    from lightning import Trainer

    own = {each.name for each in fields(run_options.TrainerOptions)}
    decided = {*own, *lightning_options.REFUSED, *lightning_options.PASSED}
    assert set(inspect.signature(Trainer).parameters) <= decided
    assert not own & set(lightning_options.REFUSED)


def test_the_precisions_are_lightnings():
    from typing import get_args

    from lightning.fabric.connector import (
        _PRECISION_INPUT_INT,
        _PRECISION_INPUT_STR,
        _PRECISION_INPUT_STR_ALIAS,
    )

    theirs = [*get_args(_PRECISION_INPUT_INT), *get_args(_PRECISION_INPUT_STR)]
    assert set(run_options.PRECISIONS) == {*theirs, *get_args(_PRECISION_INPUT_STR_ALIAS)}


def test_what_a_sweep_gives_later_is_not_missed(composed):
    found = read_sections(composed("domains=texts", "model=checkpoint"))
    assert (found.source, found.model) == (None, None) and found.trainer is not None


def test_rules_without_rows_say_what_they_allow():
    for rule, good, bad in (
        (one_of("a", 1), ["a", 1], ["b", True, "1", None]),
        (or_null(one_of("a")), [None, "a"], ["null"]),
        (some_of("a", "b"), [["a"], ["b", "a"]], [[], ["a", "a"], "a", ["c"]]),
        (some_of("a", none=True), [[]], [None]),
        (MAPPING, [{}], [[], None]),
    ):
        assert all(rule.allows(value) for value in good), rule
        assert not any(rule.allows(value) for value in bad), rule
    with pytest.raises(ValueError, match="^k=false; allowed: x$"):
        Rule(lambda value: False, "x").check("k", False)


def ran(*arguments: str, folder) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "run.py"), *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize(
    "arguments",
    [
        "name=../../x",
        "+unknown=1",
        "-m seed=0,1 schedule.warmup=2",
        "-m name=../x seed=0,1",
    ],
)
def test_a_wrong_start_leaves_nothing(arguments, tmp_path):
    place = tmp_path / "a" / "b"
    place.mkdir(parents=True)
    ended = ran(*arguments.split(), folder=place)
    assert (ended.returncode, ended.stdout) == (1, "")
    assert ended.stderr.startswith("cpt: ") and len(ended.stderr.splitlines()) == 1
    assert [path for path in tmp_path.rglob("*") if path not in (place, place.parent)] == []


def test_the_checks_need_no_torch():
    program = (
        f"import sys; sys.path.insert(0, {str(ROOT)!r})\n"
        "from hydra import compose, initialize_config_dir\n"
        "import cpt.core.config\nfrom cpt.training.checks import read_sections\n"
        f"with initialize_config_dir({str(ROOT / 'conf')!r}, version_base='1.3'):\n"
        "    for given in (['method=das', 'replay=past', '+trainer.detect_anomaly=true'], ['optim=sgd']):\n"
        "        read_sections(compose('config', overrides=given))\n"
        "print({'torch', 'lightning', 'datasets', 'transformers'} & set(sys.modules))"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert ended.stdout == "set()\n", ended.stderr


def test_a_key_that_others_are_made_of_has_an_effect(composed):
    read_sections(composed("+width=48", "model.config.hidden_size=${width}"))
    assert told(composed("+width=48"), read_sections).startswith("width is not known")


def test_defaults_are_read_once_from_the_config():
    from cpt.training.checks import top_level

    text = OmegaConf.load(ROOT / "conf" / "config.yaml")
    assert {key for key in text if key not in ("defaults", "hydra")} <= set(top_level())
