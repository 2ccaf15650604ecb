"""The certificate of a model: its figures by hand from the run's files, and what the check finds."""

import hashlib
import json
import logging
import math
import shutil

import numpy as np
import pytest
import yaml
from safetensors.torch import load_file

from cpt import card as program
from cpt.reporting.card.facts import gather_card
from cpt.reporting.card.files import DATA, PAGE, compare_pages, compare_trees, find_difference, write_card
from cpt.reporting.card.markdown import format_card
from cpt.reporting.card.privacy import pick_given, pick_options, without_folders
from cpt.training.assembly import tell_base
from cpt.training.identity import checkpoint_files
from cpt.training.loop import Learner
from cpt.training.run_folder import RunFolder
from tests.reporting.test_nasty_names import ALL, NAMES, rendered, shown
from tests.support.comparing import DOMAINS, endtasks, made, saved


@pytest.fixture(scope="module")
def learned(tmp_path_factory):
    return tmp_path_factory.mktemp("card") / "secret_user" / "run"


@pytest.fixture
def run(learned, small, start):
    """A run, that no test changes."""
    if not learned.exists():
        start(small("order=[law,food]", "optim.lr=0.01", "mask=migu"), learned)
    return learned


@pytest.fixture
def copy(run, tmp_path):
    return shutil.copytree(run, tmp_path / "copy")


def read(folder):
    """card.json and CARD.md."""
    model = folder / "model"
    return json.loads((model / DATA).read_text()), (model / PAGE).read_text()


def digits(value):
    """A figure as a card has it."""
    return float(f"{value:.6g}")


def cells(page, first):
    """The cells of the first line of a table that begins so."""
    line = next(line for line in page.splitlines() if line.startswith(f"| {first} |"))
    return [cell.strip() for cell in line.strip("|").split("|")][1:]


def test_a_run_leaves_a_card_whose_figures_are_those_of_its_files(run):
    (card, page), scores = read(run), json.loads((run / "scores.json").read_text())
    results = card["results"]
    assert results["rows"] == ["base", "law", "food"] and results["texts"] == ["law", "food", "general"]
    assert results["nats"] == [[digits(value) for value in row] for row in scores["nll"]]
    assert results["perplexity"][2][1] == digits(math.exp(scores["nll"][2][1]))
    for name in ("CPT", "LC", "FG", "general_drift"):
        told, metric = results["metrics"][name], scores["metrics"][name]
        assert told["nats"] == digits(metric["nats"])
        assert told["interval"]["perplexity"] == [digits(each) for each in metric["interval"]["perplexity"]]
        low, high = metric["interval"]["nats"]
        assert f"{metric['nats']:.4f} [{low:.4f}, {high:.4f}]" in page
    for stage, told in enumerate(card["stages"], start=1):
        assert (told["seen"], told["trained"]) == (scores["seen"][stage], scores["trained"][stage])
        assert told["rates"] == [digits(rate) for rate in scores["rates"][stage]]
    law = card["data"][0]
    assert (law["text"], law["digest"]) == ("law", scores["texts"]["law"]["digest"])
    assert (law["learned_tokens"], law["documents"]) == (
        scores["seen"][1],
        scores["texts"]["law"]["documents"],
    )
    assert card["training"]["steps"] == 6 and card["training"]["lr"] == 0.01
    assert card["model"]["config_digest"] == scores["config_digest"]
    weights = (run / "model" / "model.safetensors").read_bytes()
    assert card["model"]["weights"]["model.safetensors"]["sha256"] == hashlib.sha256(weights).hexdigest()


def test_it_says_how_far_the_weights_lie_from_the_base(run, cache):
    card, page = read(run)
    end = load_file(run / "model" / "model.safetensors")
    began = next(
        base for base in map(load_file, cache.glob("base/*/model.safetensors")) if is_like(base, end)
    )
    way = sum((end[name] - each).double().square().sum() for name, each in began.items())
    whole = sum(each.double().square().sum() for each in began.values())
    distance, share = card["moved"]["all"]
    assert distance == pytest.approx(float((way / whole).sqrt()), rel=1e-5) and distance > 0.001
    others = sum(int((end[name] != each).sum()) for name, each in began.items())
    assert share == digits(others / sum(each.numel() for each in began.values()))
    assert f"| all | {distance:.4f} | {100 * share:.2f} |" in page
    assert not any("How far the weights" in line for line in card["limits"])


def is_like(one, other):
    return {name: each.shape for name, each in one.items()} == {
        name: each.shape for name, each in other.items()
    }


def test_a_cell_has_the_interval_of_its_documents(run):
    card, page = read(run)
    with np.load(run / "documents" / "002.npz") as file:
        sums, counts = file["food"]
    sums, counts = sums[counts > 0], counts[counts > 0]
    drawn = np.random.default_rng([0, 0]).integers(len(sums), size=(2000, len(sums)))
    means = sums[drawn].sum(1) / counts[drawn].sum(1)
    low, high = np.percentile(means, [2.5, 97.5])
    assert card["results"]["nats_interval"][2][1] == pytest.approx([low, high], rel=1e-5)
    told = cells(page, "food")  # of the data; the matrix comes later
    matrix = page.split("## Results: perplexity")[1]
    told = cells(matrix, "food")[1]
    assert told.startswith(f"{math.exp(sums.sum() / counts.sum()):.2f} [{math.exp(low):.2f}, ")


def test_a_card_is_json_and_comes_back(run):
    card = gather_card(run)
    assert json.loads(json.dumps(card, allow_nan=False)) == card == read(run)[0]
    assert card["format"] == 1


def test_the_check_says_how_many_figures_agree(run, capsys):
    assert program.main([str(run), "--check"]) == 0
    assert "say what the folder says" in capsys.readouterr().out


def change(path, then, now):
    text = path.read_text()
    assert text.count(then) >= 1
    path.write_text(text.replace(then, now, 1))


def other_digit(figure):
    """The same figure with another last digit."""
    return figure[:-1] + str((int(figure[-1]) + 1) % 10)


def test_the_check_finds_a_changed_digit_in_the_page(copy, capsys):
    figure = cells(read(copy)[1].split("## Results: perplexity")[1], "law")[0].split(" ")[0]
    change(copy / "model" / PAGE, f"| {figure} [", f"| {other_digit(figure)} [")
    assert program.main([str(copy), "--check"]) == 1
    said = capsys.readouterr().out
    assert "CARD.md, line" in said and "(Results: perplexity" in said and other_digit(figure) in said


def test_the_check_finds_a_changed_digit_in_the_data(copy, capsys):
    figure = str(read(copy)[0]["results"]["metrics"]["LC"]["nats"])
    change(copy / "model" / DATA, figure, other_digit(figure))
    assert program.main([str(copy), "--check"]) == 1
    assert f"is {other_digit(figure)}, the folder says {figure}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("place", "said"),
    [
        (("nll", 1, 0), "the loss after law on law is"),
        (("metrics", "FG", "nats"), "FG in nats is"),
        (
            ("metrics", "LC", "interval", "perplexity", 1),
            "LC in perplexity, the high end of its interval, is",
        ),
        (("rates", 2, 1), "stages.1.rates.1 is"),
        (("seen", 1), "learned_tokens is"),
    ],
)
def test_the_check_finds_a_changed_figure_of_the_folder(place, said, copy, capsys):
    scores = json.loads((copy / "scores.json").read_text())
    *outer, last = place
    inner = scores
    for key in outer:
        inner = inner[key]
    inner[last] = inner[last] + 1 if isinstance(inner[last], int) else inner[last] * 1.001
    (copy / "scores.json").write_text(json.dumps(scores))
    try:
        assert program.main([str(copy), "--check"]) == 1
    except SystemExit as ended:
        assert ended.code == 1
    told = capsys.readouterr()
    assert said in told.out + told.err


def test_the_check_finds_other_weights_and_other_documents(copy, capsys):
    weights = copy / "model" / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    assert "sha256" in find_difference(copy)
    losses = dict(np.load(copy / "documents" / "001.npz"))
    losses["law"][0, 3] += 0.01
    np.savez(copy / "documents" / "001.npz", **losses)
    with pytest.raises(ValueError, match="the loss after law on law is .* the losses by document give"):
        find_difference(copy)


def test_a_card_that_is_gone_or_damaged_is_told_in_a_line(copy, capsys):
    (copy / "model" / DATA).write_text("{")
    with pytest.raises(SystemExit):
        program.main([str(copy), "--check"])
    assert "card.json is damaged" in capsys.readouterr().err
    (copy / "model" / DATA).unlink()
    with pytest.raises(SystemExit):
        program.main([str(copy), "--check"])
    assert "card.json is not there" in capsys.readouterr().err
    assert program.main([str(copy)]) == 0
    (copy / "model" / PAGE).unlink()
    assert program.main([str(copy), "--check"]) == 1
    assert "CARD.md is not there" in capsys.readouterr().out


def test_written_again_it_is_the_same_and_the_folder_is_whole(copy, capsys):
    before = read(copy)
    for name in (PAGE, DATA):
        (copy / "model" / name).write_text("other")
    place = RunFolder(copy)
    assert [each.split(" ")[0] for each in place.lost(full=False)] == ["model/CARD.md", "model/card.json"]
    assert program.main([str(copy)]) == 0
    assert read(copy) == before and place.lost(full=True) == []


def test_written_again_it_hides_no_damage_of_other_files(copy):
    config = copy / "model" / "config.json"
    config.write_text(config.read_text().replace("0.1", "0.2", 1) + " ")
    program.main([str(copy)])
    assert [each.split(" ")[0] for each in RunFolder(copy).lost(full=True)] == ["model/config.json"]


def test_a_run_that_begins_from_the_model_does_not_mind_its_card(copy):
    found = checkpoint_files(str(copy / "model"))
    assert DATA not in found and {"config.json", "model.safetensors"} <= set(found)


# --- what it begins with, and what it does not tell


def front_matter(page):
    opened, inner, _ = page.split("---\n", 2)
    assert opened == ""
    return yaml.safe_load(inner)


def test_the_hub_reads_its_beginning(run):
    from huggingface_hub import ModelCard

    page = read(run)[1]
    told = front_matter(page)
    assert told["library_name"] == "transformers" and told["pipeline_tag"] == "fill-mask"
    assert {"continual-pretraining", "ncl"} <= set(told["tags"]) and "base_model" not in told
    assert ModelCard(page).data.library_name == "transformers"


def folder_of(path, *, base=None, config=None, **given):
    """A run folder made by hand, without losses by document."""
    scores = saved(path, config=config, **given)
    scores.base = base or {}
    scores.save(path / "scores.json")
    (path / "model").mkdir()
    (path / "model" / "config.json").write_text("{}")
    return path


@pytest.mark.parametrize(
    ("base", "named"),
    [
        ({"name": "google-t5/t5-small", "origin": "hub", "revision": "0" * 40}, "google-t5/t5-small"),
        ({"name": "gpt2", "origin": "hub"}, "gpt2"),
        ({"name": "checkpoint", "origin": "folder"}, None),
        ({"name": "tiny", "origin": "built"}, None),
        ({"name": "../../etc/x\n- y", "origin": "hub"}, None),
        ({}, None),
    ],
)
def test_a_base_is_named_for_the_hub_where_it_is_one_of_it(base, named, tmp_path):
    page = format_card(gather_card(folder_of(tmp_path / "run", base=base)))
    assert front_matter(page).get("base_model") == named
    assert ("0" * 40 in page) is bool(base.get("revision"))


def test_a_run_remembers_where_its_base_came_from(small, composed, corpora, tmp_path, monkeypatch):
    from cpt.training.plan import make_plan

    folder = tmp_path / "someone" / "my_model"
    folder.mkdir(parents=True)
    texts = ["domains=texts", f"domains.root={corpora}", "model=checkpoint"]
    assert tell_base(make_plan(small())) == {"name": "tiny_modernbert", "origin": "built"}
    here = make_plan(composed(*texts, f"model.checkpoint={folder}"))
    assert tell_base(here) == {"name": "my_model", "origin": "folder"}
    monkeypatch.setattr(
        "cpt.training.assembly.checkpoint_files", lambda name: {"x": tmp_path / "snapshots" / "abc" / "x"}
    )
    there = make_plan(composed(*texts, "model.checkpoint=own/er"))
    assert tell_base(there) == {"name": "own/er", "origin": "hub", "revision": "abc"}


def test_no_folder_and_no_account_stands_in_it(run, corpora):
    text = "\n".join((run / "model" / name).read_text() for name in (PAGE, DATA))
    for private in ("secret_user", str(corpora), str(run), "/tmp", "http"):
        assert private not in text


def test_settings_lose_their_folders_and_secrets(tmp_path):
    variant = "temperature=0.1; model.checkpoint=/srv/alice/x; trainer.tokens=9; hub.token=hf_1; "
    variant += "teacher=/srv/alice/my folder/kind; domains.catalogue.x={path: /srv/alice}"
    assert pick_given(variant) == {"temperature": "0.1", "trainer.tokens": "9", "teacher": "kind"}
    settings = {"method.teacher": "/srv/alice/t/", "method._target_": "a.B", "method.api_key": "k"}
    settings |= {"method.files": ["/srv/alice/a", "C:\\alice\\b"], "logger.entity": "alice", "mask": {}}
    assert pick_options(settings) == {"method.teacher": "t", "method.files": ["a", "b"]}
    assert without_folders("../x/y") == "y" and without_folders(3) == 3
    config = {"model": {"checkpoint": "/srv/alice/base"}, "logger": {"entity": "alice"}}
    config |= {"optim": {"_target_": "alice.own.Step"}, "method": {"name": "ncl", "path": "/srv/alice/p"}}
    folder = folder_of(tmp_path / "run", config=config, variant=variant)
    page = format_card(gather_card(folder))
    assert "alice" not in page and "hf_1" not in page
    assert cells(page, "name")[0] == "base" and cells(page, "optimizer")[0] == "Step"


# --- names as no one would choose them


def is_table(page):
    """Whether each table has as many columns in every line."""
    blocks = [block.splitlines() for block in page.split("\n\n") if block.startswith("|")]
    return blocks and all(line.count("|") == block[0].count("|") for block in blocks for line in block)


@pytest.mark.parametrize("names", [NAMES[:11], NAMES, ALL[29:40]], ids=["few", "many", "drawn"])
def test_names_are_nothing_but_names(names, tmp_path):
    names = list(dict.fromkeys(names))
    nll = np.random.default_rng(0).uniform(3, 5, (len(names) + 1, len(names) + 1)).tolist()
    given = {"method": "`x`|<b>\n# y", "variant": "a|b=<i>\n- c", "model": "m\n---\nx: 1"}
    card = gather_card(folder_of(tmp_path / "run", order=names, nll=nll, **given))
    page = format_card(card)
    assert card["model"]["order"] == names and json.loads(json.dumps(card)) == card
    assert is_table(page) and set(front_matter(page)) == {"library_name", "pipeline_tag", "tags"}
    body = rendered(page.split("---\n", 2)[2])
    headings = [token for token in body if token.type == "heading_open"]
    assert len(headings) == 10 and not [token for token in body if token.type == "html_block"]
    assert all(shown(token)[1] or "`card.json`" in token.content for token in body if token.type == "inline")


def test_parts_and_models_of_one_domain_are_told(tmp_path):
    alone = folder_of(tmp_path / "one", method="one")
    (alone / "model" / "parts.json").write_text(json.dumps({"parts": ["law", "a|b"]}))
    card = gather_card(alone)
    told = cells(format_card(card), "exported")[0]
    assert told.startswith("the model after space, which was learned from the base alone")
    assert told.endswith("beside it in parts/ what belongs to law, a&#124;b")
    assert any("the last one alone" in each for each in card["limits"])
    assert "cpt.gate" not in format_card(card)
    assert "cpt.gate RUN --since base" in format_card(gather_card(folder_of(tmp_path / "ncl")))


def test_what_was_not_measured_is_a_limit(tmp_path):
    nll = [row[:3] for row in ([5.0, 5.2, 5.4], [4.6, 5.1, 5.3], [4.7, 4.2, 5.2], [4.9, None, 4.0])]
    card = gather_card(folder_of(tmp_path / "run", nll=np.array(nll, float)))
    limits = " ".join(card["limits"])
    assert "There is no general text" in limits and "one seed (0)" in limits
    assert "losses by document are gone" in limits and "No task was measured" in limits
    assert cells(format_card(card).split("## Results")[1], "space")[1] == "–"
    measured = folder_of(tmp_path / "tasks", endtasks=endtasks([[0.5] * 3] * 4))
    card = gather_card(measured)
    assert "No task was measured" not in " ".join(card["limits"])
    assert "| law | macro_f1 | space | 50.00 |" in format_card(card)
    assert "| all tasks | MF1 | – | 50.00 |" in format_card(card)


# --- runs of other kinds


def test_a_folder_of_an_older_version_has_a_card_too(copy):
    scores = json.loads((copy / "scores.json").read_text())
    for name in (
        "conditions",
        "base",
        "leak",
        "rates",
        "policy",
        "numerics",
        "similarity",
        "grown",
        "skipped",
    ):
        scores.pop(name)
    for metric in scores["metrics"].values():
        metric.pop("median")
    (copy / "scores.json").write_text(json.dumps(scores))
    for name in ("identity.json", "config.yaml", "checksums.json"):
        (copy / name).unlink()
    assert program.main([str(copy)]) == 0 and program.main([str(copy), "--check"]) == 0
    card, page = read(copy)
    assert card["base"]["origin"] == "unknown" and cells(page, "where from") == ["not remembered"]
    assert cells(page.split("## What moved")[1], "law")[1] == "–"
    assert not (copy / "checksums.json").exists()


def test_a_run_that_learned_nothing_has_no_card_and_ends_well(small, start, tmp_path, capsys):
    start(small("method=none"), tmp_path / "run")
    assert json.loads((tmp_path / "run" / "scores.json").read_text())["run"]["finished"]
    assert not list((tmp_path / "run" / "model").glob("*card*")) and not list(tmp_path.rglob(PAGE))
    with pytest.raises(SystemExit):
        program.main([str(tmp_path / "run")])
    assert "method=none has learned nothing that a card could tell" in capsys.readouterr().err


def test_a_run_ends_without_a_card_where_none_can_be_made(copy, caplog, monkeypatch):
    from types import SimpleNamespace

    def fail(folder, scores):
        raise ValueError("as it were")

    monkeypatch.setattr("cpt.training.loop.write_card", fail)
    with caplog.at_level(logging.WARNING, "cpt"):
        Learner.certify(SimpleNamespace(place=RunFolder(copy), scores=made()))
    assert "the model has no card: as it were" in caplog.text
    assert not (copy / "model" / PAGE).exists() and not (copy / "model" / DATA).exists()


@pytest.mark.parametrize(
    ("given", "said"),
    [({"finished": False}, "needed: a finished run"), ({"nothing": True}, "holds no scores.json")],
)
def test_other_folders_are_refused_in_a_line(given, said, tmp_path, capsys):
    folder = tmp_path / "run"
    folder.mkdir() if "nothing" in given else folder_of(folder, **given)
    for arguments in ([], ["--check"]):
        with pytest.raises(SystemExit) as ended:
            program.main([str(folder), *arguments])
        assert ended.value.code == 1 and said in capsys.readouterr().err
    with pytest.raises(SystemExit):
        program.main([str(tmp_path / "none")])
    assert "is no folder" in capsys.readouterr().err


def test_a_folder_without_a_model_is_refused(tmp_path):
    saved(tmp_path / "run")
    with pytest.raises(ValueError, match="holds no exported model"):
        write_card(tmp_path / "run")


def test_differences_have_a_place():
    told, found = {"a": [1, 2.0], "b": 1}, {"a": [1, 3.0, 4], "c": None}
    places = {place for place, *_ in compare_trees(told, found)}
    assert places == {"a.1", "a.2", "b", "c"}
    assert list(compare_trees({"a": True}, {"a": 1})) and not list(compare_trees(told, told))
    assert compare_pages("a\n## B\nc", "a\n## B\nd").startswith("CARD.md, line 3 (B): `c`")
    assert compare_pages("a", "a\nb") and not compare_pages("a\nb", "a\nb")
    assert DOMAINS == ["law", "food", "space"]
