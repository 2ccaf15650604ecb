"""`python -m cpt.withdraw`: what a run is without a domain, by each form, and what it says where none can."""

import json
import shlex
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hydra.core.override_parser.overrides_parser import OverridesParser
from safetensors.torch import load_file
from torch import nn

from cpt import verify, withdraw
from cpt.adapters.domain_store import DomainParams, Router, Scope
from cpt.data import corpora
from cpt.data.corpora import SharedDocuments
from cpt.evaluation.derived_rows import DerivedRow
from cpt.reporting.run_tables import describe_quantization
from cpt.trainer.checkpoint import load_stage
from cpt.trainer.reduced_run import Reduction, reduce_scores
from cpt.trainer.run_dir import RunDir
from cpt.trainer.withdrawal import drop_source, has_rows_of, is_constant, is_source, why_not_left_out
from tests.runs.reading import assert_same_bits, read_scores, same_state, scores_of, state_of, times
from tests.support.campaign import run_few
from tests.support.example_runs import DOMAINS, make_scores
from tests.support.task_fixtures import write_tasks

THREE = "order=[law,food,space]"
FEW = "trainer.steps=2"
OWN_MODULES = {
    "lora": ["method=lora", "method.per_domain=true"],
    "adapter": ["method=adapter", "method.per_domain=true"],
    "prompt": ["method=prompt", "method.num_virtual_tokens=3"],
    "demix": ["method=demix", "method.start=base"],
}


def cells_of(scores, *, rows, texts):
    """Losses by row and text."""
    cells = {}
    for row in rows:
        losses = dict(zip(scores.domains, scores.nll[scores.rows.index(row)], strict=True))
        cells.update({(row, text): losses[text] for text in texts})
    return cells


@pytest.mark.parametrize("name", run_few([*OWN_MODULES], ["lora"]))
def test_modules_of_a_domain_are_left_out_and_all_other_cells_keep_their_bits(
    name, small, start, tmp_path, capsys, caplog, monkeypatch
):
    # What the run warns of in its texts, the program does not repeat.
    monkeypatch.setattr(corpora, "find_shared_documents", lambda texts: [SharedDocuments("law", "food", 3)])
    run = tmp_path / "run"
    routing = "routing@method.routing=domain"
    start(small(THREE, FEW, *OWN_MODULES[name], routing), run)
    before = times(run)
    assert "Held-out documents in the training text" in caplog.text
    caplog.clear()
    arguments = [str(run), "food", "--output", str(tmp_path / "out")]
    assert withdraw.main([*arguments, "--dry-run"]) == 0
    assert "left out    exact" in capsys.readouterr().out and not (tmp_path / "out").exists()
    assert withdraw.main(arguments) == 0
    assert "Held-out documents" not in caplog.text
    assert {path: time for path, time in times(run).items() if "/.lock" not in path} == before

    scores = scores_of(run)
    reduced = scores_of(tmp_path / "out")
    assert reduced.rows == ["base", "law", "space"] and reduced.domains == ["law", "space", "general"]
    cells = cells_of(reduced, rows=reduced.rows, texts=reduced.domains)
    assert cells == cells_of(scores, rows=reduced.rows, texts=reduced.domains) and reduced.run["finished"]
    # The modules of the other domains, and the exported model of the last one.
    old_state = state_of(run)
    state = state_of(tmp_path / "out")
    prefix = "domain_params."
    keys = [key for key in state if key.startswith(f"{prefix}1:")]
    for key in keys:
        assert torch.equal(state[key], old_state[key.replace(f"{prefix}1:", f"{prefix}2:")])
    assert not [key for key in state if key.startswith(f"{prefix}2:")]
    card = (tmp_path / "out" / "model" / "README.md").read_text()
    assert "The modules of food were removed" in card and verify.main([str(tmp_path / "out")]) == 0


@pytest.mark.parametrize("form", run_few(["left_out", "continued"], ["continued"]))
def test_a_killed_withdrawal_is_completed_by_the_same_command(form, small, start, tmp_path, monkeypatch):
    run = tmp_path / "run"
    options = ["save_all_stages=true"]
    if form == "left_out":
        options = [*OWN_MODULES["lora"], "routing@method.routing=domain"]
    start(small("order=[law,food]", FEW, *options), run)
    arguments = [str(run), "food", "--output", str(tmp_path / "out"), "--form", form]

    def fail(*args, **kwargs):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched, pytest.raises(SystemExit):
        patched.setattr("cpt.withdraw.train", fail)
        withdraw.main(arguments)
    assert not scores_of(tmp_path / "out").run["finished"]
    with pytest.raises(SystemExit):  # of another domain, whose result it is not
        withdraw.main([str(run), "law", "--output", str(tmp_path / "out")])
    assert withdraw.main(arguments) == 0
    assert withdraw.main([*arguments[:3], str(tmp_path / "whole"), *arguments[4:]]) == 0
    assert_same_bits(tmp_path / "out", tmp_path / "whole")
    assert (tmp_path / "out" / "model" / "README.md").is_file() and verify.main([str(tmp_path / "out")]) == 0


def test_a_run_before_the_domain_continues_with_those_that_followed(small, start, tmp_path, capsys):
    run = tmp_path / "run"
    start(small(THREE, FEW, "save_all_stages=true"), run)
    # The last domain is given back without training.
    assert withdraw.main([str(run), "space", "--output", str(tmp_path / "two")]) == 0
    assert same_state(state_of(tmp_path / "two"), load_stage(run / "stages" / "002.pt"))
    two = scores_of(tmp_path / "two")
    cells = cells_of(two, rows=two.rows, texts=two.domains)
    assert cells == cells_of(scores_of(run), rows=two.rows, texts=two.domains) and two.run["finished"]
    assert two.rows == ["base", "law", "food"] and two.domains == ["law", "food", "general"]
    assert "and never had it" in (tmp_path / "two" / "model" / "README.md").read_text()

    # For an earlier one the command of the run trains the rest: as a run that never had the domain.
    (run / ".hydra").mkdir()
    (run / ".hydra" / "overrides.yaml").write_text("[optim.lr=1, 'order=[law,food,space]', extend=other]")
    sources = [{"provider": "main", "path": "conf"}, {"provider": "command-line", "path": "mine"}]
    (run / ".hydra" / "hydra.yaml").write_text(
        json.dumps({"hydra": {"runtime": {"config_sources": sources}}})
    )
    capsys.readouterr()
    assert withdraw.main([str(run), "food"]) == 0
    output = capsys.readouterr().out
    assert "subtracted  no: its weights are not a sum over domains" in output
    first = f"python -m cpt.withdraw {run} food --output=FOLDER"
    command = "python run.py --config-dir=mine optim.lr=1 'order=[law,space]' hydra.run.dir=FOLDER"
    assert "Cost: 2 steps, " in output and output.endswith(f"; {first} && {command}\n")
    assert withdraw.main([str(run), "food", "--output", str(tmp_path / "rest")]) == 0
    cfg = small("order=[law,space]", FEW, "save_all_stages=true")
    start(cfg, tmp_path / "rest")
    start(cfg, tmp_path / "fresh")
    assert_same_bits(tmp_path / "rest", tmp_path / "fresh")


@pytest.mark.parametrize(
    "method",
    run_few(
        ["method=inclora method.adapter_storage=separate", "method=inclora method.adapter_storage=merged"],
        ["method=inclora method.adapter_storage=separate"],
    ),
)
def test_an_adapter_is_subtracted_from_those_that_follow(method, small, start, tmp_path, capsys):
    run = tmp_path / "run"
    options = [*method.split(), "save_all_stages=true", "optim.lr=0.05"]
    start(small(THREE, FEW, *options), run)
    arguments = [str(run), "food", "--form=subtracted", "--output", str(run / "without_food")]
    assert withdraw.main(arguments) == 0
    assert "approximate" in capsys.readouterr().out

    state = load_stage(run / "stages" / "002.pt")
    a, b = (state[f"model.model.layers.0.mlp.Wi.lora_{factor}.default.weight"] for factor in "AB")
    weight = "model.layers.0.mlp.Wi.weight"
    trained = load_file(run / "model" / "model.safetensors")[weight]
    reduced = load_file(run / "without_food" / "model.safetensors")[weight]
    scale = small(*method.split()).method.lora_alpha / len(a)
    assert torch.allclose(trained - reduced, scale * b @ a, atol=1e-6) and (scale * b @ a).abs().max() > 1e-4
    row = DerivedRow.load(run / "without_food" / "row.json")
    assert row.domains == scores_of(run).domains and row.nll != scores_of(run).nll[-1]

    # As of a start that was killed before it wrote the page.
    (run / "report.md").write_text("killed here")
    assert withdraw.main(arguments) == 0
    assert "made by an earlier start, and left as it is" in capsys.readouterr().out
    assert RunDir(run).find_damaged_outputs(full=True) == []


def test_modules_that_are_trained_fully_are_subtracted_with_the_adapters(small_gpt2, start, tmp_path, capsys):
    method = ["method=inclora", "method.adapter_storage=separate", "method.modules_to_save=[ln_f]"]
    for name, options in (("few", []), ("run", ["save_all_stages=true"])):
        start(small_gpt2(THREE, FEW, *method, "optim.lr=0.05", *options), tmp_path / name)
    with pytest.raises(SystemExit):
        withdraw.main([str(tmp_path / "few"), "food", "--form=subtracted"])
    assert "no file of stage 1 (save_all_stages=true keeps them)" in capsys.readouterr().err

    run = tmp_path / "run"
    arguments = [str(run), "food", "--form=subtracted", "--output", str(run / "without_food")]
    assert withdraw.main(arguments) == 0
    name = "transformer.ln_f.weight"
    stages = [load_stage(run / "stages" / f"00{number}.pt")[f"model.{name}"] for number in (1, 2, 3)]
    reduced = load_file(run / "without_food" / "model.safetensors")[name]
    task_vector = stages[1] - stages[0]
    assert torch.allclose(reduced, stages[2] - task_vector, atol=1e-6) and task_vector.abs().max() > 1e-3


def test_norms_of_dora_are_of_the_weights_that_are_left(small, start, tmp_path):
    run = tmp_path / "run"
    method = ["method=merge_lora", "method.rule=task_arithmetic", "method.use_dora=true"]
    start(small(THREE, FEW, *method, "optim.lr=0.05", "save_all_stages=true"), run)
    arguments = [str(run), "food", "--form=subtracted", "--output", str(run / "without_food")]
    assert withdraw.main(arguments) == 0
    name = "model.layers.0.mlp.Wi"
    key = f"model.{name}.base_layer.weight"
    stages = [load_stage(run / "stages" / f"00{number}.pt")[key] for number in (1, 2, 3)]
    reduced = load_file(run / "without_food" / "model.safetensors")[f"{name}.weight"]
    task_vector = stages[1] - stages[0]
    assert torch.allclose(reduced, stages[2] - task_vector, atol=1e-6) and task_vector.abs().max() > 1e-3


@pytest.mark.campaign
@pytest.mark.parametrize("rule", ["task_arithmetic", "average"])
def test_merged_weights_are_those_of_the_other_domains(rule, small, start, tmp_path):
    run = tmp_path / "run"
    method = ["method=merge", f"method.rule={rule}", "method.start=base"]
    start(small(THREE, FEW, *method, "save_all_stages=true"), run)
    arguments = [str(run), "food", "--form=subtracted", "--output", str(run / "without_food")]
    assert withdraw.main(arguments) == 0
    reduced = load_file(run / "without_food" / "model.safetensors")
    name = "model.layers.0.mlp.Wi.weight"
    stages = [load_stage(run / "stages" / f"00{number}.pt")[f"model.{name}"] for number in (1, 2, 3)]
    if rule == "average":
        ends = [stages[0], 2 * stages[1] - stages[0], 3 * stages[2] - 2 * stages[1]]
        expected = (ends[0] + ends[2]) / 2
    else:
        expected = stages[2] - (stages[1] - stages[0])
    assert torch.allclose(reduced[name], expected, atol=1e-6)


EACH = ["answers.when=each", "answers.max_new_tokens=4", "divergence=base", "monitor.every=1"]


def test_what_was_measured_on_other_domains_stays(small_gpt2, start, tmp_path, capsys):
    """Answers and divergences after stages whose weights were not kept, monitoring, the mixture."""
    names = ["law", "food", "space"]
    tasks = tmp_path / "tasks"
    tasks.mkdir()
    write_tasks(tasks, names, train=20, test=6)
    options = ["domains=tasks", f"domains.root={tasks}", "model.max_seq_length=160", FEW, *EACH]
    options += [*OWN_MODULES["lora"], "routing@method.routing=domain"]
    start(small_gpt2(THREE, *options), tmp_path / "run")
    scores = read_scores(tmp_path / "run")

    for domain, rows in (("law", [0, 2, 3]), ("food", [0, 1, 3]), ("space", [0, 1, 2])):
        folder = tmp_path / f"without_{domain}"
        assert withdraw.main([str(tmp_path / "run"), domain, "--output", str(folder)]) == 0
        reduced = read_scores(folder)
        left_domains = [name for name in names if name != domain]
        assert reduced["run"]["finished"] and [*reduced["answers"]["tasks"]] == left_domains
        for task in left_domains:
            for measure, values in scores["answers"]["tasks"][task]["measures"].items():
                expected = [values[row] for row in rows]
                assert reduced["answers"]["tasks"][task]["measures"][measure] == expected
        for row, old_row in enumerate(rows):
            kl = dict(scores["divergence"]["kl"][old_row])
            del kl[domain]
            assert reduced["divergence"]["kl"][row] == kl
        assert [*reduced["monitor"]] == left_domains and domain not in json.dumps(reduced["monitor"])
        assert not list(folder.rglob(f"*/{domain}*")) and verify.main([str(folder)]) == 0
        assert {*reduced["phases"]["learn"]} == {*left_domains}
    assert "The report could not be made" not in capsys.readouterr().err


def test_a_run_with_generated_text_continues_with_what_it_has_kept_of_other_domains(
    small_gpt2, start, tmp_path
):
    options = [FEW, "replay=generated", "replay.past_ratio=0.5", "replay.prefix=3", "replay.starts=5"]
    options += ["replay.batch_size=4", "save_all_stages=true"]
    start(small_gpt2(THREE, *options), tmp_path / "run")
    assert withdraw.main([str(tmp_path / "run"), "food", "--output", str(tmp_path / "rest")]) == 0
    memory_folder = tmp_path / "rest" / "generated" / "kept"
    assert sorted(path.name for path in memory_folder.iterdir()) == ["law.json", "space.json"]
    cfg = small_gpt2("order=[law,space]", *options)
    start(cfg, tmp_path / "rest")
    start(cfg, tmp_path / "fresh")
    assert_same_bits(tmp_path / "rest", tmp_path / "fresh")


def test_the_scores_of_a_reduced_run_are_of_its_own_stages_and_texts():
    unquantized = {"law": 1.0, "food": 2.0, "space": 3.0, "general": 4.0}
    part = {"asked_share": 1.0, "rows": 8, "tokens": 64, "scored": 56, "epochs": None}
    mixture = {name: {"new": part} for name in DOMAINS}
    scores = make_scores(grown=[1, 2], unquantized=unquantized, mixture=mixture)
    grown_without = {"law": [1], "food": [1, 1], "space": [1, 2]}
    for number, domain in enumerate(DOMAINS, start=1):
        left_domains = [name for name in DOMAINS if name != domain]
        rows = [row for row in range(4) if row != number]
        reduction = Reduction(domain=domain, order=left_domains, rows=rows, keeps_cell=lambda row, text: True)
        reduced = reduce_scores(scores, reduction)
        assert reduced.grown == grown_without[domain] and [*reduced.mixture] == left_domains
        assert describe_quantization(reduced) and [*reduced.unquantized] == [*left_domains, "general"]
        assert [*reduced.activity_seconds["learn"]] == left_domains


def make_module(*, sources=None):
    """A method with modules per domain alone, or one whose modules are copies."""
    model = nn.Linear(2, 2)
    params = DomainParams(model, ["weight"])
    router = Router(params, SimpleNamespace(learned="domain", prior="uniform"), None)
    return SimpleNamespace(domain_params=params, router=router, scope=Scope(("weight",), ()), sources=sources)


def make_plan(**changes):
    values = {"masks": (), "carry": "none", "start": "base", "past_ratio": 0.0, "budget": False}
    values.update(stop=None)
    values.update(changes)
    return SimpleNamespace(
        names={"method": "lora"},
        masks=values["masks"],
        carry=values["carry"],
        mixture=SimpleNamespace(past_ratio=values["past_ratio"]),
        observer=SimpleNamespace(is_active=values["budget"]),
        monitor=SimpleNamespace(stop=values["stop"], past=4),
        method=SimpleNamespace(options=SimpleNamespace(start=values["start"])),
    )


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, ""),
        ({"past_ratio": 0.1}, "replay of its text"),
        ({"masks": ("soft",)}, "statistics"),
        ({"carry": "moments"}, "optim.state_across_domains=moments"),
        ({"budget": True}, "budget"),
        ({"stop": 0.1}, "monitor.stop=0.1"),
        ({"start": "previous"}, "method.start=previous"),
    ],
)
def test_modules_are_left_out_only_where_nothing_of_the_domain_is_in_others(changes, reason):
    module = make_module()
    answer = why_not_left_out(make_plan(**changes), module, number=1, num_domains=2)
    assert reason in answer and bool(answer) == bool(reason)
    assert why_not_left_out(make_plan(**changes), module, number=2, num_domains=2) == ""  # nothing followed
    module.scope = Scope(("weight", "bias"), ())
    assert "that all domains share" in why_not_left_out(make_plan(), module, number=1, num_domains=2)


def test_copies_of_modules_are_known_by_their_sources():
    sources = torch.tensor([-1, 0, 0, 2])
    assert [is_source(sources, index) for index in range(4)] == [True, False, True, False]
    assert drop_source(sources, 1).tolist() == [-1, 0, 1]


def test_cells_that_the_modules_of_the_domain_may_have_decided_are_measured_again():
    scores = SimpleNamespace(rows=["base", "law", "food", "space"])
    for unlearned, expected in (("base", [True] * 4), ("posterior", [True, True, False, False])):
        routing = SimpleNamespace(learned="domain", unlearned=unlearned)
        plan = SimpleNamespace(method=SimpleNamespace(options=SimpleNamespace(routing=routing)))
        is_copied = [is_constant(plan, scores, row, "general", number=2) for row in range(4)]
        assert is_copied == expected and is_constant(plan, scores, 3, "law", number=2)


@pytest.mark.campaign
def test_the_run_that_was_extended_has_the_stage_before(small, start, tmp_path):
    start(small("order=[law]", FEW), tmp_path / "first")
    start(small("order=[law,food]", FEW, f"extend={tmp_path / 'first'}"), tmp_path / "second")
    assert not (tmp_path / "second" / "stages" / "001.pt").exists()
    assert withdraw.main([str(tmp_path / "second"), "food", "--output", str(tmp_path / "out")]) == 0
    assert_same_bits(tmp_path / "out", tmp_path / "first")

    scores = scores_of(tmp_path / "first")
    assert has_rows_of(scores_of(tmp_path / "second"), scores)
    scores.nll[1][0] += 1e-9
    assert not has_rows_of(scores_of(tmp_path / "second"), scores)


def test_what_cannot_be_given_back_is_refused_in_one_line(small, start, tmp_path, capsys):
    run = tmp_path / "run"
    start(small("order=[law,food]", FEW), run)
    refusals = {
        "DOMAIN=sea is invalid. Allowed: law, food": ["sea"],
        "no file of stage 1 (save_all_stages=true keeps them)": ["food"],
        "--form=left_out is invalid": ["law", "--form=left_out"],
        "it exists": ["law", "--output", str(tmp_path)],
    }
    for message, arguments in refusals.items():
        with pytest.raises(SystemExit) as exit_info:
            withdraw.main([str(run), *arguments])
        lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("cpt: ")]
        assert exit_info.value.code == 1 and len(lines) == 1 and message in lines[0], lines
    assert withdraw.main([str(run), "law"]) == 0  # the base learns what followed
    output = capsys.readouterr().out
    assert "Cost: 2 steps" in output and "the command of the run with 'order=[food]'" in output


def test_printed_commands_are_read_as_they_are_meant(tmp_path):
    """Whatever the folders and domains are called: Hydra would read 3.10 as a number, and commas as a list."""
    run = RunDir(tmp_path / "run")
    (run.path / ".hydra").mkdir(parents=True)
    withdrawal = SimpleNamespace(run=run, remaining=["3.10", "a,b", "it's"])
    expected = {"order": withdrawal.remaining, "hydra.run.dir": "runs/[1], new"}
    assert read_overrides(withdraw.format_run_command(withdrawal, Path("runs/[1], new"))) == expected

    (run.path / ".hydra" / "overrides.yaml").write_text("['order=[x]']")
    assert read_overrides(withdraw.format_run_command(withdrawal, Path("runs/[1], new"))) == expected


def read_overrides(command):
    words = [word for word in shlex.split(command) if "=" in word]
    overrides = OverridesParser.create().parse_overrides(words)
    return {override.key_or_group: override.value() for override in overrides}
