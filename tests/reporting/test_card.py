"""The model card: its figures are those of scores.json, it is safe to publish, and the Hub can read it."""

import json

import numpy as np
import pytest
import yaml
from huggingface_hub import ModelCard

from cpt import card as program
from cpt.reporting.model_card import write_model_card
from cpt.trainer.run_dir import RunDir
from tests.support.example_runs import make_endtasks, save_scores

LEVELS = ("base (ZS)", "just learned (CPT)", "final (LC)")


def cells(page, first):
    line = [line for line in page.splitlines() if line.startswith(f"| {first} |")][-1]
    return [cell.strip() for cell in line.strip("|").split("|")][1:]


def test_a_run_leaves_a_card_that_is_written_again_and_hides_no_damage(
    small, start, tmp_path, corpora, monkeypatch, capsys
):
    run = tmp_path / "secret_user" / "run"
    start(small("order=[law,food]", "optim.lr=0.01", "method=prompt"), run)
    path = run / "model" / "README.md"
    run_dir = RunDir(run)
    scores = json.loads((run / "scores.json").read_text())
    page = path.read_text()
    data = ModelCard.load(path).data
    assert data.pipeline_tag == "fill-mask" and data.base_model is None and "prompt" in data.tags
    card_metrics = {
        (result.dataset_name, result.metric_name): result.metric_value for result in data.eval_results
    }
    assert card_metrics["food", "last"] == pytest.approx(np.exp(scores["nll"][2][1]), rel=1e-5)
    metrics = scores["metrics"]
    forgetting = card_metrics["all domains", "forgetting (FG), nats per token"]
    assert forgetting == pytest.approx(metrics["FG"]["nats"], rel=1e-5)
    final = card_metrics["all domains", "final (LC), perplexity"]
    assert final == pytest.approx(metrics["LC"]["perplexity"], rel=1e-5)
    drift = card_metrics["general", "general_drift, nats per token"]
    assert drift == pytest.approx(metrics["general_drift"]["nats"], rel=1e-5)
    kinds = {result.metric_name: result.metric_type for result in data.eval_results}
    levels = {name for name, kind in kinds.items() if kind == "perplexity"}
    assert levels == {"last", *(f"{title}, perplexity" for title in LEVELS)} and "learned" in kinds.values()
    assert cells(page, "final (LC)")[1].startswith(f"{scores['metrics']['LC']['nats']:.4f} [")
    assert cells(page, "optim.lr") == ["0.01"] and cells(page, "model.mlm_probability") == ["0.3"]
    assert not any(private in page for private in ("secret_user", str(corpora), "/tmp", "http"))
    code = page.split("```python\n")[1].split("```")[0]
    names = {}
    monkeypatch.chdir(run)
    exec(code, names)  # the expression that loads the model is code
    assert names["model"].training is False and "cpt.adapters.export" in code
    assert run_dir.find_damaged_outputs(full=True) == []
    path.write_text("changed")
    assert [output.split(" ")[0] for output in run_dir.find_damaged_outputs(full=False)] == [
        "model/README.md"
    ]
    parts = run / "model" / "parts.json"
    parts.write_text(parts.read_text() + " ")
    assert program.main([str(run)]) == 0 and path.read_text() == page

    stored = (run / "scores.json").read_text()
    (run / "scores.json").write_text(stored.replace('"finished": true', '"finished": false'))
    with pytest.raises(SystemExit):
        program.main([str(run)])
    assert "is invalid: unfinished, last measured: food. Allowed" in capsys.readouterr().err
    (run / "scores.json").write_text(stored)
    assert [output.split(" ")[0] for output in run_dir.find_damaged_outputs(full=True)] == [
        "model/parts.json"
    ]


def test_a_card_shows_no_paths_accounts_or_secrets(tmp_path):
    method = {"name": "ncl", "teacher": "/srv/alice/t", "api_key": "hf_1", "files": ["C:\\alice\\x"]}
    config = {"method": method | {"beta": 0.5}, "logger": {"entity": "alice"}}
    config |= {"model": {"name_or_path": "/srv/alice/base", "mlm_probability": 0.15, "max_seq_length": 64}}
    config |= {"optim": {"_target_": "alice.own.Step", "_partial_": True}}

    overrides = ["method=kd", "order=[a/b,c]", "+hub.token=hf_1", "domains.root=/srv/alice/x"]
    overrides += ["logger.entity=alice", "+callbacks.a._target_=alice.A", "model.name_or_path=own/er"]
    overrides += ["+domains.catalogue.x={path: /home/alice}"]
    base = {"origin": "hub", "revision": "0" * 40, "name": "own/er"}

    folder = tmp_path / "run"
    endtasks = make_endtasks([[0.5, 0.5, None]] * 4)
    scores = save_scores(folder, endtasks=endtasks, config=config, base=base, variant="x=/srv/alice")
    for name in (".hydra", "model"):
        (folder / name).mkdir()
    (folder / ".hydra" / "overrides.yaml").write_text(yaml.safe_dump(overrides))
    sources = [{"provider": "command-line", "path": "/srv/alice/conf"}]
    (folder / ".hydra" / "hydra.yaml").write_text(
        yaml.safe_dump({"hydra": {"runtime": {"config_sources": sources}}})
    )

    page = write_model_card(folder, scores).read_text()
    assert cells(page, "law") == ["accuracy", "space", "50.00"] and "| nan |" not in page
    assert "alice" not in page and "hf_1" not in page
    command = "python run.py '--config-dir=<path>' method=kd 'order=[a/b,c]' 'domains.root=<path>' model.name_or_path=own/er"
    assert f"{command} '+domains.catalogue.x=<path>'\n" in page
    assert cells(page, "method.beta") == ["0.5"] and cells(page, "optim") == ["Step"]
    assert cells(page, "method.files") == ["&lt;path>"] and cells(page, "model.mlm_probability") == ["0.15"]
