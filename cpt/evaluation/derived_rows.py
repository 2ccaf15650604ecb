"""The row of a model that was made of a run's and that no stage has trained: `row.json` in the folder of that
model, and the losses by document of its texts."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, get_type_hints

import numpy as np

from cpt.core.exceptions import DamagedFileError
from cpt.core.files import check_archive, write_atomically
from cpt.core.messages import count_noun
from cpt.core.schema import check_types
from cpt.evaluation.metrics import Array, Change, compare_losses
from cpt.evaluation.scores import encode, load_documents

ROW_FILE = "row.json"
DOCUMENTS_FILE = "documents.npz"
REMEDY = "make the model again"


@dataclass(frozen=True, kw_only=True)
class DerivedRow:
    """What `row.json` holds. Keys that a row has in `scores.json` have the same form there.

    `chats`, where they were measured with the template of a tuned model: their number, and the mean over
    chats of the loss on the assistant's turns of the model (`nll`) and of the tuned model (`tuned_nll`), with
    the rise from that one and its 95 % interval (`rise`), nats per token. `run_chats` is the model's row in
    the chats of the run: the keys of `chats` in scores.json, each with the value of one row. `inputs` is a
    hash of the other models that it was made of; empty where there are none, and in files of earlier
    versions."""

    row: str  # its name
    description: str  # how the model was made, one sentence
    config_hash: str  # of the run
    domains: list[str]  # the columns
    scored: list[int]  # by column, tokens that contribute to the loss
    nll: list[float | None]  # by column, nats per scored token; None: not measured
    conditions: dict[str, Any]  # what makes losses comparable
    numerics: dict[str, str]  # precision and attention kernels
    versions: dict[str, str]
    chats: dict[str, Any] = field(default_factory=dict)
    run_chats: dict[str, Any] = field(default_factory=dict)
    inputs: str = ""

    def save(self, folder: Path) -> None:
        write_atomically(folder / ROW_FILE, f"{encode(asdict(self))}\n")

    @classmethod
    def load(cls, path: Path) -> DerivedRow:
        """Raises ValueError for a damaged file."""
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            values = {"chats": {}, "run_chats": {}, "inputs": "", **content}  # earlier versions lack these
            check_types(values, get_type_hints(cls))
            return cls(**values)
        except (OSError, TypeError, ValueError) as error:
            raise DamagedFileError(path, reason=str(error), remedy=REMEDY) from None


def is_made_already(folder: Path, *, config_hash: str, description: str, inputs: str = "") -> bool:
    """Whether a folder has the whole model of an earlier start of the same command. A folder gets its name
    when all of it is there. A description has no paths: `inputs` tells models of one name apart."""
    path = folder / ROW_FILE
    if not path.is_file():
        return False
    row = DerivedRow.load(path)
    is_of_same_models = row.config_hash == config_hash and row.inputs == inputs
    return is_of_same_models and row.description == description


def describe_tuned_chats(row: DerivedRow) -> str:
    """`Loss on the assistant's turns of 36 held-out chats: 1.3500 nats per token, the tuned model's 1.2040
    (+0.1460 [+0.1000, +0.2000])`; empty where it was not measured."""
    if not row.chats:
        return ""
    chat_count = count_noun(row.chats["chats"], "held-out chat")
    return (
        f"Loss on the assistant's turns of {chat_count}: {row.chats['nll']:.4f} nats "
        f"per token, the tuned model's {row.chats['tuned_nll']:.4f} ({format_mean_rise(row.chats['rise'])})"
    )


def describe_run_chats(row: DerivedRow) -> list[str]:
    """What became of the chats of the run since its base, in sentences; none where they were not measured."""
    chats = row.run_chats
    if not chats:
        return []
    chat_count = count_noun(chats["chats"], "held-out chat")
    sentences = [
        f"Loss on the run's {chat_count}: {chats['nll']:.4f} nats per token "
        f"(since the run's base {format_mean_rise(chats['rise'])})"
    ]
    if chats["base_answer_nll"] is not None:
        sentences.append(
            f"Loss on the answers of the run's base: {chats['base_answer_nll']:.4f} nats per token "
            f"({format_mean_rise(chats['base_answer_rise'])})"
        )
    if chats["answers"] is not None:
        answered_count = count_noun(chats["answers"]["chats"], "chat")
        sentences.append(
            f"Answers to {answered_count}: {chats['answers']['newly_broken']} broken that the run's base "
            "answers well"
        )
    return sentences


def format_mean_rise(change: Sequence[float | None]) -> str:
    """`+0.1460 [+0.1000, +0.2000]`, without an interval for too few chats."""
    mean, low, high = change
    interval = "" if low is None else f" [{low:+.4f}, {high:+.4f}]"
    return f"{mean:+.4f}{interval}"


def find_derived_rows(run_folder: Path) -> Iterator[tuple[Path, DerivedRow]]:
    """Yields the rows of models in folders of a run's folder, with the folder of each."""
    for path in sorted(run_folder.glob(f"*/{ROW_FILE}")):
        yield path.parent, DerivedRow.load(path)


def load_derived_documents(folder: Path) -> dict[str, Array]:
    """The losses by document of a derived row, by text [2, documents]: nats, scored tokens. Raises ValueError
    for a damaged file."""
    path = folder / DOCUMENTS_FILE
    check_archive(path, remedy=REMEDY)
    with np.load(path) as archive:
        return dict(archive)


def compare_with_row(
    run_folder: Path, number: int, losses: Mapping[str, Array], texts: Sequence[str]
) -> list[Change]:
    """The changes of texts from a row of the run to other losses of the same documents. Texts that the row of
    the run lacks are left out."""
    (before,) = load_documents(run_folder, [number])
    shared_texts = [text for text in texts if text in before and text in losses]
    return list(compare_losses(shared_texts, before, losses))
