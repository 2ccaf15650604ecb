"""`python -m cpt.report --wandb`: a comparison as a run on W&B, read back from its offline file."""

import json
import sys

import pytest

from cpt.loggers.wandb_environment import draw_identifier, store_identifier
from cpt.report import main
from cpt.reporting import comparison_figures
from cpt.reporting.contrasts import find_contrasts
from cpt.reporting.load_runs import find_runs, measure_runs
from cpt.reporting.sections import build_sections
from tests.support.example_runs import save_scores
from tests.support.wandb_files import config, history, read_records_of_kind, summary

pytestmark = pytest.mark.slow


@pytest.fixture
def swept(tmp_path, monkeypatch):
    """Three methods and seven seeds; das is better each time, ewc a little."""
    for seed in range(7):
        for method, gain in (("ncl", 0.0), ("das", 0.2 + 0.01 * seed), ("ewc", 0.01 * (-1) ** seed)):
            folder = tmp_path / "swept" / f"{method}-{seed}"
            save_scores(folder, method=method, seed=seed, shift=-gain)
            store_identifier(folder, draw_identifier())
    monkeypatch.setattr(comparison_figures, "build_figures", lambda section: [])
    return tmp_path / "swept"


def read_table(folder, name):
    """The newest version of a table."""
    path = max(folder.rglob(f"{name}_*.table.json"), key=lambda file: file.stat().st_mtime)
    content = json.loads(path.read_text())
    return [dict(zip(content["columns"], line, strict=True)) for line in content["data"]]


def test_a_comparison_is_a_run_with_its_tests_and_stays_that_run(swept, capsys):
    import wandb

    for _ in range(2):
        assert main([str(swept), "--wandb", "--mode", "offline", "--project", "p"]) == 0
        assert "W&B: offline; send it with: wandb sync" in capsys.readouterr().out
    wandb.teardown()

    first, second = read_records_of_kind(swept / "wandb", "run")
    assert first.run_id == second.run_id == (swept / "comparison.wandb_id").read_text().strip()
    assert (first.job_type, first.project, first.display_name) == ("comparison", "p", "comparison")
    assert len(config(swept / "wandb")["cpt"]["compared"]) == 21

    headlines = summary(swept / "wandb")
    assert (headlines["comparison/best"], headlines["comparison/groups"], headlines["comparison/runs"]) == (
        "das",
        3,
        21,
    )
    assert {"comparison/page.path", "comparison/differences_table.path"} <= set(headlines)
    assert any("comparison/page.path" in row for row in history(swept / "wandb"))

    (section,) = build_sections(measure_runs(find_runs([swept]).runs), by_order=False, baseline="ncl")
    contrast = find_contrasts(section, "LC/perplexity")["das"]
    rows = read_table(swept / "wandb", "differences_table")
    (row,) = [row for row in rows if row["measure"] == "LC/perplexity" and row["group"] == "das"]
    assert (row["baseline"], row["pairs"]) == ("ncl", 7)
    assert row["p"] < row["p_holm"]
    numbers = [row["difference"], row["low"], row["high"], row["p"], row["p_holm"]]
    assert numbers == pytest.approx([contrast.mean, contrast.low, contrast.high, contrast.p, contrast.p_holm])
    means = {
        row["group"]: row["mean"]
        for row in read_table(swept / "wandb", "groups_table")
        if row["measure"] == "LC/perplexity"
    }
    assert means["das"] < means["ncl"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--project", "p"], "--project is without effect. Allowed: with --wandb"),
        (["--wandb", "--figures", "x"], "--wandb is invalid with --figures"),
        (["--wandb", "--mode", "offline", "--project", "a/b"], "logger.project=a/b is invalid"),
    ],
)
def test_options_of_wandb_that_do_not_go_are_one_line(swept, capsys, options, message):
    assert main([str(swept), *options]) == 1
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert message in line


def test_a_workspace_without_a_login_is_one_line(monkeypatch, capsys, tmp_path):
    from cpt.loggers import workspace

    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setattr(workspace, "find_spec", lambda name: sys)
    with pytest.raises(SystemExit) as caught:
        workspace.main(["team", "cpt"])
    assert caught.value.code == 1 and "not logged in to W&B" in capsys.readouterr().err


def test_a_workspace_without_its_package_is_one_line(monkeypatch, capsys):
    from cpt.loggers import workspace

    monkeypatch.setattr(workspace, "find_spec", lambda name: None)
    with pytest.raises(SystemExit) as caught:
        workspace.main(["team", "cpt"])
    line = "the package wandb-workspaces is not installed. Allowed: after pip install -e '.[dashboard]'"
    assert caught.value.code == 1 and line in capsys.readouterr().err


def test_a_workspace_has_panels_of_each_headline():
    pytest.importorskip("wandb_workspaces", reason="pip install -e '.[dashboard]'")
    from cpt.loggers.workspace import build_workspace

    workspace = repr(build_workspace("team", "cpt"))
    for name in (
        "learned/nats",
        "FG/nats",
        "train/tokens_per_s",
        "train/grad_norm",
        "monitor/",
        "^train/lm_.+$",
    ):
        assert name in workspace
