"""Tables of a paper: the numbers by hand and as frames, and names, which are nothing but names."""

import itertools
import re

import numpy as np
import pytest
from scipy.stats import ttest_rel

from cpt import load_tables
from cpt.report import main
from cpt.reporting import figures
from cpt.reporting.tex import write_tables
from tests.support.comparing import DOMAINS, endtasks, run, saved, section

NASTY = ["after", "law\n\\input{/etc/passwd}\n", "a & b % c", "$x_1 ~ ^ #{}", "1 < 2 | ± – →"]


def sweep(top):
    """Two methods, two orders, two seeds: das is better, each time by nearly the same."""
    for number, order in enumerate((DOMAINS, DOMAINS[::-1])):
        for seed in (0, 1):
            for method, gain in (("ncl", 0.0), ("das", 0.2 + 0.001 * seed)):
                own, last = [[0.8, None, None], [None, 0.8, None]], [0.5 + gain + 0.01 * seed, 0.6, 0.7]
                given = endtasks([[None] * 3, *own, last], when="each", tasks=order)
                config = {"order": number, "seed": seed, "method": {"strength": 5.0 if gain else None}}
                about = {"method": method, "order": order, "seed": seed, "shift": -gain}
                saved(top / f"{method}-{number}-{seed}", config=config, endtasks=given, **about)
    return top


def test_numbers_are_those_of_the_frames_and_marks_those_of_the_tests(tmp_path, monkeypatch):
    swept = sweep(tmp_path / "swept")
    monkeypatch.setattr(figures, "build_figures", lambda section: [])
    assert main([str(swept), "--tex", str(tmp_path / "tex")]) == 0
    tex = {path.stem: path.read_text() for path in (tmp_path / "tex").glob("*.tex")}
    kinds = itertools.product(("perplexity", "endtasks"), ("ncl", "das"), "01")
    matrices = {f"matrix-{kind}-{method}-{order}" for kind, method, order in kinds}
    assert set(tex) == {"main", "endtasks", "orders-MF1", "orders-LC", "settings"} | matrices
    frames = load_tables(swept)
    law = frames["endtasks"].query("measure == 'task/law'").set_index("group")
    das, ncl = [0.7, 0.711, 0.7, 0.7], [0.5, 0.51, 0.7, 0.7]
    mean, sd = np.mean(ncl), np.std(ncl, ddof=1)
    assert [law["mean"]["ncl"], law["sd"]["ncl"]] == pytest.approx([mean, sd])
    assert law["p_t_holm"]["das"] == pytest.approx(ttest_rel(das, ncl).pvalue) and law["n"]["das"] == 4
    assert f"\nncl & {100 * mean:.2f} $\\pm$ {100 * sd:.2f} & " in tex["endtasks"]
    best = frames["main"].query("measure == 'LC/perplexity' and group == 'das'").squeeze()
    assert best["p_holm"] == 0.125 and best["p_t_holm"] < 0.05  # of 4 pairs no p of signs is below 0.125
    cell = f"\\textbf{{{best['mean']:.2f} $\\pm$ {best['sd']:.2f}}}\\textsuperscript{{$\\dagger$}}"
    assert f"\ndas & {cell} & " in tex["main"] and "das & strength~=~5 \\\\" in tex["settings"]
    orders = frames["orders"].query("measure == 'endtask/MF1' and group == 'das'").set_index("order")["mean"]
    assert orders["all"] == pytest.approx((orders["0"] + orders["1"]) / 2)


@pytest.mark.parametrize("name", NASTY)
def test_names_are_nothing_but_names(name, tmp_path):
    given = endtasks([[None] * 3] * 3 + [[0.5] * 3], tasks=[name, *DOMAINS[1:]])
    about = {"order": [name, "food", "space"], "endtasks": given}
    runs = [run(method=method, seed=seed, **about) for method in ("ncl", name) for seed in (0, 1)]
    for path in write_tables([section(runs)], tmp_path):
        rows = re.sub(r"(?s).*\\toprule|\\bottomrule.*", "", path.read_text()).replace("\\midrule", "")
        assert len({re.sub(r"\\&", "", row).count("&") for row in rows.split("\\\\\n") if row.strip()}) == 1
        assert not re.search(r"\\input|(?<!\\)[#%_]|[±–→]", rows)
