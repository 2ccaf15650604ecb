"""What stands below the title of a run page, and what of it is left out where the folder does not say it."""

import json

import numpy as np
from safetensors.numpy import save_file

from cpt.reporting.console import format_scores
from cpt.reporting.formats import label_run
from cpt.reporting.page import PageHead, format_markdown_head, render_html
from cpt.reporting.page_head import describe_run_head, format_parameters
from cpt.reporting.run_page import write_report
from tests.support.example_runs import make_scores

VERSIONS = {"python": "3.11", "cpt": "0.2.0"}


def test_counts_have_three_digits_and_their_unit():
    counts = (560_000, 134_515_008, 999_400_000, 999_600_000, 7_240_000_000)
    texts = ["0.56 M", "135 M", "999 M", "1.00 B", "7.24 B"]
    assert [format_parameters(count) for count in counts] == texts


def test_the_head_says_model_size_data_date_machine_and_command(tmp_path):
    scores = make_scores(numerics={"precision": "32-true", "device": "2 CPU cores"})
    scores.versions = VERSIONS
    (tmp_path / ".hydra").mkdir()
    (tmp_path / ".hydra" / "overrides.yaml").write_text("- name=my run\n- method=ncl\n")
    (tmp_path / "progress.json").write_text(json.dumps({"began": "2026-11-03T15:21:31.501Z"}))
    (tmp_path / "model").mkdir()
    weights = {"a": np.zeros((500, 1000), np.float32), "b": np.zeros(60_000, np.float32)}
    save_file(weights, tmp_path / "model" / "model.safetensors")
    (tmp_path / "metrics.csv").write_text("step,name,value\n")

    head = describe_run_head(tmp_path, scores)
    assert list(head.facts) == [
        "tiny (masked, 0.56 M parameters)",
        "ncl",
        "law → food → space",
        "seed 0",
        "3 Nov 2026",
        "2 CPU cores",
        "cpt 0.2.0",
    ]
    assert head.command == "python run.py 'name=my run' method=ncl"
    sources = [{"provider": "command-line", "path": "/srv/mine"}]
    overrides = {"hydra": ["hydra.run.dir=my runs/1", "hydra.mode=RUN"]}
    settings = {"hydra": {"runtime": {"config_sources": sources}, "overrides": overrides}}
    (tmp_path / ".hydra" / "hydra.yaml").write_text(json.dumps(settings))
    command = "python run.py --config-dir=/srv/mine 'name=my run' method=ncl 'hydra.run.dir=my runs/1'"
    assert describe_run_head(tmp_path, scores).command == command
    assert list(head.links) == ["metrics.csv", "model"]


def test_a_path_among_the_values_is_shown_by_its_last_part(tmp_path):
    variant = "model.name_or_path=/srv/models/tiny; method.beta=0.5; chats.path=./mine/chats.jsonl"
    scores = make_scores(variant=variant)
    label = "ncl (model.name_or_path=tiny, method.beta=0.5, chats.path=chats.jsonl)"
    assert label in describe_run_head(tmp_path, scores).facts and label in format_scores(scores)
    # Labels in comparisons tell runs apart.
    assert label_run(scores.run) == f"ncl ({variant.replace('; ', ', ')})"


def test_a_folder_with_nothing_but_scores_has_a_head_of_what_they_say(tmp_path):
    head = describe_run_head(tmp_path, make_scores())
    assert list(head.facts) == ["tiny (masked)", "ncl", "law → food → space", "seed 0"]
    assert not head.command and not head.links

    for name, text in (("progress.json", "{"), ("progress.json", '{"began": 3}')):
        (tmp_path / name).write_text(text)
        assert "Nov" not in " ".join(describe_run_head(tmp_path, make_scores()).facts)
    (tmp_path / ".hydra").mkdir()
    for text in ("a: 1\n", "[", ""):
        (tmp_path / ".hydra" / "overrides.yaml").write_text(text)
        assert describe_run_head(tmp_path, make_scores()).command == ""
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "model.safetensors").write_bytes(b"no weights")
    assert describe_run_head(tmp_path, make_scores()).facts[0] == "tiny (masked)"


def test_names_in_a_head_are_text():
    head = PageHead(facts=["<b>x</b>"], command="python run.py 'a=<script>'", links=["my file&.csv"])
    html = render_html([], title="t", head=head)
    assert "&lt;b&gt;x" in html and "a=&lt;script&gt;" in html and html.count("<script") == 1
    assert 'href="my%20file%26.csv"' in html
    facts, command, links = format_markdown_head(head)
    assert facts == "&lt;b>x&lt;/b>" and command == "~~~~bash\npython run.py 'a=<script>'\n~~~~"
    assert links == "Data: [my file&amp;.csv](my%20file%26.csv)"


def test_a_run_page_links_to_its_data(tmp_path):
    make_scores().save(tmp_path / "scores.json")
    page = write_report(tmp_path).read_text()
    assert '<a href="scores.json">scores.json</a>' in page
    assert "[scores.json](scores.json)" in (tmp_path / "report.md").read_text()
