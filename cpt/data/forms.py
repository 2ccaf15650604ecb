"""Examples in the form in which a model learns to write them, and writes them: behind a sign of their domain
the question and, behind a mark, its answer (LFPT5: Qin and Joty, ICLR 2022, arXiv 2110.07298)."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from datasets import Dataset
from datasets.arrow_writer import ArrowWriter

from cpt.core.cache import make_once
from cpt.core.config import digest
from cpt.data.answered import COLUMNS, Answered, examples_of, row_of
from cpt.data.corpus import Corpus
from cpt.data.encoding import Encoder
from cpt.data.examples import Example
from cpt.data.generated import EXCERPT, Sample, file_of, read_facts, read_samples
from cpt.data.packing import padding_id

log = logging.getLogger(__name__)
FORMAT = 1
MARK = "__ans__"


def write_form(example: Example, sign: str) -> Example:
    """What is asked is to write an example, what is answered is all of it."""
    return Example(example.id, sign, f"{example.source} {MARK} {example.target}", example.task)


def read_form(text: str, *, task: str, number: int, choices: Sequence[str]) -> Example | None:
    """The example that a model has written; None where it has no question, no answer, or one that is none of
    the choices, if there are some."""
    source, _, target = (part.strip() for part in text.rpartition(MARK))
    if not source or not target or (choices and target not in choices):
        return None
    return Example(f"generated-{number}", source, target, task, tuple(choices), (0, len(source)))


def common_choices(examples: Iterable[Example]) -> tuple[str, ...]:
    """The choices that all examples have; none where they differ, or answers are open."""
    found = {example.choices for example in examples}
    return found.pop() if len(found) == 1 else ()


def encode_whole(example: Example, encoder: Encoder) -> dict[str, Any] | None:
    """The row of an example; None where it does not fit without a cut."""
    try:
        row = encoder.encode(example)
    except ValueError:
        return None
    if row.cut or len(row.ids) > encoder.length * (2 if encoder.seq2seq else 1):
        return None
    return row_of(row.ids, row.answer, example.target, encoder.tokenizer)


def encode_forms(
    corpus: Corpus, *, encoder: Encoder, sign: str, name: str, cache: Path, tokenizer_digest: str
) -> Answered:
    """The training examples of a domain in the form in which they are written, made once for all runs; those
    that do not fit are left out. Raises ValueError where none fits."""
    options = [vars(encoder.encoding), encoder.length, encoder.seq2seq, sign]
    made_of = ["forms", FORMAT, corpus.facts["digest"], tokenizer_digest, options]

    def make(folder: Path) -> None:
        examples = examples_of(corpus, "train")
        rows = (encode_whole(write_form(each, sign), encoder) for each in examples)
        count = write_rows(folder / "rows.arrow", (row for row in rows if row is not None))
        if not count:
            raise ValueError(
                f"no example of {name} fits into model.length={encoder.length} in the form in which it would "
                "be written (replay=generated); allowed: a larger model.length, replay=past"
            )

    folder = make_once(cache / "packed" / f"{name}-forms-{digest(made_of)}", make=make)
    made = open_answered(folder / "rows.arrow", encoder)
    if left := corpus.facts["documents"]["train"] - len(made):
        log.info(
            "%s: %d of %d examples do not fit into model.length=%d as they would be written, and none is "
            "learned in that form (replay.forms)",
            *(name, left, left + len(made), encoder.length),
        )
    return made


def write_rows(path: Path, rows: Iterable[dict[str, Any]]) -> int:
    """Writes rows of examples; gives how many."""
    count = 0
    with ArrowWriter(path=str(path), features=COLUMNS) as writer:
        for row in rows:
            writer.write(row)
            count += 1
        writer.finalize()
    return count


def open_answered(path: Path, encoder: Encoder) -> Answered:
    rows = Dataset.from_file(str(path))
    known = Answered(rows, 0, padding_id(encoder.tokenizer), len(rows), 0)
    return Answered(
        rows, int(known.row_lengths.max()), known.pad, len(rows), int(known.column("bytes").sum())
    )


def choose_examples(
    sizes: np.ndarray, nll: np.ndarray, valid: np.ndarray, *, tokens: int, wanted: int
) -> np.ndarray:
    """Which of the texts written are kept, their numbers ascending: of those that came first, up to `wanted`
    tokens, the valid ones, up to `tokens` tokens, of the lowest nll where some are to be left out."""
    order = np.flatnonzero((np.cumsum(sizes) - sizes < wanted) & valid)
    if wanted > tokens:
        order = order[np.argsort(nll[order], kind="stable")]
    return np.sort(order[np.cumsum(sizes[order]) <= tokens])


def keep_examples(
    folder: Path, text: str, *, tokens: int, wanted: int, choices: Sequence[str], encoder: Encoder, sign: str
) -> dict[str, Any]:
    """Writes the rows of what is kept of the examples written: each as it is asked, and in the form in which
    it is written, so that the model can still write it later. Gives the facts about them."""
    samples = list(read_samples(file_of(folder, text, "jsonl")))
    read = [read_form(each.text, task=text, number=at, choices=choices) for at, each in enumerate(samples)]
    pairs = [rows_of_pair(each, encoder, sign) if each is not None else None for each in read]
    valid = np.array([pair is not None and each.ended for pair, each in zip(pairs, samples, strict=True)])
    sizes, nll = np.array([each.size for each in samples]), np.array([each.nll for each in samples])
    asked = np.cumsum(sizes) - sizes < wanted
    kept = choose_examples(sizes, nll, valid, tokens=tokens, wanted=wanted)
    left = np.setdiff1d(np.flatnonzero(asked), kept)
    write_rows(file_of(folder, text, "arrow"), (row for at in kept for row in pairs[at] or ()))
    return {
        "tokens": int(sizes[kept].sum()),
        "texts": len(kept),
        "real": 0,
        "nll": float(nll[kept].mean()) if len(kept) else None,
        "left_out": len(left),
        "invalid": int((asked & ~valid).sum()),
        "nll_left_out": float(nll[left].mean()) if len(left) else None,
        "bytes": sum(len(samples[at].text.encode(errors="replace")) for at in kept),
        "excerpt": first_of(samples, kept)[:EXCERPT],
    }


def rows_of_pair(example: Example, encoder: Encoder, sign: str) -> list[dict[str, Any]] | None:
    """An example as it is asked and as it is written; None where one of them does not fit."""
    rows = [encode_whole(each, encoder) for each in (example, write_form(example, sign))]
    return None if None in rows else rows  # type: ignore[return-value]


def first_of(samples: Sequence[Sample], kept: np.ndarray) -> str:
    """The first text that is kept; where none is, the first."""
    return samples[kept[0] if len(kept) else 0].text


def open_examples(folder: Path, text: str, encoder: Encoder) -> Answered | None:
    """The rows of the examples that were written in place of a task's; None where none was valid."""
    if not read_facts(folder)[text]["texts"]:
        return None
    return open_answered(file_of(folder, text, "arrow"), encoder)
