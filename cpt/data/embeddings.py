"""Texts as vectors: the mean embedding of a sample of a corpus's documents, a batch of them at a time."""

import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from cpt.core.randomness import key, shuffle
from cpt.data.corpus import Corpus, in_batches
from cpt.data.examples import read_example
from cpt.data.sources.base import EXAMPLES, PACKAGES, Source

Array = np.ndarray
Encode = Callable[[list[str]], Array]  # documents to vectors, [B, D]
CHARACTERS = 20_000  # of a document, at most
BUCKETS = 1 << 15  # that words are hashed into
WORD = re.compile(r"[^\W\d_]{2,}")


def sample_documents(corpus: Corpus, name: str, *, form: str, most: int) -> Iterator[list[str]]:
    """At most so many training documents of a corpus, drawn by key, in batches; of examples what is asked."""
    documents = corpus.documents("train")
    drawn = shuffle(np.arange(min(most, len(documents))), len(documents), stream=key("embedding", name))
    for texts in in_batches(documents.select(np.sort(drawn))):
        read = [read_example(text).question for text in texts] if form == EXAMPLES else texts
        yield [text[:CHARACTERS] for text in read]


def embed_by_words(texts: Mapping[str, Iterable[list[str]]]) -> dict[str, Array]:
    """Mean TF-IDF vector of each text, [BUCKETS]: a document is the logarithms of its words' counts, hashed,
    of length 1; a word weighs by how few of all documents have it."""
    sums = {name: np.zeros(BUCKETS) for name in texts}
    counts = dict.fromkeys(texts, 0)
    having = np.zeros(BUCKETS)
    for name, batches in texts.items():
        for document in (document for batch in batches for document in batch):
            places, weights = weigh_words(document)
            sums[name][places] += weights
            having[places] += 1
            counts[name] += 1
    rarity = np.log((1 + sum(counts.values())) / (1 + having)) + 1
    return {name: rarity * total / max(1, counts[name]) for name, total in sums.items()}


def weigh_words(document: str) -> tuple[Array, Array]:
    """The buckets of a document's words, each once, and their weights."""
    found = Counter(map(bucket_of, WORD.findall(document.lower())))
    places = np.fromiter(found, np.int64, len(found))
    weights = np.array([1 + math.log(count) for count in found.values()])
    return places, weights / (np.linalg.norm(weights) or 1)


@lru_cache(maxsize=1 << 18)
def bucket_of(word: str) -> int:
    return xxhash.xxh32_intdigest(word.encode()) % BUCKETS


def embed_by_vectors(texts: Mapping[str, Iterable[list[str]]], encode: Encode) -> dict[str, Array]:
    """Mean vector of each text's documents, [D]."""
    means = {}
    for name, batches in texts.items():
        total, count = np.zeros(1), 0
        for batch in batches:
            vectors = np.asarray(encode(batch), np.float64)
            total, count = total + vectors.sum(0), count + len(batch)
        means[name] = total / max(1, count)
    return means


def make_encoder(source: Source) -> Encode:
    """What embeds documents with a package of its own."""
    return load_static() if source.embedding == "static" else load_sentence(str(source.embedding_model))


def static_files() -> tuple[Path, Path]:
    """The table and the tokenizer that the package wordllama comes with. Its own loader is not asked: it
    looks for the tokenizer on the network."""
    spec = find_spec(PACKAGES["static"])
    places = list(spec.submodule_search_locations or ()) if spec else []
    tables, tokenizers = (
        sorted(path for place in places for path in Path(place).glob(pattern))
        for pattern in ("weights/*_256.safetensors", "tokenizers/*.json")
    )
    if not tables or not tokenizers:
        raise ValueError(f"the package wordllama in {', '.join(places)} has no table or no tokenizer with it")
    return tables[0], tokenizers[0]


def load_static() -> Encode:
    """A document is the mean of its tokens' rows of a table (`wordllama`: 256 numbers a token)."""
    from safetensors.numpy import load_file
    from tokenizers import Tokenizer

    weights, vocabulary = static_files()
    (table,) = load_file(weights).values()
    tokenizer = Tokenizer.from_file(str(vocabulary))

    def encode(documents: list[str]) -> Array:
        encoded = tokenizer.encode_batch(documents, add_special_tokens=False)
        return np.stack([mean_of(table[each.ids].astype(np.float32)) for each in encoded])

    return encode


def mean_of(rows: Array) -> Array:
    return rows.mean(0) if len(rows) else np.zeros(rows.shape[1], rows.dtype)


def load_sentence(folder: str) -> Encode:
    """A document is what a sentence-transformers model makes of it."""
    from sentence_transformers import SentenceTransformer

    model: Any = SentenceTransformer(folder, local_files_only=True, trust_remote_code=False)
    return lambda documents: model.encode(documents, show_progress_bar=False, convert_to_numpy=True)
