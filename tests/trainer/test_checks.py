"""What a config may say: every wrong value, key and combination in one line, before any text is read."""

import subprocess
import sys

import pytest
from hydra.errors import HydraException
from omegaconf import OmegaConf

from cpt.core.config import identity, plain_config
from cpt.core.errors import reason
from cpt.trainer.plan import make_plan, read_sections
from tests.conftest import ROOT
from tests.support.processes import ran
from tests.support.wrong_options import AT_ONCE

CHOICES = sorted((path.parent.name, path.stem) for path in ROOT.glob("conf/*/*.yaml"))


def told(look) -> str:
    with pytest.raises((ValueError, HydraException)) as raised:
        look()
    return reason(raised.value)


@pytest.mark.parametrize("given", AT_ONCE)
def test_a_wrong_value_is_told_with_what_is_allowed(given, composed):
    words = [each.replace("=(", "='('") for each in given.split()]  # as on a command line
    assert told(lambda: make_plan(composed(*words))).startswith(AT_ONCE[given])


MISSPELT = {
    "~monitor.every": "~monitor.every: there is no monitor.every",
    "method='${no.such}'": "${no.such} is not known where a choice is made of it",
    "+trainer.detect_anamoly=true": "trainer.detect_anamoly is not known; did you mean",
    "+width=48": "width is not known",
}


@pytest.mark.parametrize("given", MISSPELT)
def test_what_cannot_be_composed_or_is_misspelt_is_told(given, composed):
    assert told(lambda: read_sections(composed(given))).startswith(MISSPELT[given])


@pytest.mark.parametrize(
    "given",
    [
        "seed=3 name=sizes/small tags=[a,b] order=[pandas,sympy] trainer.steps=1e3 optim.lr=0",
        "+trainer.detect_anomaly=true +trainer.benchmark=true trainer.gradient_clip_val=0",
        "trainer.steps=null trainer.tokens=1e6 objective=[LC.nats,FG.nats] freeze.layers=1",
        "method=das method.general=null method.units=[tokens] domains.held_out.most=3",
        "endtask=submodules +endtask.tasks.pandas=null endtask.seeds=[4]",
        "+method.rate=2 +model.config.attention_dropout=0.1 +domains.packages.torch=[torch]",
        "callbacks=[lr_monitor,device_stats] logger=[csv,wandb] logger.mode=online trainer.devices=auto",
        "+dim=48 model.config.hidden_size=${dim}",
    ],
)
def test_what_may_be_said(given, composed):
    assert make_plan(composed(*given.split())).order


@pytest.mark.slow
@pytest.mark.parametrize(("group", "choice"), CHOICES)
def test_every_choice_of_the_config_is_right(group, choice, composed):
    chosen = {"routing": ["method=adapter", f"routing@method.routing={choice}"]}
    hub = ["+domains.catalogue.news={path: ag_news}"] * (choice == "hub" and group == "domains")
    cfg = composed(*chosen.get(group, [f"{group}={choice}"]), *hub, "model.checkpoint=somewhere")
    assert read_sections(cfg).run
    for missing in OmegaConf.missing_keys(cfg):
        OmegaConf.update(cfg, missing, "given")
    assert identity(plain_config(cfg))


def test_what_a_sweep_or_an_experiment_gives_is_not_missed(composed):
    found = read_sections(composed("domains=texts", "model=checkpoint"))
    assert (found.source, found.model) == (None, None) and found.trainer is not None
    given = composed("model=checkpoint", "model.checkpoint=x", "model.base={steps: 300}", "logger=none")
    assert read_sections(given).model.base is None


@pytest.mark.slow
@pytest.mark.parametrize("arguments", ["+unknown=1", "-m name=../x seed=0,1"])
def test_a_wrong_start_leaves_nothing(arguments, tmp_path):
    place = tmp_path / "a" / "b"
    place.mkdir(parents=True)
    ended = ran(ROOT / "run.py", *arguments.split(), cwd=place)
    assert (ended.returncode, ended.stdout) == (1, "")
    assert ended.stderr.startswith("cpt: ") and len(ended.stderr.splitlines()) == 1
    assert [path for path in tmp_path.rglob("*") if path not in (place, place.parent)] == []


def test_the_checks_need_no_torch():
    program = (
        f"import sys; sys.path.insert(0, {str(ROOT)!r})\n"
        "from hydra import compose, initialize_config_dir\n"
        "import cpt.core.config\nfrom cpt.trainer.plan import read_sections\n"
        f"with initialize_config_dir({str(ROOT / 'conf')!r}, version_base='1.3'):\n"
        "    for given in (['method=das', 'replay=past'], ['optim=sgd']):\n"
        "        read_sections(compose('config', overrides=given))\n"
        "print({'torch', 'lightning', 'datasets', 'transformers'} & set(sys.modules))"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert ended.stdout == "set()\n", ended.stderr
