"""The files of a stage's chats: the losses by chat, and the answers, as JSON that people read.

Both have the `digest` of all that they depend on besides the model, and `seconds`."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from cpt.core.files import write_atomically
from cpt.core.schema import check_types
from cpt.evaluation.chat_answers import ChatAnswer
from cpt.evaluation.metrics import Array

# The names of the files, without their ending: losses on the chats' answers, on the base's, and new answers.
LOSSES, BASE_LOSSES, ANSWERS = "losses", "base_answer_losses", "answers"
LOSS_TYPES = {"digest": str, "seconds": float, "chats": list[str], "nats": list[float], "tokens": list[int]}
ANSWER_TYPES = {"digest": str, "seconds": float, "answers": list[dict[str, Any]]}


@dataclass(frozen=True, kw_only=True)
class StoredLosses:
    """The losses of a stage by chat."""

    digest: str
    seconds: float
    chats: Sequence[str]  # their ids
    losses: Array  # [2, chats]: nats, scored tokens


@dataclass(frozen=True, kw_only=True)
class StoredAnswers:
    """The answers of a stage."""

    digest: str
    seconds: float
    answers: Sequence[ChatAnswer]


def chat_file(folder: Path, kind: str) -> Path:
    """One of the files in a stage's folder."""
    return folder / f"{kind}.json"


def find_chat_file(run_folder: Path, rows: Sequence[str], row: int, kind: str) -> Path:
    """One of the files of a row in a run folder."""
    return chat_file(run_folder / "chats" / f"{row:03d}-{rows[row]}", kind)


def save_losses(path: Path, stored: StoredLosses) -> None:
    """Writes the losses of a stage; the file appears whole or not at all."""
    nats, num_tokens = stored.losses.tolist()
    content = {
        "digest": stored.digest,
        "seconds": stored.seconds,
        "chats": list(stored.chats),
        "nats": nats,
        "tokens": [int(count) for count in num_tokens],
    }
    write_atomically(path, json.dumps(content, indent=1) + "\n")


def load_losses(path: Path) -> StoredLosses:
    """The content of a file of losses. Raises FileNotFoundError, and ValueError where it is damaged."""
    content = load_json(path, LOSS_TYPES)
    if not len(content["chats"]) == len(content["nats"]) == len(content["tokens"]):
        raise ValueError(f"{path} is damaged (its lists differ in length); delete it and give the run again")
    return StoredLosses(
        digest=content["digest"],
        seconds=content["seconds"],
        chats=content["chats"],
        losses=np.array([content["nats"], content["tokens"]], dtype=float),
    )


def save_answers(path: Path, stored: StoredAnswers) -> None:
    """Writes the answers of a stage; the file appears whole or not at all."""
    digest = json.dumps(stored.digest)
    seconds = json.dumps(stored.seconds)
    lines = [json.dumps(answer.to_json(), ensure_ascii=False) for answer in stored.answers]
    answers = ",\n".join(lines)  # an answer on each line
    write_atomically(path, f'{{"digest": {digest}, "seconds": {seconds}, "answers": [\n{answers}\n]}}\n')


def load_answers(path: Path) -> StoredAnswers:
    """The content of a file of answers. Raises FileNotFoundError, and ValueError where it is damaged."""
    content = load_json(path, ANSWER_TYPES)
    try:
        answers = [ChatAnswer(**answer) for answer in content["answers"]]
    except TypeError as error:
        raise ValueError(f"{path} is damaged ({error}); delete it and give the run again") from None
    return StoredAnswers(digest=content["digest"], seconds=content["seconds"], answers=answers)


def load_json(path: Path, types: dict[str, Any]) -> dict[str, Any]:
    """The object of a file, with keys of these types. Raises FileNotFoundError, and ValueError where it is
    damaged."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        check_types(content, types)
    except FileNotFoundError:
        raise
    except (ValueError, TypeError) as error:
        raise ValueError(f"{path} is damaged ({error}); delete it and give the run again") from None
    return dict(content)
