"""The card of a model that was made of a run's and that no stage has trained."""

from __future__ import annotations

from collections.abc import Sequence
from math import exp, inf
from pathlib import Path

from huggingface_hub import ModelCard, ModelCardData

from cpt.core.files import write_atomically
from cpt.evaluation.derived_rows import DerivedRow
from cpt.evaluation.scores import Scores, describe_conditions, find_conditions
from cpt.reporting.formats import MISSING, format_decimals, format_or_dash, format_perplexity, strip_controls
from cpt.reporting.license_terms import StatedLicense, decide_license
from cpt.reporting.model_card import PIPELINES, format_license, make_markdown_table
from cpt.reporting.page import IN_CELL, TEMPLATES, quote_markup


def write_derived_card(
    folder: Path,
    scores: Scores,
    row: DerivedRow,
    *,
    title: str,
    loading: str,
    facts: Sequence[str],
    licenses: Sequence[StatedLicense],
) -> Path:
    """Writes README.md into the folder of a model, with how it was made and its losses next to those of the
    run. The card may be published: `facts` are sentences without paths. `licenses` are those of all models
    and texts that it was made of."""
    license = decide_license(licenses)
    card = ModelCard.from_template(
        ModelCardData(
            pipeline_tag=PIPELINES.get(scores.run["objective"]),
            library_name="transformers",
            license=license.identifier or None,
            license_name=license.name or None,
            license_link=license.link or None,
            model_name=strip_controls(title),
            tags=["continual-pretraining", "cpt", row.row],
        ),
        template_path=str(TEMPLATES / "derived_card.md.j2"),
        quote=lambda text: quote_markup(str(text), IN_CELL),
        title=strip_controls(title),
        row=row,
        loading=loading,
        facts=facts,
        license=format_license(license, licenses),
        scores=scores,
        conditions=describe_conditions(find_conditions(scores)),
        table=make_markdown_table(
            ["text", "base", scores.rows[-1], row.row], list_derived_losses(scores, row)
        ),
    )
    path = folder / "README.md"
    write_atomically(path, f"{card}\n")
    return path


def list_derived_losses(scores: Scores, row: DerivedRow) -> list[list[str]]:
    """By text, the perplexity of the base, of the run's last model and of the derived one."""
    rows = []
    for column, text in enumerate(scores.domains):
        losses = [scores.nll[0][column], scores.nll[-1][column], row.nll[row.domains.index(text)]]
        rows.append([text, *map(format_as_perplexity, losses)])
    return rows


def format_as_perplexity(loss: float | None) -> str:
    """A loss in nats as a perplexity, with the loss in brackets.

    >>> format_as_perplexity(800.0)
    'inf (800.0000)'
    """
    if loss is None:
        return MISSING
    try:
        perplexity = exp(loss)
    except OverflowError:  # above 709 nats
        perplexity = inf
    return f"{format_or_dash(perplexity, format_perplexity)} ({format_decimals(loss)})"
