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
from functools import partial
from multiprocessing import get_context, parent_process
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
from datasets import Features, List, Value, disable_progress_bars, enable_progress_bars

from cpt.core.config import digest
from cpt.core.files import file_hash, replace, sync
from cpt.core.heartbeat import DELAY, progress_bar
from cpt.core.preemption import ignore_signals
from cpt.core.processes import cores
from cpt.data.corpus import Corpus

if TYPE_CHECKING:  # a worker process need not import torch
    from transformers import PreTrainedTokenizerBase

SHARD = 1 << 23  # bytes of text in a cached file: what a kill costs each process
BATCH = 1 << 20  # bytes of text that the tokenizer is given at once


@dataclass(frozen=True)
class TokenizeBatch:
    """Maps documents to token ids, `ending` after each."""

    tokenizer: PreTrainedTokenizerBase
    ending: tuple[int, ...]

    def __call__(self, documents: pa.Table) -> pa.Table:
        how = {"split_special_tokens": True, "return_attention_mask": False, "verbose": False}
        ids, ends = array("i"), [0]
        for each in self.tokenizer(documents.column("text").to_pylist(), **how)["input_ids"]:
            ids.extend(each)
            ids.extend(self.ending)
            ends.append(len(ids))
        values = pa.array(np.frombuffer(ids, np.int32))
        return pa.table({"ids": pa.ListArray.from_arrays(pa.array(ends, pa.int32()), values)})


def tokenize_shard(
    number: int, *, corpus: Corpus, split: str, shards: int, tokenize: TokenizeBatch, folder: Path
) -> Path:
    """The file with the ids of a shard, made unless it exists and is intact."""
    path = folder / f"{number:05d}-of-{shards:05d}.arrow"
    checksum = path.with_suffix(".hash")
    if path.exists() and not (checksum.exists() and checksum.read_text() == file_hash(path)):
        path.unlink()
    mean = corpus.facts["bytes"][split] / corpus.facts["documents"][split]
    disable_progress_bars()
    corpus.documents(split, number, shards).with_format("arrow").map(
        tokenize,
        batched=True,
        batch_size=max(1, min(1000, int(BATCH / (1 + mean)))),
        remove_columns="text",
        features=Features({"ids": List(Value("int32"))}),
        cache_file_name=str(path),
        new_fingerprint=digest([str(folder), number, shards]),
    )
    enable_progress_bars()
    sync(path)
    replace(checksum, file_hash(path))
    return path


def map_in_processes(work: Callable[[Any], Any], items: Iterable[Any], processes: int) -> Generator[Any]:
    """`work` of each item, in the order of the items. The processes are spawned, so that they inherit no file
    lock; they end with this one. Raises ValueError where one was killed."""
    pool = ProcessPoolExecutor(processes, get_context("spawn"), initializer=start_worker)
    try:
        yield from pool.map(work, items)
    except BaseException as error:
        for pid in list(pool._processes or ()):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if isinstance(error, BrokenProcessPool):
            raise ValueError(
                "a tokenization process was killed, perhaps for want of memory; run the same command again "
                "to continue. Allowed: fewer of them (data.preprocessing_num_workers=1)"
            ) from error
        raise
    finally:
        pool.shutdown(cancel_futures=True)


def start_worker() -> None:
    ignore_signals()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    parent = parent_process()

    def exit_with_parent() -> None:
        if parent is not None:
            parent.join()
            os._exit(1)

    threading.Thread(target=exit_with_parent, daemon=True).start()


def tokenize_corpus(
    corpus: Corpus,
    split: str,
    *,
    tokenizer: PreTrainedTokenizerBase,
    ending: list[int],
    name: str,
    folder: Path,
    workers: int | None,
) -> Generator[tuple[np.ndarray, np.ndarray]]:
    """Batches of the documents of a split, in their order: their ids [tokens] int32, and how many each has
    [documents]. `folder` caches the shards, which `workers` processes make, None: one per core."""
    size = corpus.facts["bytes"][split]
    shards = max(1, min(corpus.facts["documents"][split], size // SHARD))
    processes = min(workers or cores(), shards)
    how: dict[str, Any] = {"corpus": corpus, "split": split, "shards": shards, "folder": folder}
    how["tokenize"] = TokenizeBatch(tokenizer, tuple(ending))
    work: Callable[[int], Path] = partial(tokenize_shard, **how)
    numbers = range(shards)
    paths = (work(each) for each in numbers) if processes == 1 else map_in_processes(work, numbers, processes)
    bar = progress_bar(f"tokenising {name}", total=size, unit="B", scale=True, hidden=False, delay=DELAY)
    with closing(paths), bar:
        for path in paths:
            with pa.OSFile(str(path)) as file:  # not memory-mapped: the pages would count as memory
                for batch in pa.ipc.open_stream(file):
                    lists = batch.column("ids")
                    yield lists.flatten().to_numpy(), np.diff(lists.offsets.to_numpy())
            bar.update(size / shards)
