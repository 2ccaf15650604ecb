"""SARI (Xu et al., TACL 2016, section 4): how good a simplification is at what it adds, keeps and deletes."""

import re
from collections import Counter
from collections.abc import Sequence

ORDERS = (1, 2, 3, 4)  # lengths of n-grams
WORD = re.compile(r"\w+|[^\w\s]")


def sari(source: str, written: str, references: Sequence[str]) -> float:
    """SARI of a text that was written to simplify a source, in 0..1: the mean of F_add, F_keep and P_del,
    each a mean over n-grams of 1 to 4 words.

    With counts # of an n-gram in source I, output O and, divided by their number, references R:
    add counts each n-gram of O that is not in I once, and of these those in R; keep counts min(#I, #O), and
    of these min(#I, #R); deletion max(#I - #O, 0), and of these at most max(#I - #R, 0). Precision divides
    by what the output does, recall by what the references do; 0 / 0 is 1, so that a reference itself has 1.
    F is taken of each n before the mean, as in the authors' Python code; the paper takes it after. Words are
    in lower case, signs are words."""
    scores = [
        operation
        for order in ORDERS
        for operation in score_order(
            count_ngrams(source, order),
            count_ngrams(written, order),
            [count_ngrams(each, order) for each in references],
        )
    ]
    return sum(scores) / len(scores)


def score_order(source: Counter, written: Counter, references: Sequence[Counter]) -> tuple[float, ...]:
    """F_add, F_keep and P_del of n-grams of one length. Counts are multiplied by the number of references,
    rather than theirs divided."""
    told = sum(references, Counter())
    source, written = (
        Counter({gram: count * len(references) for gram, count in each.items()}) for each in (source, written)
    )
    added, wanted = set(written) - set(source), set(told) - set(source)
    kept, keepable = source & written, source & told
    deleted = source - written
    return (
        f_score(len(added & wanted), len(added), len(wanted)),
        f_score((kept & told).total(), kept.total(), keepable.total()),
        ratio((deleted & (source - told)).total(), deleted.total()),
    )


def count_ngrams(text: str, order: int) -> Counter:
    """How often each n-gram of so many words occurs."""
    words = WORD.findall(text.lower())
    return Counter(zip(*(words[start:] for start in range(order)), strict=False))


def f_score(right: int, done: int, wanted: int) -> float:
    """The harmonic mean of precision and recall; 0 where both are."""
    precision, recall = ratio(right, done), ratio(right, wanted)
    return 2 * precision * recall / (precision + recall) if precision + recall else 0.0


def ratio(part: int, whole: int) -> float:
    return part / whole if whole else 1.0
