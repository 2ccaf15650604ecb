"""Documents as token ids: shards of a corpus that `datasets` maps and caches, by several processes."""

from __future__ import annotations

import os
import signal
import threading
from array import array
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import closing, suppress
from dataclasses import dataclass
from functools import cached_property, partial
from multiprocessing import get_context, parent_process
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from datasets import Features, List, Value, disable_progress_bars, enable_progress_bars
from transformers import PreTrainedTokenizerBase

from cpt.core.config import digest
from cpt.core.files import hash_file, sync, write_atomically
from cpt.core.heartbeat import DELAY, make_progress_bar
from cpt.core.preemption import ignore_signals
from cpt.core.processes import count_cores
from cpt.data.corpus import Corpus
from cpt.data.number_files import find_smallest_type
from cpt.data.sources.base import PARSE
from cpt.data.text_encoder import find_unknown_id
from cpt.data.text_format import TextFormat

SHARD = 1 << 23  # bytes of text in a cached file: what a kill costs each process
BATCH = 1 << 20  # bytes of text that the tokenizer is given at once


# What a cached file has of each document in addition to its ids: how many of them are of its text, not around
# it, and how many of these are unknown; and how many special tokens the text spells.
COUNTS = ("body", "unknown", "spelled")


def choose_id_type(tokenizer: PreTrainedTokenizerBase) -> np.dtype:
    """The type in which ids of a tokenizer are stored: 2 bytes where they are all below 65,536, else 4."""
    ids = {*tokenizer.get_vocab().values(), *tokenizer.added_tokens_decoder, *tokenizer.all_special_ids}
    return find_smallest_type(max(ids, default=0))


@dataclass(frozen=True)
class TokenizeBatch:
    """Maps documents to token ids, the separator of the format after each."""

    format: TextFormat

    @cached_property
    def id_type(self) -> np.dtype:
        return choose_id_type(self.format.tokenizer)

    @cached_property
    def features(self) -> Features:
        """The columns of a cached file."""
        columns = {"ids": List(Value(self.id_type.name))}
        return Features(columns | {name: Value("int32") for name in COUNTS})

    def __call__(self, documents: pa.Table) -> pa.Table:
        encoder = self.format.encoder
        unknown_token = find_unknown_id(self.format.tokenizer)
        texts = documents.column("text")
        begin, end = encoder.frame

        ids = array(self.id_type.char)
        ends = [0]
        body_sizes = []
        unknown = []
        for document in encoder.encode(texts.to_pylist()):
            body_sizes.append(len(document) - len(begin) - len(end))
            num_unknown = 0
            if unknown_token is not None:
                body = document[len(begin) : len(document) - len(end)]
                num_unknown = body.count(unknown_token)
            unknown.append(num_unknown)
            try:
                ids.extend(document)
            except OverflowError as error:
                raise ValueError(
                    f"the tokenizer {self.format.tokenizer.name_or_path} is invalid: it gives the id "
                    f"{max(document)}, which is beyond its vocabulary. Allowed: one whose get_vocab() has "
                    "all of its ids"
                ) from error
            ids.extend(self.separator_after(document))
            ends.append(len(ids))

        values = pa.array(np.frombuffer(ids, self.id_type))
        columns = {
            "ids": pa.ListArray.from_arrays(pa.array(ends, pa.int32()), values),
            "body": pa.array(body_sizes, pa.int32()),
            "unknown": pa.array(unknown, pa.int32()),
            "spelled": encoder.count_spelled(texts),
        }
        return pa.table(columns, schema=self.features.arrow_schema)

    def separator_after(self, document: list[int]) -> tuple[int, ...]:
        """What is appended to a document: nothing where it spells the separator at its end."""
        separator = self.format.separator
        is_spelled = self.format.special_tokens == PARSE and tuple(document[-1:]) == separator
        return () if is_spelled else separator


@dataclass(frozen=True)
class TokenizedDocuments:
    """Documents one after another: their ids [tokens], how many each has [documents], and sums over them of
    COUNTS."""

    ids: np.ndarray
    sizes: np.ndarray
    counts: dict[str, int]


def tokenize_shard(
    number: int, *, corpus: Corpus, split: str, shards: int, tokenize: TokenizeBatch, folder: Path
) -> Path:
    """The file with the ids of a shard, made unless it exists and is intact."""
    # The checksum is written once the file is on disk: without it, or with another, the file is not whole.
    path = folder / f"{number:05d}-of-{shards:05d}.arrow"
    checksum = path.with_suffix(".hash")
    if path.exists() and not (checksum.exists() and checksum.read_text() == hash_file(path)):
        path.unlink()

    # `datasets` takes batches of documents, the tokenizer's memory depends on their bytes.
    mean_bytes = corpus.facts["bytes"][split] / corpus.facts["documents"][split]
    disable_progress_bars()  # one bar is shown for all shards
    corpus.documents(split, number, shards).with_format("arrow").map(
        tokenize,
        batched=True,
        batch_size=max(1, min(1000, int(BATCH / (1 + mean_bytes)))),
        remove_columns="text",
        features=tokenize.features,
        cache_file_name=str(path),
        new_fingerprint=digest([str(folder), number, shards]),
    )
    enable_progress_bars()
    sync(path)
    write_atomically(checksum, hash_file(path))
    return path


def map_in_processes(work: Callable[[Any], Any], items: Iterable[Any], processes: int) -> Generator[Any]:
    """`work` of each item, in the order of the items. The processes are spawned, so that they inherit no file
    lock; they end with this one. Raises ValueError where one was killed."""
    pool = ProcessPoolExecutor(processes, get_context("spawn"), initializer=start_worker)
    try:
        yield from pool.map(work, items)
    except BaseException as error:
        # Workers ignore other signals, and would finish their shards first.
        for pid in list(pool._processes or ()):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if isinstance(error, BrokenProcessPool):
            raise ValueError(
                "a tokenization process was killed, perhaps for want of memory; run the same command again "
                "to continue. Allowed: fewer of them (domains.preprocessing_num_workers=1)"
            ) from error
        raise
    finally:
        pool.shutdown(cancel_futures=True)


def start_worker() -> None:
    """Prepares a worker: signals are for its parent, with which it ends."""
    ignore_signals()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    # A parent that is killed by SIGKILL cannot end its workers.
    parent = parent_process()

    def exit_with_parent() -> None:
        if parent is not None:
            parent.join()
            os._exit(1)

    threading.Thread(target=exit_with_parent, daemon=True).start()


def tokenize_corpus(
    corpus: Corpus, split: str, *, format: TextFormat, name: str, folder: Path, workers: int | None
) -> Generator[TokenizedDocuments]:
    """Batches of the documents of a split, in their order. `folder` caches the shards, which `workers`
    processes make, None: one per core."""
    size = corpus.facts["bytes"][split]
    shards = max(1, min(corpus.facts["documents"][split], size // SHARD))
    processes = min(workers or count_cores(), shards)
    make_shard: Callable[[int], Path] = partial(
        tokenize_shard,
        corpus=corpus,
        split=split,
        shards=shards,
        folder=folder,
        tokenize=TokenizeBatch(format),
    )
    numbers = range(shards)
    if processes == 1:
        paths: Generator[Path] = (make_shard(number) for number in numbers)
    else:
        paths = map_in_processes(make_shard, numbers, processes)

    bar = make_progress_bar(f"tokenizing {name}", total=size, unit="B", scale=True, hidden=False, delay=DELAY)
    with closing(paths), bar:
        for path in paths:
            with pa.OSFile(str(path)) as file:  # not memory-mapped: the pages would count as memory
                for batch in pa.ipc.open_stream(file):
                    lists = batch.column("ids")
                    yield TokenizedDocuments(
                        ids=lists.flatten().to_numpy(),
                        sizes=np.diff(lists.offsets.to_numpy()),
                        counts={name: pc.sum(batch.column(name)).as_py() or 0 for name in COUNTS},
                    )
            bar.update(size / shards)
