"""The sweep of docs/examples/sweep.yaml."""

import yaml

from cpt.reporting.frames import summarize_scores
from tests.conftest import ROOT
from tests.support.tracked import scores


def test_each_parameter_of_the_sweep_is_a_valid_override(composed, monkeypatch):
    sweep = yaml.safe_load((ROOT / "docs" / "examples" / "sweep.yaml").read_text())
    assert (ROOT / sweep["program"]).is_file() and sweep["metric"]["goal"] == "minimize"
    assert sweep["metric"]["name"] in summarize_scores(scores())
    env, interpreter, program, *fixed, arguments = sweep["command"]
    macros = [env, interpreter, program, arguments]
    assert macros == ["${env}", "${interpreter}", "${program}", "${args_no_hyphens}"]
    monkeypatch.setenv("WANDB_SWEEP_ID", "s1")
    assert {"method", "optim.lr"} == set(sweep["parameters"])
    for name, parameter in sweep["parameters"].items():
        for value in parameter.get("values") or [parameter["min"], parameter["max"]]:
            cfg = composed(*fixed, f"{name}={value}")
            assert (cfg.method.name if name == "method" else cfg.optim.lr) == value
            assert cfg.domains.score_on == "valid"  # what is chosen on the test texts is no result
            assert (cfg.name, cfg.logger.wandb, cfg.logger.mode) == ("s1", True, "online")
