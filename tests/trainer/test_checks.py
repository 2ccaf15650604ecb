"""What a config may say: every wrong value, key and combination in one line, before any text is read."""

from typing import Any, get_args

import pytest
from hydra.errors import HydraException
from omegaconf import OmegaConf

from cpt.core.config import identity, plain_config
from cpt.core.errors import reason
from cpt.core.schema import allowed, check_value, join, option_types, show
from cpt.trainer.help import list_sections, options_at
from cpt.trainer.plan import Checked, make_plan, read_sections
from tests.conftest import ROOT
from tests.support.wrong_options import AT_ONCE, is_refused

CHOICES = sorted((path.parent.name, path.stem) for path in ROOT.glob("conf/*/*.yaml"))


def told(look) -> str:
    with pytest.raises((ValueError, HydraException)) as raised:
        look()
    return reason(raised.value)


@pytest.mark.parametrize("given", AT_ONCE)
def test_a_wrong_value_is_told_with_what_is_allowed(given, composed):
    words = [each.replace("=(", "='('") for each in given.split()]  # as on a command line
    message = told(lambda: make_plan(composed(*words)))
    assert is_refused(given, message), message


@pytest.mark.slow
@pytest.mark.parametrize(("group", "choice"), CHOICES)
def test_every_choice_of_the_config_is_right_and_its_types_are_told_at_every_option(group, choice, composed):
    chosen = {"routing": ["method=adapter", f"routing@method.routing={choice}"]}
    hub = ["+domains.catalogue.news={path: ag_news}"] * (choice == "hub" and group == "domains")
    cfg = composed(*chosen.get(group, [f"{group}={choice}"]), *hub, "model.name_or_path=somewhere")
    for missing in OmegaConf.missing_keys(cfg):
        OmegaConf.update(cfg, missing, ["a"] if missing == "benchmark.tasks" else "given")
    assert identity(plain_config(cfg))
    kinds = [(place, kind) for place in list_sections(cfg) for kind in options_at(cfg, place)]
    for place, kind in kinds:
        for key, declared in option_types(kind).items():
            if Any not in (declared, *get_args(declared)[:1]):
                at, wrong = join(place, key), object()
                said = f"{at}={show(wrong)} is invalid. Allowed: {allowed(declared)}"
                assert told(lambda: check_value(at, wrong, declared)).startswith(said)  # noqa: B023
    if cfg.domains.get("root") == "given":  # not here
        cfg.domains = composed().domains
    assert read_sections(cfg)


def test_the_jobs_of_a_sweep_may_set_what_is_missing(composed, capsys):
    Checked().on_multirun_start(composed("domains=texts"))
    for wrong in ("trainer.steps=-1", "plan=true"):
        with pytest.raises(SystemExit):
            Checked().on_multirun_start(composed(wrong))
        assert f"cpt: {wrong} is invalid" in capsys.readouterr().err
