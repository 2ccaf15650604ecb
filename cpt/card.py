"""Write a run's model card again, and publish its model: `python -m cpt.card RUN [--push NAME]`.

The card is model/README.md. --push NAME makes a private repository of the Hugging Face Hub of the exported
model and its card: no checkpoints, no text, no logs. Exit code 1 after an error."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from cpt.core.errors import readable_errors
from cpt.core.exceptions import InvalidOptionError
from cpt.core.files import CHECKSUMS, read_checksums, write_checksums
from cpt.core.output import run_program
from cpt.evaluation.run_folders import choose_run
from cpt.evaluation.scores import Scores
from cpt.reporting.license_choices import LicenseChoices, load_license_choices, save_license_choices
from cpt.reporting.license_sources import list_trained_texts
from cpt.reporting.license_terms import check_identifier
from cpt.reporting.model_card import describe_license, write_model_card
from cpt.reporting.publish import check_repository, plan_publication, push
from cpt.trainer.run_dir import RunDir

NONE = "none"  # instead of an identifier: the one that was given before is forgotten


def build_parser() -> argparse.ArgumentParser:
    paragraphs = str(__doc__).split("\n\n")
    parser = argparse.ArgumentParser(prog="python -m cpt.card", description=paragraphs[1])
    add = parser.add_argument
    add("run", type=Path, metavar="RUN", help="the folder of a finished run")
    add(
        "--license",
        metavar="ID",
        help="license of the model, by its identifier on the Hub; later cards of the run keep it. none: "
        "forget the one that was given",
    )
    add(
        "--data-license",
        action="append",
        default=[],
        metavar="TEXT=ID",
        help="license of a text that the model was trained on; kept and forgotten likewise; may be repeated",
    )
    add("--push", metavar="NAME", help="publish the model as a repository of the Hub, private by default")
    add("--public", action="store_true", help="make a public repository")
    add("--update", action="store_true", help="push to a repository that exists")
    add("--dry-run", action="store_true", help="list what --push would upload, without network")
    return parser


def main(arguments: Sequence[str]) -> int:
    options = build_parser().parse_args(arguments)
    with readable_errors():
        run = RunDir(choose_run(options.run))
        check_push_options(options)
        scores = load_exported_scores(run)
        if options.push is not None:
            check_exported_model(run)
        is_online = options.push is not None and not options.dry_run
        choices = read_license_choices(options, run, scores)

        with run.locked():
            save_license_choices(run.path, choices)
            card = write_model_card(run.path, scores, is_online=is_online)
            # Else the next start of the run would find the new card damaged.
            if (run.path / CHECKSUMS).exists():
                write_checksums(run.path, [card], unread=read_checksums(run.path))
            print(card)
            print(describe_license(card))
            if options.push is not None:
                publication = plan_publication(run.model, name=options.push, is_private=not options.public)
                print("\n".join(publication.describe()))
                if is_online:
                    print(push(publication, updates=options.update))
    return 0


def check_push_options(options: argparse.Namespace) -> None:
    """Raises ValueError for options of --push without it, for a name that no repository can have, and where
    there is no token to push with."""
    for name in ("public", "update", "dry_run"):
        if getattr(options, name) and options.push is None:
            raise ValueError(f"--{name.replace('_', '-')} is invalid without --push NAME")
    if options.push is not None:
        check_repository(options.push, needs_token=not options.dry_run)


def load_exported_scores(run: RunDir) -> Scores:
    """The scores of a finished run that trained. Raises ValueError for any other folder."""
    scores = run.load_scores()
    reason = ""
    if scores is None:
        reason = "it has no scores.json"
    elif not scores.run["finished"]:
        reason = scores.state
    elif len(scores.rows) < 2:
        reason = "it has trained nothing"
    if scores is None or reason:
        raise InvalidOptionError(
            "RUN", run.path, reason=reason, allowed="the folder of a finished run that trained"
        )
    if not (run.model / "config.json").is_file():
        raise ValueError(f"{run.model} holds no exported model; the command of the run exports it again")
    return scores


def check_exported_model(run: RunDir) -> None:
    """Raises ValueError for damaged files of the exported model, but its card, which is written again."""
    damage = []
    for line in run.find_damaged_outputs(full=True):
        if line.startswith("model/") and not line.startswith("model/README.md "):
            damage.append(line)
    if damage:
        raise InvalidOptionError("RUN", run.path, reason="; ".join(damage), allowed="a whole run")


def read_license_choices(options: argparse.Namespace, run: RunDir, scores: Scores) -> LicenseChoices:
    """The licenses that were given to earlier cards of a run, changed by the options. Raises ValueError for
    an identifier that the Hub does not list, and for a text that the model was not trained on."""
    stored = load_license_choices(run.path)
    model_license = stored.model
    if options.license is not None:
        model_license = read_license_identifier(options.license, option="--license")

    text_licenses = dict(stored.texts)
    trained_texts = list_trained_texts(run.stored_config(), scores)
    for entry in options.data_license:
        text, equals, text_license = entry.rpartition("=")
        if not equals or text not in trained_texts:
            allowed = f"TEXT=ID with a TEXT of {', '.join(trained_texts)}"
            raise InvalidOptionError("--data-license", entry, allowed=allowed)
        identifier = read_license_identifier(text_license, option=f"--data-license {text}")
        if identifier:
            text_licenses[text] = identifier
        else:
            text_licenses.pop(text, None)
    return LicenseChoices(model=model_license, texts=text_licenses)


def read_license_identifier(text: str, *, option: str) -> str:
    """The identifier that an option gives; empty for `none`. Raises ValueError for one that the Hub does not
    list."""
    return "" if text == NONE else check_identifier(text, option=option)


if __name__ == "__main__":
    run_program(main)
