"""Texts that are written round by round by all processes of a run, and kept by the first."""

import logging
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from cpt.core.cache import artifact_damage
from cpt.core.collectives import gather_objects
from cpt.core.growing import Growing
from cpt.core.processes import is_first_process
from cpt.data.generated import Sample, file_of, write_sample

log = logging.getLogger(__name__)


class Samples:
    """What has been written so far: how many blocks and tokens of each text, which all processes know; the
    first has a file for each text, from which a killed run goes on."""

    def __init__(self, form: Any, folder: Path, texts: Sequence[str]) -> None:
        self.files: Growing | None = None
        if is_first_process():
            folder.mkdir(parents=True, exist_ok=True)
            names = [file_of(folder, text, "jsonl").name for text in texts]
            self.files, self.folder = Growing(folder, names, form=form), folder
        place = agree_with_first(self.files.place if self.files else None)
        self.blocks = dict.fromkeys(texts, 0) | (place or {}).get("blocks", {})
        self.tokens = dict.fromkeys(texts, 0) | (place or {}).get("tokens", {})

    def add(self, text: str, blocks: Iterable[Sequence[Sample]], *, wanted: int) -> None:
        """Takes blocks in their order until they come to `wanted` tokens, and remembers them."""
        for block in blocks:
            if self.tokens[text] >= wanted:
                break
            self.blocks[text] += 1
            self.tokens[text] += sum(sample.size for sample in block)
            if self.files:
                lines = b"".join(map(write_sample, block))
                self.files.append(file_of(self.folder, text, "jsonl").name, lines)
        if self.files:
            self.files.commit({"blocks": self.blocks, "tokens": self.tokens})

    def close(self) -> None:
        if self.files:
            self.files.close()


def agree_with_first(value: Any) -> Any:
    """What the first process says."""
    return gather_objects(value)[0]


def is_whole(folder: Path) -> bool:
    """Whether a folder has what was generated; tells of one that is damaged."""
    if not folder.exists():
        return False
    if damage := artifact_damage(folder):
        log.warning("%s is damaged (%s): writing it again", folder, damage)
    return not damage
