"""Near-duplicates of held-out documents in the training text of the same domain: a count for a warning.

Two documents are near-duplicates where the Jaccard similarity of their spans of 8 bytes (in lower case, white
space joined) is estimated at .5 or more: of 12 words one may differ. Spans stand for words because languages
differ in what a word is. A sample of the held-out documents, each by a sample of its spans (of those with
the smallest hashes, as in a bottom-k sketch, Broder 1997), is compared to the training documents, which are
streamed."""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from cpt.core.heartbeat import DELAY, make_progress_bar

SPAN = 8  # bytes: one integer
MIN_SIMILARITY = 0.5
MAX_HELD_OUT = 500  # documents of a held-out split that are compared
# The MAX_CANDIDATES spans of a held-out document with the smallest hashes are candidates. Those MAX_SPANS of
# them are compared that the fewest held-out documents have.
MAX_CANDIDATES = 512
MAX_SPANS = 48
MAX_TRAIN_BYTES = 1 << 27  # of more training text, a sample of its batches is compared
# Training documents that are compared at once.
BATCH_DOCUMENTS = 2000
BATCH_CHARACTERS = 1 << 20
MAX_PAIRS = 1 << 23  # pairs of equal spans that are in memory at once
MAX_MATCHES = 1 << 26  # pairs of equal spans after which the comparison ends: repetitive text takes long
TABLE_BITS = 22  # first bits of a hash; a table of them shows that most spans are in no held-out document


@dataclass(frozen=True)
class NearDuplicates:
    """How many held-out documents have a near-duplicate among the training documents."""

    found: int  # held-out documents with a near-duplicate
    compared: int  # held-out documents that were compared
    train_share: float  # share of the training documents that they were compared to


def normalize_to_bytes(text: str) -> bytes:
    """A text in lower case with its white space joined, as bytes: what spans are taken of."""
    return " ".join(text.lower().split()).encode(errors="replace")


def hash_spans(raw: bytes) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """(positions, hashes) of all spans of a text in up to 8 arrays, [spans] int64 and uint64: those that
    begin at a multiple of 8, at the byte after, and so on."""
    for offset in range(min(SPAN, len(raw) - SPAN + 1)):
        count = (len(raw) - offset) // SPAN
        spans = np.frombuffer(raw, "<u8", count=count, offset=offset)
        # The finalizer of SplitMix64 (Steele et al., OOPSLA 2014).
        hashes = (spans ^ (spans >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        hashes = (hashes ^ (hashes >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        hashes ^= hashes >> np.uint64(31)
        yield offset + SPAN * np.arange(count), hashes


def hash_distinct_spans(raw: bytes) -> np.ndarray:
    """The hashes of the spans of a text, each once, sorted, [distinct spans] uint64."""
    parts = [np.empty(0, np.uint64)]  # of a text that is shorter than a span
    for _, hashes in hash_spans(raw):
        parts.append(hashes)
    return np.unique(np.concatenate(parts))


class HeldOutSpans:
    """The sampled spans of held-out documents, and which of the documents have been found elsewhere."""

    def __init__(self, texts: Iterable[str]) -> None:
        sizes: list[int] = []
        hash_parts = [np.empty(0, np.uint64)]
        document_parts = [np.empty(0, np.int64)]
        for document, text in enumerate(texts):
            distinct = hash_distinct_spans(normalize_to_bytes(text))
            smallest = distinct[:MAX_CANDIDATES]
            hash_parts.append(smallest)
            document_parts.append(np.full(len(smallest), document))
            sizes.append(len(distinct))
        hashes = np.concatenate(hash_parts)
        documents = np.concatenate(document_parts)  # the document of each hash

        # The spans of each document that the fewest others have: they are found in little other text, which
        # makes the comparison fast, and are as likely changed as other spans.
        _, inverse, counts = np.unique(hashes, return_inverse=True, return_counts=True)
        order = np.lexsort((hashes, counts[inverse], documents))
        begins = np.searchsorted(documents[order], np.arange(len(sizes)))
        rank_in_document = np.arange(len(order)) - begins[documents[order]]
        sample = order[rank_in_document < MAX_SPANS]
        sample = sample[np.argsort(hashes[sample], kind="stable")]

        self.sizes = np.array(sizes)  # distinct spans of each document, [documents]
        self.hashes = hashes[sample]  # of the sampled spans, ascending, [spans]
        self.owners = documents[sample]  # the document of each sampled span, [spans]
        self.sampled = np.bincount(self.owners, minlength=len(sizes))  # spans by document, [documents]
        self.is_found = np.zeros(len(sizes), bool)  # whether a document has a near-duplicate, [documents]
        self.rebuild_index()

    def rebuild_index(self) -> None:
        """Builds the index in which spans of training text are looked up, from the sampled spans of the
        documents that have no near-duplicate so far: a document that has one needs no further comparison.

        `keys` are the distinct values of `hashes`, `begins` their first indices, `repeats` their counts."""
        is_open = ~self.is_found[self.owners]
        self.hashes = self.hashes[is_open]
        self.owners = self.owners[is_open]
        self.keys, self.begins, self.repeats = np.unique(self.hashes, return_index=True, return_counts=True)
        self.table = np.zeros(1 << TABLE_BITS, bool)  # whether a key begins with these bits
        self.table[self.keys >> np.uint64(64 - TABLE_BITS)] = True

    def compare(self, texts: Sequence[str]) -> int:
        """Records which held-out documents are near-duplicates of one of some training texts. Returns the
        number of pairs of a span of a training text and an equal span of a held-out document."""
        if not len(self.keys):
            return 0
        raw_texts = [normalize_to_bytes(text) for text in texts]
        lengths = np.array([len(raw) for raw in raw_texts])
        starts = np.cumsum(lengths + 1) - lengths - 1
        # Normalized texts have no line feed: no span over the border of two texts is in a document.
        text_indices, key_indices = self.shared_spans(b"\n".join(raw_texts), starts)

        # Where many held-out documents are alike, a batch of texts has many times their spans.
        repeats = self.repeats[key_indices]
        if repeats.sum() > MAX_PAIRS and len(texts) > 1:
            middle = len(texts) // 2
            return self.compare(texts[:middle]) + self.compare(texts[middle:])

        # One entry for each held-out document that has a span, for each text that has it.
        num_earlier = np.cumsum(repeats) - repeats
        rank_in_key = np.arange(repeats.sum()) - np.repeat(num_earlier, repeats)
        document_indices = self.owners[np.repeat(self.begins[key_indices], repeats) + rank_in_key]

        # A pair of a text and a document as one number, so that its common spans are counted.
        num_documents = len(self.sizes)
        codes = np.repeat(text_indices, repeats) * num_documents + document_indices
        codes, num_common = np.unique(codes, return_counts=True)
        text_indices, document_indices = np.divmod(codes, num_documents)

        # The share of common spans is never below the similarity.
        shares = num_common / self.sampled[document_indices]
        is_candidate = shares >= MIN_SIMILARITY
        self.record_near_duplicates(
            text_indices[is_candidate], document_indices[is_candidate], shares[is_candidate], raw_texts
        )
        return int(repeats.sum())

    def record_near_duplicates(
        self,
        text_indices: np.ndarray,
        document_indices: np.ndarray,
        shares: np.ndarray,
        raw_texts: list[bytes],
    ) -> None:
        """Records which held-out documents are near-duplicates. Candidate pair i is training text
        raw_texts[text_indices[i]] and held-out document document_indices[i]; shares[i] of the document's
        sampled spans are in the text."""
        # A text may be a candidate for several documents: its spans are counted once.
        distinct_indices, inverse = np.unique(text_indices, return_inverse=True)
        distinct_sizes = np.array(
            [len(hash_distinct_spans(raw_texts[index])) for index in distinct_indices], int
        )
        text_sizes = distinct_sizes[inverse]  # in distinct spans, [pairs]
        document_sizes = self.sizes[document_indices]

        # Jaccard similarity |A ∩ B| / |A ∪ B|, compared without the division.
        intersection = shares * document_sizes  # estimated from the sample
        union = document_sizes + text_sizes - intersection
        similar_documents = document_indices[intersection >= MIN_SIMILARITY * union]
        if len(similar_documents):
            self.is_found[similar_documents] = True
            self.rebuild_index()

    def shared_spans(self, raw: bytes, starts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The spans that training texts share with held-out documents: (text indices, indices into `keys`),
        each pair once. `raw` are the joined texts, which begin at `starts`."""
        # A pair of a text and a key as one number; the empty array is for texts shorter than a span.
        codes = [np.empty(0, np.int64)]
        for positions, hashes in hash_spans(raw):
            # The table excludes most spans before the search.
            candidates = np.flatnonzero(self.table[hashes >> np.uint64(64 - TABLE_BITS)])
            key_indices = np.searchsorted(self.keys, hashes[candidates]).clip(max=len(self.keys) - 1)
            is_equal = self.keys[key_indices] == hashes[candidates]
            text_indices = np.searchsorted(starts, positions[candidates[is_equal]], side="right") - 1
            codes.append(text_indices * len(self.keys) + key_indices[is_equal])
        text_indices, key_indices = np.divmod(np.unique(np.concatenate(codes)), len(self.keys))
        return text_indices, key_indices


def batch_texts(texts: Iterable[str]) -> Iterator[list[str]]:
    """Texts by batches of a bounded number and size."""
    batch: list[str] = []
    size = 0
    for text in texts:
        batch.append(text)
        size += len(text)
        if len(batch) >= BATCH_DOCUMENTS or size >= BATCH_CHARACTERS:
            yield batch
            batch = []
            size = 0
    if batch:
        yield batch


def count_near_duplicates(
    held_out: Iterable[str], training: Iterable[str], *, name: str, num_training: int, train_bytes: int
) -> NearDuplicates:
    """Counts the held-out documents that are near-duplicates of training documents. There are `num_training`
    training documents of `train_bytes` in all; if they are more than MAX_TRAIN_BYTES, only every n-th batch
    is compared. `name` of the domain is for the progress bar."""
    spans = HeldOutSpans(held_out)
    stride = max(1, math.ceil(train_bytes / MAX_TRAIN_BYTES))
    num_read = 0
    num_matches = 0
    with make_progress_bar(
        f"comparing held-out documents of {name}",
        total=num_training,
        unit=" documents",
        scale=True,
        hidden=False,
        delay=DELAY,
    ) as progress:
        # Every n-th batch, so that the sample is of the whole text and not of its beginning.
        for number, batch in enumerate(batch_texts(training)):
            if number % stride == 0:
                num_matches += spans.compare(batch)
                num_read += len(batch)
            progress.update(len(batch))
            if num_matches > MAX_MATCHES:
                break
    return NearDuplicates(
        found=int(spans.is_found.sum()),
        compared=int((spans.sampled > 0).sum()),  # without documents that are shorter than a span
        train_share=num_read / max(1, num_training),
    )
