"""The stored config of a run, read to score models that were made of the run's."""

import pytest

from cpt.core.secrets import hide_environment
from cpt.trainer.read_config import read_sections
from cpt.trainer.rescoring import load_config_here, load_plan
from cpt.trainer.run_dir import RunDir


@pytest.fixture
def stored_run(composed, tmp_path, monkeypatch):
    """The folder of a run whose cache and checkpoint come from environment variables."""
    monkeypatch.setenv("CPT_CACHE", "/fast/cache")
    monkeypatch.setenv("CHECKPOINT", "a/checkpoint")
    cfg = composed("strategy=fsdp", "model=hf", "model.name_or_path=${oc.env:CHECKPOINT}", "variant=x")
    run = RunDir(tmp_path)
    run.write_config(hide_environment(cfg))
    assert "/fast/cache" not in run.config.read_text()
    return run


def test_values_of_environment_variables_are_read_again_and_a_sharded_run_is_scored_by_one_process(
    stored_run,
):
    config = load_config_here(stored_run)
    assert (config.cache_dir, config.model.name_or_path) == ("/fast/cache", "a/checkpoint")
    sections = read_sections(config)
    assert (sections.trainer.strategy, sections.trainer.devices) == ("auto", 1)
    assert hide_environment(config)["cache_dir"] == stored_run.stored_config()["cache_dir"]


def test_another_cache_serves_and_another_value_is_refused(stored_run, monkeypatch):
    monkeypatch.delenv("CPT_CACHE")
    assert load_config_here(stored_run).cache_dir == "outputs/.cache"
    monkeypatch.setenv("CHECKPOINT", "another")
    with pytest.raises(ValueError, match="config.yaml leaves out the value of model.name_or_path. Allowed: "):
        load_plan(stored_run, ["law"])
