"""Text that a model writes in place of a domain's own: where it begins, what of it is kept, and rows of it.

`kept/TEXT.json`           the first tokens of some rows of a domain, or its choices: kept when it is learned
`NUMBER-STAGE/TEXT.jsonl`  what was written before a stage, a line for each text
`NUMBER-STAGE/TEXT.arrow`  what is kept of it, in rows as a model is given them
`NUMBER-STAGE/facts.json`  what came of it, by text

What is kept of a domain is there from its own stage on; its text is not read again to replay it."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np
import pyarrow as pa
import xxhash
from datasets import Dataset
from datasets.arrow_writer import ArrowWriter
from transformers import PreTrainedTokenizerBase

from cpt.core.files import replace
from cpt.core.randomness import key, shuffle
from cpt.data.packing import COLUMNS, ConcatPacker, Packed, frame_of, padding_id, rows_table, terminator
from cpt.data.sources.base import CONCAT

FACTS = "facts.json"
EXCERPT = 200  # characters


@dataclass(frozen=True)
class Sample:
    """A text that a model wrote: the ids that are replayed, of which `real` are from the domain, and whether
    an end follows; the mean `nll` (nats) of what was written, to who wrote it; and the text, for people."""

    ids: list[int]
    real: int
    ended: bool
    nll: float
    text: str

    @property
    def size(self) -> int:
        """Tokens, with the end."""
        return len(self.ids) + self.ended


@dataclass(frozen=True)
class GeneratedText(Packed):
    """Rows of text that a model wrote; any row may be shorter than `length`."""


def file_of(folder: Path, text: str, suffix: str) -> Path:
    """The file of a text in a folder."""
    return folder / f"{quote(text, safe='')}.{suffix}"


def draw_beginnings(text: Packed, name: str, *, count: int, prefix: int) -> list[list[int]]:
    """The first `prefix` tokens of rows of a text, those that its probe begins with. Raises ValueError where
    none of them is longer."""
    rows = shuffle(np.arange(min(count, len(text))), len(text), stream=key("probe", name))
    longer = rows[text.row_lengths[rows] > prefix]
    if not len(longer):
        raise ValueError(
            f"replay.prefix={prefix}: no row of {name} that could be kept has more tokens; allowed: fewer"
        )
    return text.ids(longer)[:, :prefix].tolist()


def save_kept(path: Path, kept: Any) -> None:
    """Writes what stays of a domain, any JSON value, with its checksum."""
    own = xxhash.xxh3_128_hexdigest(json.dumps(kept).encode())
    replace(path, json.dumps({"kept": kept, "own": own}))


def load_kept(path: Path, *, instead: str) -> Any:
    """Raises ValueError where what stays of a domain is gone or damaged; `instead` says what to do then."""
    try:
        known = json.loads(path.read_text(encoding="utf-8"))
        if known["own"] != xxhash.xxh3_128_hexdigest(json.dumps(known["kept"]).encode()):
            raise ValueError("it differs from its checksum")
    except FileNotFoundError:
        raise ValueError(f"{path} is gone; {instead}") from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is damaged ({error}); {instead}") from None
    return known["kept"]


def write_sample(sample: Sample) -> bytes:
    """A sample as a line."""
    return (json.dumps(asdict(sample), ensure_ascii=False) + "\n").encode(errors="replace")


def read_samples(path: Path) -> Iterator[Sample]:
    """The samples of a file, one after another."""
    with path.open("rb") as file:
        for line in file:
            yield Sample(**json.loads(line))


def choose_tokens(sizes: np.ndarray, nll: np.ndarray, *, tokens: int, wanted: int) -> np.ndarray:
    """How many tokens are kept of each text, [n], so that they come to so many in all; -1 of texts beyond the
    first that come to `wanted` tokens, which nobody asked for. Of the others those of the lowest nll are kept
    where there are too many; the last that is kept is cut."""
    asked = np.cumsum(sizes) - sizes < wanted
    order = np.flatnonzero(asked)
    if wanted > tokens:
        order = order[np.argsort(nll[order], kind="stable")]
    before = np.cumsum(sizes[order]) - sizes[order]
    kept = np.where(asked, 0, -1)
    kept[order] = np.clip(tokens - before, 0, sizes[order])
    return kept


def keep_samples(
    folder: Path, text: str, *, tokens: int, wanted: int, length: int, tokenizer: PreTrainedTokenizerBase
) -> dict[str, Any]:
    """Writes the rows of what is kept of the samples of a text; gives the facts about them."""
    source = file_of(folder, text, "jsonl")
    measured = [(each.size, each.nll) for each in read_samples(source)]
    sizes, nll = np.array([size for size, _ in measured]), np.array([each for _, each in measured])
    kept = choose_tokens(sizes, nll, tokens=tokens, wanted=wanted)
    pieces = [(each, int(count)) for each, count in zip(read_samples(source), kept, strict=True) if count > 0]
    ending = end_of(tokenizer)
    with ArrowWriter(path=str(file_of(folder, text, "arrow")), features=COLUMNS) as writer:
        for table in rows_of(pieces, ending=ending, length=length, special=tokenizer.all_special_ids):
            writer.write_table(table)
        writer.finalize()
    return {
        "tokens": int(kept[kept > 0].sum()),
        "texts": len(pieces),
        "real": sum(min(each.real, count) for each, count in pieces),
        "nll": float(nll[kept > 0].mean()),
        "left_out": int((kept == 0).sum()),
        "nll_left_out": float(nll[kept == 0].mean()) if (kept == 0).any() else None,
        "bytes": sum(len(each.text.encode(errors="replace")) for each, _ in pieces),
        "excerpt": pieces[0][0].text[:EXCERPT],
    }


def rows_of(
    pieces: Iterable[tuple[Sample, int]], *, ending: int, length: int, special: Sequence[int]
) -> Iterator[pa.Table]:
    """Rows of so many tokens of each text: texts that have come to their end one behind another, as a
    corpus is packed; one that was broken off ends its row."""
    packed = ConcatPacker(length, special)
    for sample, count in pieces:
        ids = np.array([*sample.ids, *[ending] * sample.ended][:count], np.int32)
        if sample.ended and count == sample.size:
            yield packed.add(ids, np.array([len(ids)]))
        else:
            tokens = np.stack([ids, np.full_like(ids, packed.documents)])
            yield rows_table(tokens, np.array([0, len(ids)]), special)
            packed.documents += 1
    yield packed.finish()


def open_rows(
    folder: Path, text: str, *, length: int, tokenizer: PreTrainedTokenizerBase, packing: str = CONCAT
) -> GeneratedText:
    """The rows of what was written in place of a text that is packed so."""
    facts = read_facts(folder)[text]
    rows = Dataset.from_file(str(file_of(folder, text, "arrow")))
    return GeneratedText(rows, length, padding_id(tokenizer), facts["texts"], facts["bytes"], packing)


def read_facts(folder: Path) -> dict[str, dict[str, Any]]:
    return json.loads((folder / FACTS).read_text(encoding="utf-8"))


def end_of(tokenizer: PreTrainedTokenizerBase) -> int:
    """The token that ends a document."""
    return (terminator(tokenizer) or frame_of(tokenizer)[1])[0]
