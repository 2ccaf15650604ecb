"""Documents as token ids: shards of a corpus that `datasets` maps and caches, by several processes.

A worker process imports neither torch nor transformers: it builds the tokenizer from its JSON."""

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
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
from datasets import Features, List, Value, disable_progress_bars, enable_progress_bars
from tokenizers import Tokenizer

from cpt.core.config import digest
from cpt.core.files import sync
from cpt.core.heartbeat import DELAY, progress_bar
from cpt.core.preemption import ignore_signals
from cpt.core.processes import cores
from cpt.data.corpus import Corpus

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SHARD = 1 << 23  # bytes of text in a cached file: what a kill costs each process
BATCH = 1 << 20  # bytes of text that the tokenizer is given at once
_work: list[Callable[[Any], Any]] = []  # of a worker process


@dataclass(frozen=True)
class TokenizeBatch:
    """Maps documents to token ids, `ending` after each; `tokenizer` may be a fast one's JSON."""

    tokenizer: PreTrainedTokenizerBase | str
    ending: tuple[int, ...]

    @cached_property
    def encode(self) -> Callable[[list[str]], list[list[int]]]:
        if isinstance(self.tokenizer, str):
            backend = Tokenizer.from_str(self.tokenizer)
            backend.no_truncation()
            backend.no_padding()
            backend.encode_special_tokens = True
            return lambda texts: [each.ids for each in backend.encode_batch_fast(texts)]
        call = partial(self.tokenizer, split_special_tokens=True, return_attention_mask=False, verbose=False)
        return lambda texts: call(texts)["input_ids"]

    def __call__(self, documents: pa.Table) -> pa.Table:
        ids, ends = array("i"), [0]
        for each in self.encode(documents.column("text").to_pylist()):
            ids.extend(each)
            ids.extend(self.ending)
            ends.append(len(ids))
        values = pa.array(np.frombuffer(ids, np.int32))
        return pa.table({"ids": pa.ListArray.from_arrays(pa.array(ends, pa.int32()), values)})


def to_json(tokenizer: PreTrainedTokenizerBase) -> str | None:
    """The JSON of a fast tokenizer; None where its class or a component is code in Python."""
    from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

    methods = getattr(type(tokenizer), "_encode_plus", None), type(tokenizer).__call__
    if methods != (PreTrainedTokenizerFast._encode_plus, PreTrainedTokenizerBase.__call__):
        return None
    try:
        return tokenizer.backend_tokenizer.to_str()
    except Exception:  # raised by Rust
        return None


def tokenize_shard(
    number: int, *, corpus: Corpus, split: str, shards: int, tokenize: TokenizeBatch, folder: Path
) -> Path:
    """The file with the ids of a shard, made unless it exists."""
    path = folder / f"{number:05d}-of-{shards:05d}.arrow"
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
    return path


def map_in_processes(work: Callable[[Any], Any], items: Iterable[Any], processes: int) -> Generator[Any]:
    """`work` of each item, in the order of the items. The processes are spawned, so that they inherit no file
    lock; they end with this one. Raises ValueError where one was killed."""
    pool = ProcessPoolExecutor(processes, get_context("spawn"), initializer=start_worker, initargs=(work,))
    try:
        yield from pool.map(run_work, items)
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


def start_worker(work: Callable[[Any], Any]) -> None:
    ignore_signals()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    _work[:], parent = [work], parent_process()

    def exit_with_parent() -> None:
        if parent is not None:
            parent.join()
            os._exit(1)

    threading.Thread(target=exit_with_parent, daemon=True).start()


def run_work(item: Any) -> Any:
    return _work[0](item)


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
    written = to_json(tokenizer) if processes > 1 else None
    how: dict[str, Any] = {"split": split, "shards": shards, "folder": folder}
    tokenize = TokenizeBatch(written or tokenizer, tuple(ending))
    work: Callable[[int], Path] = partial(tokenize_shard, corpus=corpus, tokenize=tokenize, **how)
    numbers = range(shards)
    paths = map_in_processes(work, numbers, processes) if written else (work(number) for number in numbers)
    bar = progress_bar(f"tokenising {name}", total=size, unit="B", scale=True, hidden=False, delay=DELAY)
    with closing(paths), bar:
        for path in paths:
            with pa.OSFile(str(path)) as file:  # not memory-mapped: the pages would count as memory
                for batch in pa.ipc.open_stream(file):
                    lists = batch.column("ids")
                    yield lists.flatten().to_numpy(), np.diff(lists.offsets.to_numpy())
            bar.update(size / shards)
