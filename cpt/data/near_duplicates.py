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

from cpt.core.heartbeat import DELAY, progress_bar

SPAN = 8  # bytes: one integer
MIN_SIMILARITY = 0.5
MAX_HELD_OUT = 500  # documents of a held-out split that are compared
MAX_CANDIDATES = 512  # spans of a held-out document, of which
MAX_SPANS = 48  # are compared
MAX_TRAIN_BYTES = 1 << 27  # beyond which training text is sampled by batches
# Training documents that are compared at once.
BATCH_DOCUMENTS = 2000
BATCH_CHARACTERS = 1 << 20
MAX_PAIRS = 1 << 23  # of equal spans that are in memory at once
MAX_MATCHES = 1 << 26  # of spans, after which the comparison ends: text that repeats itself takes long
TABLE_BITS = 22  # of the table by which most spans are found to be in no held-out document


@dataclass(frozen=True)
class NearDuplicates:
    """How many of `compared` held-out documents have a near-duplicate among the training documents, of which
    the share `train_share` was read."""

    found: int
    compared: int
    train_share: float


def normalized_bytes(text: str) -> bytes:
    """The text whose spans are compared."""
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


def distinct_spans(raw: bytes) -> np.ndarray:
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
            distinct = distinct_spans(normalized_bytes(text))
            smallest = distinct[:MAX_CANDIDATES]
            hash_parts.append(smallest)
            document_parts.append(np.full(len(smallest), document))
            sizes.append(len(distinct))
        hashes = np.concatenate(hash_parts)
        documents = np.concatenate(document_parts)  # the document of each hash

        # Of each document the spans that fewest others have: these are found in little other text, which
        # makes the comparison fast, and as likely changed as others are.
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
        self.is_found = np.zeros(len(sizes), bool)
        self.index()

    def index(self) -> None:
        """Leaves out the spans of documents that have been found, and prepares to find those of others:
        `keys` are the distinct values of `hashes`, `begins` their first indices, `repeats` their counts."""
        is_open = ~self.is_found[self.owners]
        self.hashes = self.hashes[is_open]
        self.owners = self.owners[is_open]
        self.keys, self.begins, self.repeats = np.unique(self.hashes, return_index=True, return_counts=True)
        self.table = np.zeros(1 << TABLE_BITS, bool)  # whether a key has these first bits
        self.table[self.keys >> np.uint64(64 - TABLE_BITS)] = True

    def compare(self, texts: Sequence[str]) -> int:
        """Records which held-out documents are near-duplicates of one of some texts. Gives the number of
        pairs of equal spans."""
        if not len(self.keys):
            return 0
        raw_texts = [normalized_bytes(text) for text in texts]
        lengths = np.array([len(raw) for raw in raw_texts])
        starts = np.cumsum(lengths + 1) - lengths - 1
        # Normalized texts have no line feed: no span over the border of two texts is in a document.
        text_numbers, keys = self.shared_spans(b"\n".join(raw_texts), starts)

        # Where many held-out documents are alike, a batch of texts has many times their spans.
        repeats = self.repeats[keys]
        if repeats.sum() > MAX_PAIRS and len(texts) > 1:
            middle = len(texts) // 2
            return self.compare(texts[:middle]) + self.compare(texts[middle:])

        # One entry for each held-out document that has a span, for each text that has it.
        num_earlier = np.cumsum(repeats) - repeats
        rank_in_key = np.arange(repeats.sum()) - np.repeat(num_earlier, repeats)
        documents = self.owners[np.repeat(self.begins[keys], repeats) + rank_in_key]
        codes = np.repeat(text_numbers, repeats) * len(self.sizes) + documents  # a text and a document as one
        codes, num_common = np.unique(codes, return_counts=True)

        # The share of common spans is never below the similarity.
        text_numbers, documents = np.divmod(codes, len(self.sizes))
        shares = num_common / self.sampled[documents]
        is_candidate = shares >= MIN_SIMILARITY
        self.decide(text_numbers[is_candidate], documents[is_candidate], shares[is_candidate], raw_texts)
        return int(repeats.sum())

    def decide(
        self, text_numbers: np.ndarray, documents: np.ndarray, shares: np.ndarray, raw_texts: list[bytes]
    ) -> None:
        """Records which held-out documents are near-duplicates, of pairs of a training text (its index in
        `raw_texts`) and a held-out document with the share of its spans that the text has, [pairs]."""
        # A text may be a candidate for several documents: its spans are counted once.
        distinct_numbers, inverse = np.unique(text_numbers, return_inverse=True)
        text_sizes = np.array([len(distinct_spans(raw_texts[number])) for number in distinct_numbers], int)
        sizes = text_sizes[inverse]
        document_sizes = self.sizes[documents]

        # Jaccard similarity |A ∩ B| / |A ∪ B|, compared without the division.
        common = shares * document_sizes  # estimated from the sample
        union = document_sizes + sizes - common
        similar = documents[common >= MIN_SIMILARITY * union]
        if len(similar):
            self.is_found[similar] = True
            self.index()

    def shared_spans(self, raw: bytes, starts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The spans of texts that a held-out document has, each once for a text, as the index of the text
        and the index of the span in `keys`; `starts` are the positions at which the texts begin."""
        codes = [np.empty(0, np.int64)]  # a text and a key as one; none of texts shorter than a span
        for positions, hashes in hash_spans(raw):
            # The table excludes most spans before the search.
            candidates = np.flatnonzero(self.table[hashes >> np.uint64(64 - TABLE_BITS)])
            indices = np.searchsorted(self.keys, hashes[candidates]).clip(max=len(self.keys) - 1)
            is_equal = self.keys[indices] == hashes[candidates]
            text_numbers = np.searchsorted(starts, positions[candidates[is_equal]], side="right") - 1
            codes.append(text_numbers * len(self.keys) + indices[is_equal])
        text_numbers, keys = np.divmod(np.unique(np.concatenate(codes)), len(self.keys))
        return text_numbers, keys


def batches(texts: Iterable[str]) -> Iterator[list[str]]:
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
    """Compares held-out to training documents, of whose number and size all are given; of more than
    MAX_TRAIN_BYTES every n-th batch."""
    spans = HeldOutSpans(held_out)
    stride = max(1, math.ceil(train_bytes / MAX_TRAIN_BYTES))
    num_read = 0
    num_matches = 0
    with progress_bar(
        f"comparing held-out documents of {name}",
        total=num_training,
        unit=" documents",
        scale=True,
        hidden=False,
        delay=DELAY,
    ) as progress:
        # Every n-th batch, so that the sample is of the whole text and not of its beginning.
        for number, batch in enumerate(batches(training)):
            if number % stride == 0:
                num_matches += spans.compare(batch)
                num_read += len(batch)
            progress.update(len(batch))
            if num_matches > MAX_MATCHES:
                break
    num_compared = int((spans.sampled > 0).sum())
    return NearDuplicates(int(spans.is_found.sum()), num_compared, num_read / max(1, num_training))
