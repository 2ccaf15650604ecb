"""How many pairs of runs the sign-flip test needs. A sweep logs it when it starts: no numpy here."""

EXACT = 12  # up to this number of pairs, every one of the 2^n signs is tried
FLIPS = 10_000  # random signs where there are more pairs
LEVEL = 0.05  # the largest corrected p-value at which two groups differ


def least_p(pairs: int) -> float:
    """The smallest p-value of that many pairs: that of all signs alike, or of no drawn sign."""
    return 2.0 ** (1 - pairs) if pairs <= EXACT else 1 / (1 + FLIPS)


def needed_pairs(comparisons: int) -> int | None:
    """The fewest pairs of which the smallest p-value, by Holm times the number of comparisons, is at most
    LEVEL; None if no n has such a p-value."""
    enough = (pairs for pairs in range(1, EXACT + 2) if least_p(pairs) * comparisons <= LEVEL)
    return next(enough, None)
