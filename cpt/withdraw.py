"""Give a domain of a finished run back: `python -m cpt.withdraw RUN DOMAIN [--output FOLDER]`.

Says which forms can give the domain back: its modules are left out (exact), what it added to the weights is
subtracted (approximate), or the run before it continues with the domains that followed (exact). With --output
the first possible form is written to FOLDER; RUN stays as it is. Exit code 1 after an error."""

import argparse
import shlex
import tempfile
from collections.abc import Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from cpt.core.errors import readable_errors
from cpt.core.exceptions import InvalidOptionError
from cpt.core.files import check_output, new_folder, writing
from cpt.core.messages import count_noun
from cpt.core.naming import quote, quote_list
from cpt.core.output import run_program
from cpt.core.run_command import find_config_folders, find_program_words
from cpt.core.secrets import redact_text
from cpt.evaluation.derived_rows import DerivedRow, describe_run_chats, is_made_already
from cpt.evaluation.run_folders import choose_run
from cpt.evaluation.scores import Scores
from cpt.evaluation.withdrawals import WITHDRAWN_FILE, load_withdrawals, record_withdrawal
from cpt.methods.base import ContinualMethod
from cpt.reporting.derived_card import write_derived_card
from cpt.reporting.license_choices import load_license_choices
from cpt.reporting.license_sources import find_licenses
from cpt.train import train
from cpt.trainer.base_files import copy_generation_config, save_tokenizer
from cpt.trainer.checkpoint import save_stage
from cpt.trainer.dry_run import estimate
from cpt.trainer.export_dtype import DTYPES, convert_files
from cpt.trainer.reduced_run import Reduction, copy_stage, replace_order, write_reduced_run
from cpt.trainer.rescored_chats import measure_run_chats
from cpt.trainer.rescoring import (
    RunTexts,
    known_texts,
    load_config_here,
    load_finished_scores,
    load_plan,
    open_run_texts,
)
from cpt.trainer.run_dir import RunDir
from cpt.trainer.run_outputs import finish_report, rewrite_report
from cpt.trainer.withdrawal import (
    FORMS,
    Withdrawal,
    describe_forms,
    find_run_with_stage,
    find_withdrawal,
    is_constant,
    list_kept_rows,
    remove_domain_modules,
    subtract,
)

ROW = "withdrawn"


def build_parser() -> argparse.ArgumentParser:
    paragraphs = str(__doc__).split("\n\n")
    parser = argparse.ArgumentParser(prog="python -m cpt.withdraw", description=paragraphs[1])
    add = parser.add_argument
    add("run", type=Path, metavar="RUN", help="the folder of a finished run")
    add("domain", metavar="DOMAIN", help="the domain that is given back")
    add("--form", choices=FORMS, help="the form; default: the first possible one")
    add("--output", type=Path, metavar="FOLDER", help="new folder for the result")
    add("--dry-run", action="store_true", help="only say what can be done, and what it costs")
    return parser


def main(arguments: Sequence[str]) -> int:
    options = build_parser().parse_args(arguments)
    with readable_errors():
        run = RunDir(choose_run(options.run))
        scores = load_finished_scores(run)
        check_domain(options.domain, scores)
        begun_form = None
        if options.output is not None and not options.dry_run:
            description = describe_form(options.domain, "subtracted")
            if is_made_already(options.output, config_hash=scores.config_hash, description=description):
                finish_report(run, scores, options.output)
                return 0

        if options.output is not None:
            begun_form = find_begun_form(run, scores, domain=options.domain, output=options.output)
            if begun_form is None:
                check_output(options.output)

        with run.locked():
            texts = open_run_texts(run, scores, needs_base=True)
            module = texts.build_method()
            withdrawal = find_withdrawal(run, scores, texts.method_plan, module, domain=options.domain)
            form = choose_form(withdrawal, options.form)
            if begun_form not in (None, form):
                check_output(options.output)
            print("\n".join(describe_forms(withdrawal)))

            is_written = options.output is not None and not options.dry_run
            if is_written:
                is_begun = begun_form is not None
                write_result(withdrawal, texts, module, form=form, folder=options.output, is_begun=is_begun)
            elif form == "continued":
                print(describe_cost(withdrawal, options.output))
    return 0


def check_domain(domain: str, scores: Scores) -> None:
    """Raises ValueError for a domain that the run has not learned."""
    order = list(scores.run["order"])
    if domain not in order:
        raise InvalidOptionError("DOMAIN", domain, allowed=", ".join(order))


def find_begun_form(run: RunDir, scores: Scores, *, domain: str, output: Path) -> str | None:
    """The form by which an earlier start of this command wrote the run in `output`; None for another folder.
    That start may have been killed before the run was measured and its model exported."""
    reduced_run = RunDir(output)
    if not (output / WITHDRAWN_FILE).is_file() or not reduced_run.config.is_file():
        return None
    *earlier_records, record = load_withdrawals(output)
    if earlier_records != load_withdrawals(run.path) or record["domain"] != domain:
        return None
    expected_config = {**run.stored_config(), "order": list(scores.run["order"]), "extend": None}
    expected_config["order"].remove(domain)
    return record["form"] if reduced_run.stored_config() == expected_config else None


def choose_form(withdrawal: Withdrawal, form: str | None) -> str:
    """The form to use: the requested one, or the first possible one. Raises ValueError if it is not possible,
    or if none is."""
    possible_forms = withdrawal.possible_forms
    if not possible_forms:
        reasons = [f"{name}: {reason}" for name, reason in withdrawal.why_not.items()]
        raise InvalidOptionError(
            "DOMAIN",
            withdrawal.domain,
            reason="; ".join(reasons),
            allowed=f"a new run with {shlex.quote(f'order={quote_list(withdrawal.remaining)}')}",
        )
    if form is not None and form not in possible_forms:
        raise InvalidOptionError(
            "--form", form, reason=withdrawal.why_not[form], allowed=", ".join(possible_forms)
        )
    return form or possible_forms[0]


def write_result(
    withdrawal: Withdrawal,
    texts: RunTexts,
    module: ContinualMethod,
    *,
    form: str,
    folder: Path,
    is_begun: bool,
) -> None:
    """Writes the result of a form and prints what was done. With `is_begun` the folder has the run of an
    earlier start, which is completed."""
    if form == "subtracted":
        row = write_subtracted(withdrawal, texts, module, folder)
        rewrite_report(withdrawal.run, withdrawal.scores)
        for fact in [f"{folder}: {row.description}", *describe_run_chats(row)]:
            print(fact)
        print_losses(withdrawal.scores, dict(zip(row.domains, row.nll, strict=True)))
        return
    if form == "continued" and not withdrawal.is_last:
        if withdrawal.number > 1:
            if not is_begun:
                with new_folder(folder) as partial_folder:
                    write_rewound(withdrawal, partial_folder)
            print(f"{folder}: the run before {withdrawal.domain}")
        print(format_withdraw_command(withdrawal, folder))
        return

    if not is_begun:
        with new_folder(folder) as partial_folder:
            if form == "left_out":
                write_left_out(withdrawal, module, partial_folder)
            else:
                write_rewound(withdrawal, partial_folder)
    # Nothing is left to train: what is missing is measured, the model exported and the report written.
    reduced_run = RunDir(folder)
    with known_texts():
        train(load_config_here(reduced_run), run_dir=folder)
    reduced_scores = load_finished_scores(reduced_run)
    print(f"{folder}: {describe_form(withdrawal.domain, form)}")
    print_losses(withdrawal.scores, dict(zip(reduced_scores.domains, reduced_scores.nll[-1], strict=True)))


def describe_form(domain: str, form: str) -> str:
    """One sentence on what was done, without paths."""
    if form == "left_out":
        return f"The modules of {domain} were removed; those of other domains are unchanged"
    if form == "subtracted":
        return (
            f"What the stage of {domain} added to the weights was subtracted from the run's last model "
            "(approximate: later stages were trained with it)"
        )
    return f"The run continues from the stage before {domain}, and never had it"


def write_left_out(withdrawal: Withdrawal, module: ContinualMethod, folder: Path) -> None:
    """Writes the finished run without the modules of a domain. Cells of the matrix that depend on these
    modules are left out; those of the last row are measured again."""
    scores = withdrawal.scores
    rows = list_kept_rows(scores, withdrawal.number, until_stage=False)
    keeps_cell = partial(is_constant, withdrawal.plan, scores, number=withdrawal.number)
    reduction = Reduction(
        domain=withdrawal.domain, order=withdrawal.remaining, rows=rows, keeps_cell=keeps_cell
    )
    reduced_run = write_reduced_run(folder, withdrawal.run, scores, reduction)
    remove_domain_modules(module, index=withdrawal.number - 1, num_domains=len(scores.run["order"]))
    path = reduced_run.stage_path(len(rows) - 1)
    path.parent.mkdir()
    save_stage(module, path)
    record_form(withdrawal, folder, "left_out")


def write_rewound(withdrawal: Withdrawal, folder: Path) -> None:
    """Writes the run as it was before a domain, with the later domains in its order."""
    number = withdrawal.number
    scores = withdrawal.scores
    reduction = Reduction(
        domain=withdrawal.domain,
        order=withdrawal.remaining,
        rows=list_kept_rows(scores, number, until_stage=True),
        keeps_cell=lambda row, text: True,
    )
    reduced_run = write_reduced_run(folder, withdrawal.run, scores, reduction)
    source = find_run_with_stage(withdrawal.run, scores, number - 1)
    assert source is not None  # else this form is not possible
    copy_stage(reduced_run, source, number - 1)
    record_form(withdrawal, folder, "continued")


def record_form(withdrawal: Withdrawal, folder: Path, form: str) -> None:
    """Stores in the folder of a result which domain was withdrawn from which run, and how."""
    record_withdrawal(
        folder,
        withdrawal.run.path,
        {"domain": withdrawal.domain, "form": form, "description": describe_form(withdrawal.domain, form)},
    )


def write_subtracted(
    withdrawal: Withdrawal, texts: RunTexts, module: ContinualMethod, folder: Path
) -> DerivedRow:
    """Writes a model with its row, which no run can continue."""
    last = len(withdrawal.scores.rows) - 1
    subtract(module, texts.build_method(), withdrawal.run, number=withdrawal.number, last=last)
    with new_folder(folder) as partial_folder, writing(folder):
        # Scored before the export, which may change the module.
        text_scores = texts.score(module, row=ROW)
        run_chats = measure_run_chats(texts, module, partial_folder, config=module.model.config)
        loading = module.export(partial_folder, withdrawal.scores.run["order"])

        base = texts.base
        save_tokenizer(base.tokenizer, base=base.tokenizer_files, folder=partial_folder)
        copy_generation_config(base=base.checkpoint, folder=partial_folder)
        dtype = withdrawal.scores.exported.get("dtype", "float32")
        if dtype in DTYPES:
            convert_files(partial_folder, DTYPES[dtype])

        description = describe_form(withdrawal.domain, "subtracted")
        row = texts.store(partial_folder, text_scores, row=ROW, description=description, run_chats=run_chats)
        write_derived_card(
            partial_folder,
            withdrawal.scores,
            row,
            title=f"{withdrawal.scores.run['name']} without {withdrawal.domain}",
            loading=loading.replace(str(partial_folder), "model"),
            facts=[description, *describe_run_chats(row)],
            licenses=find_licenses(
                withdrawal.run.stored_config(),
                withdrawal.scores,
                stated_for_texts=load_license_choices(withdrawal.run.path).texts,
            ),
        )
    return row


def describe_cost(withdrawal: Withdrawal, folder: Path | None) -> str:
    """What continuing costs, as plan=true estimates it, and the command."""
    command = format_withdraw_command(withdrawal, folder)
    if withdrawal.is_last:
        return f"Cost: no training; {command}"
    with tempfile.TemporaryDirectory(dir=withdrawal.run.path.parent) as name, known_texts():
        reduced_run = RunDir(Path(name) / "run")
        if withdrawal.number > 1:
            write_rewound(withdrawal, reduced_run.path)
            plan = load_plan(reduced_run, withdrawal.remaining)
        else:
            plan = load_plan(withdrawal.run, withdrawal.remaining)
        cost = estimate(plan, reduced_run, None)
    return f"Cost: {format_cost(cost)}; {command}"


def format_cost(cost: dict[str, Any]) -> str:
    """Steps, tokens and time of what is left of a run."""
    steps = sum(stage["left_steps"] for stage in cost["stages"])
    tokens = sum(stage["tokens"] for stage in cost["stages"] if stage["left_steps"])
    time = timedelta(seconds=round(cost["seconds"]["total"]))
    return f"{count_noun(steps, 'step')}, {count_noun(tokens, 'token')}, {time} on this machine"


def format_withdraw_command(withdrawal: Withdrawal, folder: Path | None) -> str:
    """The command that withdraws the domain by continuing: this program and, unless the domain is the last
    one, the command of the run with the remaining domains."""
    run = withdrawal.run.path
    target = folder or Path("FOLDER")
    # This program writes what comes before the domain, unless it has done so: not the base before the first.
    if withdrawal.is_last or (withdrawal.number > 1 and not target.exists()):
        withdraw_command = shlex.join(
            ["python", "-m", "cpt.withdraw", str(run), withdrawal.domain, f"--output={target}"]
        )
        if withdrawal.is_last:
            return withdraw_command
        return f"{withdraw_command} && {format_run_command(withdrawal, target)}"
    return format_run_command(withdrawal, target)


def format_run_command(withdrawal: Withdrawal, folder: Path) -> str:
    """The command that trains the remaining domains in a folder, without secrets."""
    run = withdrawal.run.path
    overrides_file = run / ".hydra" / "overrides.yaml"
    folder_override = f"hydra.run.dir={quote(str(folder))}"
    if not overrides_file.exists():
        changes = [f"order={quote_list(withdrawal.remaining)}", folder_override]
        return f"the command of the run with {shlex.join(changes)}"
    overrides = yaml.safe_load(overrides_file.read_text(encoding="utf-8")) or []
    words = [
        *find_program_words(),
        *find_config_folders(run),
        *replace_order(overrides, withdrawal.remaining),
    ]
    return redact_text(shlex.join([*words, folder_override]))


def print_losses(scores: Scores, losses: dict[str, float | None]) -> None:
    """Prints the losses of the run's last row, and those without the domain."""
    print(f"{'text':24}{'run':>9}{'without':>9}{'change':>9}  nats per token")
    for text, before in zip(scores.domains, scores.nll[-1], strict=True):
        after = losses.get(text)
        if before is not None and after is not None:
            print(f"{text:24}{before:9.4f}{after:9.4f}{after - before:+9.4f}")


if __name__ == "__main__":
    run_program(main)
