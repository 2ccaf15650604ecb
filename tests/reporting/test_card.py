"""The model card: its figures are those of scores.json, it is safe to publish, and the Hub can read it."""

import json

import numpy as np
import pytest
import yaml
from huggingface_hub import ModelCard

from cpt import card as program
from cpt.evaluation.scores import Scores
from cpt.reporting.frames import perplexity
from cpt.reporting.model_card import write_model_card
from cpt.trainer.run_dir import RunDir
from tests.reporting.test_page import ALL, NAMES, inner, rendered
from tests.support.comparing import endtasks, saved

HUB = {"origin": "hub", "revision": "0" * 40}


def card_of(folder, *, config=None, overrides=(), base=None, **given):
    """The card of a run folder made by hand."""
    saved(folder, config=config, **given)
    scores = Scores.load(folder / "scores.json")
    scores.base = base or {}
    (folder / ".hydra").mkdir()
    (folder / ".hydra" / "overrides.yaml").write_text(yaml.safe_dump(list(overrides)))
    (folder / "model").mkdir()
    return write_model_card(folder, scores).read_text()


def cells(page, first):
    """The cells of the last line of a table that begins so."""
    line = [line for line in page.splitlines() if line.startswith(f"| {first} |")][-1]
    return [cell.strip() for cell in line.strip("|").split("|")][1:]


def test_a_run_leaves_a_card_that_is_written_again_and_hides_no_damage(
    small, start, tmp_path, corpora, monkeypatch
):
    run = tmp_path / "secret_user" / "run"
    start(small("order=[law,food]", "optim.lr=0.01", "method=prompt"), run)
    path, place = run / "model" / "README.md", RunDir(run)
    scores = json.loads((run / "scores.json").read_text())
    page, data = path.read_text(), ModelCard.load(path).data
    assert data.pipeline_tag == "fill-mask" and data.base_model is None and "prompt" in data.tags
    found = {(each.dataset_name, each.metric_name): each.metric_value for each in data.eval_results}
    assert found["food", "last"] == pytest.approx(np.exp(scores["nll"][2][1]), rel=1e-5)
    assert found["all domains", "FG"] == pytest.approx(scores["metrics"]["FG"]["perplexity"], rel=1e-5)
    metric = scores["metrics"]["LC"]
    low, high = metric["interval"]["nats"]
    assert cells(page, "LC")[1] == f"{metric['nats']:.4f} [{low:.4f}, {high:.4f}]"
    matrix = page.split("## Evaluation")[1].split("L[i][j]")[0]
    assert cells(matrix, "food") == [perplexity(np.exp(loss)) for loss in scores["nll"][2]]
    assert cells(page, "optim.lr") == ["0.01"] and cells(page, "model.mask_rate") == ["0.3"]
    assert not any(private in page for private in ("secret_user", str(corpora), "/tmp", "http"))
    code, names = page.split("```python\n")[1].split("```")[0], {}
    monkeypatch.chdir(run)
    exec(code, names)  # the expression that loads the model is code
    assert names["model"].training is False and "cpt.adapters.export" in code
    assert place.lost(full=True) == []
    path.write_text("changed")
    assert [each.split(" ")[0] for each in place.lost(full=False)] == ["model/README.md"]
    parts = run / "model" / "parts.json"
    parts.write_text(parts.read_text() + " ")
    assert program.main([str(run)]) == 0 and path.read_text() == page
    assert [each.split(" ")[0] for each in place.lost(full=True)] == ["model/parts.json"]


def test_a_card_shows_no_paths_accounts_or_secrets_and_no_mask_rate_of_a_causal_model(tmp_path):
    method = {"name": "ncl", "teacher": "/srv/alice/t", "api_key": "hf_1", "files": ["C:\\alice\\x"]}
    config = {"method": method | {"beta": 0.5}, "logger": {"entity": "alice"}}
    config |= {"model": {"checkpoint": "/srv/alice/base", "mask_rate": 0.15, "length": 64}}
    config |= {"optim": {"_target_": "alice.own.Step", "_partial_": True}}
    overrides = ["method=kd", "order=[a/b,c]", "+hub.token=hf_1", "domains.root=/srv/alice/x"]
    overrides += ["logger.entity=alice", "+callbacks.a._target_=alice.A", "model.checkpoint=own/er"]
    overrides += ["+domains.catalogue.x={path: /home/alice}"]
    how = {"config": config, "overrides": overrides, "base": HUB | {"name": "own/er"}}
    page = card_of(tmp_path / "run", variant="x=/srv/alice", **how)
    assert "alice" not in page and "hf_1" not in page
    command = "python run.py method=kd 'order=[a/b,c]' 'domains.root=<path>' model.checkpoint=own/er"
    assert f"{command} '+domains.catalogue.x=<path>'\n" in page
    assert cells(page, "method.beta") == ["0.5"] and cells(page, "optim") == ["Step"]
    assert cells(page, "method.files") == ["&lt;path>"] and cells(page, "model.mask_rate") == ["0.15"]
    page = card_of(tmp_path / "causal", objective="causal", config=config)
    assert "mask_rate" not in page and cells(page, "model.length") == ["64"]
    assert ModelCard(page).data.pipeline_tag == "text-generation"


@pytest.mark.parametrize(
    ("base", "named"),
    [
        (HUB | {"name": "google-t5/t5-small"}, "google-t5/t5-small"),
        ({"name": "checkpoint", "origin": "folder"}, None),
        ({"name": "tiny", "origin": "built"}, None),
        ({"name": "../../etc/x\n- y", "origin": "hub"}, None),
        ({}, None),
    ],
)
def test_only_a_base_of_the_hub_is_named_for_it(base, named, tmp_path):
    page = card_of(tmp_path / "run", base=base)
    assert ModelCard(page).data.base_model == named
    assert ("is unknown to cpt" in page) is (base.get("origin") != "built")


def test_what_was_not_measured_is_a_limit(tmp_path):
    nll = [[5.0, 5.2, 5.4], [4.6, 5.1, 5.3], [4.7, 4.2, 5.2], [4.9, np.nan, 4.0]]
    page = card_of(tmp_path / "run", nll=nll, method="one")
    limits = ("one seed (0)", "general text was not", "1 of 12 cells", "no downstream task", "on space alone")
    assert all(limit in page for limit in limits)
    assert cells(page.split("## Evaluation")[1].split("L[i]")[0], "space")[1] == "–"
    page = card_of(tmp_path / "tasks", endtasks=endtasks([[0.5] * 3] * 4))
    assert "no downstream task" not in page and "| law | macro_f1 | space | 50.00 |" in page


@pytest.mark.parametrize("names", [NAMES[:11], [*NAMES, *ALL[29:40]]], ids=["few", "many"])
def test_names_are_nothing_but_names(names, tmp_path):
    names = list(dict.fromkeys(names))
    nll = np.random.default_rng(0).uniform(3, 5, (len(names) + 1, len(names) + 1)).tolist()
    given = {"method": "`x`|<b>\n# y", "model": "m\n---\nx: 1", "overrides": [f"order=[{','.join(names)}]"]}
    page = card_of(tmp_path / "run", order=names, nll=nll, **given)
    assert set(ModelCard(page).data.to_dict()) == {"library_name", "pipeline_tag", "tags", "model-index"}
    body = rendered(page.split("\n---\n", 1)[1])
    kinds = [token.type for token in body]
    assert (kinds.count("heading_open"), kinds.count("fence"), kinds.count("html_block")) == (7, 2, 0)
    assert inner(body) <= {"text", "text_special", "code_inline", "softbreak"}
    tables = [block.splitlines() for block in page.split("\n\n") if block.startswith("|")]
    assert all(line.count("|") == table[0].count("|") for table in tables for line in table)


def test_folders_without_a_trained_model_are_refused_in_a_line(small, start, tmp_path, capsys):
    start(small("method=none"), tmp_path / "none")
    saved(tmp_path / "unfinished", finished=False)
    saved(tmp_path / "bare")
    assert not list(tmp_path.rglob("README.md"))
    refused = {"none": "no finished run", "unfinished": "no finished run", "bare": "no exported model"}
    for name, said in refused.items():
        with pytest.raises(SystemExit) as ended:
            program.main([str(tmp_path / name)])
        assert ended.value.code == 1 and said in capsys.readouterr().err
