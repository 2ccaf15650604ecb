"""`python -m cpt.report --published`: the shipped numbers, and ours in addition to them."""

import json

import pytest

from cpt.core.config import CONF
from cpt.report import main
from cpt.reporting import figures
from cpt.reporting.compare import MEASURES
from cpt.reporting.published import PUBLISHED, read_published
from tests.support.comparing import endtasks, rows_of, saved

FILES = sorted(path.stem for path in PUBLISHED.glob("*.json"))


@pytest.mark.parametrize("name", FILES)
def test_shipped_rows_are_of_known_methods_and_measures(name):
    choices = {group: {path.stem for path in (CONF / group).glob("*.yaml")} for group in ("method", "mask")}
    rows = read_published(name)
    for row in rows:
        for method, *laid in (group.split(" + ") for group in row.groups):
            assert method in choices["method"] and set(laid) <= choices["mask"] | {"replay past"}
        keys = {measure.key for measure in MEASURES} | {"task/acl", "task/ai"}
        assert set(row.values) <= keys and all(-100 < value < 100 for value in row.values.values())
        assert row.source and row.orders
    assert len({json.dumps(row) for row in rows}) == len(rows)


def test_a_difference_is_ours_minus_what_was_published_with_the_interval_of_our_mean(
    tmp_path, capsys, monkeypatch
):
    monkeypatch.setattr(figures, "build_figures", lambda section: [])
    for method, base in (("ncl", 0.75), ("das", 0.78), ("one", 0.5)):
        for seed in range(3):
            scores = endtasks([[base + seed / 100] * 3] * 4)
            config = {"order": 0, "seed": seed, "method": {"form": "x"}}
            config["method"] |= {"contrast_every": 1, "contrast_samples": 1} if method == "das" else {}
            given = {"ncl": "trainer.devices=4", "das": "contrast_every=1; contrast_samples=1"}.get(
                method, ""
            )
            about = {"method": method, "seed": seed, "variant": given}
            saved(tmp_path / f"{method}-{seed}", **about, endtasks=scores, config=config)
    assert main([str(tmp_path), "--published", "das6"]) == 0
    output = capsys.readouterr().out
    rows = rows_of(output, "Published numbers")
    # 75, 76 and 77: mean 76, t(0.975, 2) / sqrt(3) = 2.4841 either way
    assert rows["ncl (trainer.devices=4)"][-3:] == ["76.00 ± 1.00", "80.77", "-4.77 [-7.25, -2.29]"]
    assert "one" not in rows and "DAS, run by MIGU's authors" in output
    assert "table 3" in output and "of 9 published rows have no group here" in output
    assert (tmp_path / "comparison.md").read_text().count("| ncl (trainer.devices=4) | FT |") == 2

    saved(tmp_path / "free", method="das", variant="contrast=0", endtasks=scores, config=config)
    assert main([str(tmp_path / "free"), "--published", "das6"]) == 0
    assert "9 of 9 published rows have no group here." in capsys.readouterr().out  # an ablation

    other = {"name": "mine", "groups": ["one"], "source": "S", "table": None, "page": 4}
    other |= {"values": {"endtask/MF1": 40.0}, "settings": {"method.form": "x"}, "orders": None}
    (tmp_path / "own.json").write_text(json.dumps({"rows": [other, other | {"settings": {"seed": 9}}]}))
    assert main([str(tmp_path), "--published", str(tmp_path / "own.json")]) == 0
    output = capsys.readouterr().out
    assert rows_of(output, "Published numbers")["one"][:2] == ["mine", "S, page 4"]
    assert "1 of 2 published rows have no group here." in output


@pytest.mark.parametrize("text", [None, "{", '{"rows": [{"name": "x"}]}', "[]"])
def test_another_name_or_form_is_refused_in_one_line(tmp_path, capsys, text):
    given = "das7" if text is None else str(tmp_path / "x.json")
    if text is not None:
        (tmp_path / "x.json").write_text(text)
    assert main([str(tmp_path), "--published", given]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"cpt: --published {given} is invalid") and "Allowed: das6, long_sequence" in line
