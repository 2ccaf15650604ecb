"""A corpus as token ids in rows of equal length: documents one after another, separated, nothing dropped."""

from contextlib import closing
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import pyarrow as pa
from datasets import Dataset, Features, Value
from datasets import Sequence as ListOf
from transformers import PreTrainedTokenizerBase

from cpt.core.cache import make_once
from cpt.core.config import digest
from cpt.core.growing import Growing
from cpt.core.progress import DELAY, progress_bar
from cpt.core.randomness import shuffle
from cpt.data.arrow import END, schema_of
from cpt.data.collate import Sizes
from cpt.data.corpus import SPLITS, Corpus
from cpt.data.fitting import Alone, Cut, Fit
from cpt.data.sources.base import CONCAT, ISOLATED, PER_DOCUMENT
from cpt.data.tokenising import pieces, tokenise

FORMAT = 1
ROWS = "rows.arrow"
PADDING = -1
COLUMNS = Features(
    {"ids": ListOf(Value("int32")), "documents": ListOf(Value("int32")), "text_tokens": Value("int32")}
)


@dataclass(frozen=True)
class Packed:
    """Rows of token ids of one split, memory-mapped. `packing` says how documents fill them: of CONCAT only
    the last row may be shorter than `length`, of others any."""

    rows: Dataset
    length: int
    pad: int
    documents: int
    bytes: int
    packing: str = CONCAT

    def __len__(self) -> int:
        return len(self.rows)

    @cached_property
    def text_tokens(self) -> np.ndarray:
        """Tokens of each row that are not special, [rows] int32."""
        return self.column("text_tokens")

    @property
    def tokens_per_row(self) -> float:
        """What a budget of tokens counts for a row."""
        return self.length if self.packing == CONCAT else float(self.row_lengths.mean())

    @property
    def isolated(self) -> bool:
        """Whether the documents of a row are isolated from each other."""
        return self.packing == ISOLATED

    def answers(self, rows: np.ndarray) -> np.ndarray | None:
        """Which tokens are the answer, [B, length] bool; None for raw text."""
        return None

    @cached_property
    def row_lengths(self) -> np.ndarray:
        """Tokens of each row without padding, [rows]."""
        if self.packing != CONCAT:
            return self.sizes_of_rows()
        lengths = np.full(len(self), self.length)
        lengths[-1] = len(self.rows[len(self) - 1]["ids"])
        return lengths

    def by_length(self, rows: np.ndarray) -> np.ndarray:
        """Rows, the longest first where a batch is as wide as its longest row; else as they are."""
        if self.packing != PER_DOCUMENT and self.answers(rows[:1]) is None:
            return rows
        return rows[np.argsort(-self.row_lengths[rows], kind="stable")]

    def sizes(self, rows: np.ndarray | slice = slice(None)) -> Sizes:
        """What is known of rows before they are read."""
        sharing = self.sharing[rows] if self.isolated else None
        return Sizes(self.text_tokens[rows], self.row_lengths[rows], documents=sharing)

    def sizes_of_rows(self) -> np.ndarray:
        """Tokens of each row, [rows] int64, as they are stored."""
        chunks = self.columns["ids"][:].column("ids").chunks
        return np.concatenate([np.diff(each.offsets.to_numpy()) for each in chunks]).astype(np.int64)

    @cached_property
    def sharing(self) -> np.ndarray:
        """Documents in each row, [rows] int64."""
        chunks = self.columns["documents"][:].column("documents").chunks
        return np.concatenate([count_runs(each) for each in chunks if len(each)])

    def column(self, name: str) -> np.ndarray:
        chunks = self.rows.with_format("arrow", columns=[name])[:].column(name).chunks
        return np.concatenate([chunk.to_numpy(zero_copy_only=False) for chunk in chunks])

    def draw_rows(self, tokens: int, *, stream: int) -> np.ndarray:
        """The first rows of a fixed permutation whose tokens come to so many, so that more of them contain
        fewer; ascending."""
        drawn = shuffle(np.arange(len(self)), len(self), stream=stream)
        before = np.cumsum(self.row_lengths[drawn]) - self.row_lengths[drawn]
        return np.sort(drawn[before < tokens])

    @cached_property
    def columns(self) -> dict[str, Dataset]:
        """The rows as Arrow lists, by column: making a view takes longer than reading a batch from it."""
        return {name: self.rows.with_format("arrow", columns=[name]) for name in ("ids", "documents")}

    def ids(self, rows: np.ndarray) -> np.ndarray:
        """Token ids, [B, length] int64, padded."""
        return self.table(rows, "ids", self.pad)

    def document_of(self, rows: np.ndarray) -> np.ndarray:
        """The document that each token is of, [B, length] int64, -1 on padding."""
        return self.table(rows, "documents", PADDING)

    def table(self, rows: np.ndarray, name: str, filler: int) -> np.ndarray:
        lists = self.columns[name][rows.tolist()].column(name).combine_chunks()
        lists = lists.chunk(0) if isinstance(lists, pa.ChunkedArray) else lists
        values, ends = lists.flatten().to_numpy(), np.diff(lists.offsets.to_numpy())
        table = np.full((len(rows), self.length), filler, np.int64)
        table[np.arange(self.length) < ends[:, None]] = values
        return table


def count_runs(lists: pa.ListArray) -> np.ndarray:
    """Runs of equal values in each list, [lists] int64; no list is empty."""
    values, offsets = lists.flatten().to_numpy(), lists.offsets.to_numpy() - lists.offsets[0].as_py()
    begins = np.ones(len(values), np.int64)
    begins[1:] = values[1:] != values[:-1]
    begins[offsets[:-1]] = 1
    return np.add.reduceat(begins, offsets[:-1])


CUTS = {CONCAT: Cut, ISOLATED: Fit, PER_DOCUMENT: Alone}


def pack(
    corpus: Corpus,
    split: str,
    *,
    tokenizer: PreTrainedTokenizerBase,
    length: int,
    name: str,
    cache: Path,
    tokenizer_digest: str,
    packing: str = CONCAT,
    workers: int | None = None,
) -> Packed:
    """A split of a corpus in rows of `length` tokens, at most, made once for all runs with this text,
    tokenizer, length and packing. Making is shared out among `workers`, None for all cores, and goes on
    where a kill ended it."""
    made_of = [FORMAT, corpus.facts["digest"], split, tokenizer_digest, length]
    made_of += [] if packing == CONCAT else [packing]
    folder = make_once(
        cache / "packed" / f"{name}-{split}-{digest(made_of)}",
        make=lambda partial: write_rows(
            *(partial, corpus, split),
            **{"tokenizer": tokenizer, "length": length, "name": name, "workers": workers},
            packing=packing,
        ),
    )
    rows = Dataset.from_file(str(folder / ROWS))
    facts = (corpus.facts["documents"][split], corpus.facts["bytes"][split])
    return Packed(rows, length, padding_id(tokenizer), *facts, packing)


def write_rows(
    folder: Path,
    corpus: Corpus,
    split: str,
    *,
    tokenizer: PreTrainedTokenizerBase,
    length: int,
    name: str,
    packing: str,
    workers: int | None,
) -> None:
    """Writes the rows of a split into a folder, a piece of the corpus at a time, from where they end there.
    Raises ValueError for a corpus that lacks documents."""
    schema = schema_of(COLUMNS)
    ending, size = terminator(tokenizer), int(corpus.facts["bytes"][split])
    rows = Growing(folder, [ROWS], form=[FORMAT, length])
    cut = CUTS[packing](length, tokenizer.all_special_ids, schema)
    done = cut.go_on(rows.place)
    if rows.place is None:
        rows.append(ROWS, schema.serialize())
    progress = progress_bar(
        f"tokenising {name}", total=size, done=done["bytes"], unit="B", scale=True, hidden=False, delay=DELAY
    )
    number = SPLITS.index(split)
    found = pieces(corpus.folder, number, begin=done["begin"], first=done["first"])
    made = tokenise(
        *(corpus.folder, number, found),
        tokenizer=tokenizer,
        ending=ending,
        size=size - done["bytes"],
        workers=workers,
    )
    with closing(rows), progress, closing(made):
        for piece, (ids, sizes) in made:
            write_batch(rows, cut.add(ids, sizes))
            progress.update(piece.bytes)
            done = {"begin": piece.end, "first": piece.behind, "bytes": done["bytes"] + piece.bytes}
            if rows.due:
                rows.commit(done | cut.left())
        write_batch(rows, cut.rest())
        rows.append(ROWS, END)
        if cut.count != corpus.facts["documents"][split]:
            raise ValueError(
                f"{corpus.folder} is damaged: {cut.count} documents in {split}, not "
                f"{corpus.facts['documents'][split]}; delete it, and the text is read again"
            )
        rows.finish()


def write_batch(rows: Growing, batch: pa.RecordBatch) -> None:
    if len(batch):
        rows.append(ROWS, batch.serialize())


def terminator(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """What has to be put after each document: nothing if the tokenizer ends it itself, else its end of
    sequence or its separator."""
    bare = tokenizer("a", add_special_tokens=False, verbose=False)["input_ids"]
    around = tokenizer("a", verbose=False)["input_ids"]
    if around[-len(bare) :] != bare:
        return []
    ending = [each for each in (tokenizer.eos_token_id, tokenizer.sep_token_id) if each is not None]
    if not ending:
        raise ValueError(
            f"the tokenizer {tokenizer.name_or_path} has no token to separate documents (eos or sep)"
        )
    return ending[:1]


def frame_of(tokenizer: PreTrainedTokenizerBase) -> tuple[list[int], list[int]]:
    """What a tokenizer puts before and behind a text."""
    bare = tokenizer("a", add_special_tokens=False, verbose=False)["input_ids"]
    around = tokenizer("a", verbose=False)["input_ids"]
    begin = next(at for at in range(len(around)) if around[at : at + len(bare)] == bare)
    return around[:begin], around[begin + len(bare) :]


def padding_id(tokenizer: PreTrainedTokenizerBase) -> int:
    """The id that fills the last row; any will do where there is no padding token, since it is masked out."""
    return tokenizer.pad_token_id if tokenizer.pad_token_id is not None else 0
