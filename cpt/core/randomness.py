"""Random numbers as functions of position: the same for any number of workers, ranks and restarts.

A stream is named by a key; its numbers are SplitMix64's (Steele, Lea, Flood, OOPSLA 2014) at the positions
asked for, so nothing is drawn in sequence and nothing has to be saved."""

import hashlib

import numpy as np

GOLDEN = np.uint64(0x9E3779B97F4A7C15)
FIRST = np.uint64(0xBF58476D1CE4E5B9)
SECOND = np.uint64(0x94D049BB133111EB)
ROUNDS = 10  # with 6, permutations of less than ten items come out unevenly


def key(*parts: str | int) -> int:
    """A 64-bit key of names and numbers."""
    text = "\x1f".join(str(part) for part in parts)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def words_of(numbers: int | np.ndarray) -> np.ndarray:
    """Numbers as an array of uint64: arrays wrap around in silence, where NumPy's scalars warn."""
    return np.atleast_1d(np.asarray(numbers, np.uint64))


def mix_bits(numbers: int | np.ndarray) -> np.ndarray:
    """SplitMix64's finaliser on 64-bit words of any shape."""
    words = words_of(numbers) + GOLDEN
    words = (words ^ (words >> np.uint64(30))) * FIRST
    words = (words ^ (words >> np.uint64(27))) * SECOND
    return words ^ (words >> np.uint64(31))


def sample_keys(stream: int | np.ndarray, samples: np.ndarray) -> np.ndarray:
    """A key per sample, [B] uint64, from the key of its stream (one, or one per sample) and its number."""
    return mix_bits(mix_bits(stream) ^ (words_of(samples) * GOLDEN))


def draws(keys: np.ndarray, length: int, *, stream: int) -> np.ndarray:
    """Uniform numbers in [0, 1), [B, length] float64: row b depends on keys[b] and `stream` only."""
    rows = mix_bits(keys + words_of(stream) * GOLDEN)
    words = mix_bits(rows[:, None] ^ (np.arange(length, dtype=np.uint64) * GOLDEN))
    return (words >> np.uint64(11)).astype(np.float64) * 2.0**-53


def shuffle(positions: np.ndarray, count: int | np.ndarray, *, stream: int | np.ndarray) -> np.ndarray:
    """The items [B] int64 at `positions` [B] < count of a random permutation of range(count), in O(1) memory.

    `stream` (one key, or one per position) names the permutation; `count` too may be one per position. A
    Feistel network on the next even power of two whose outputs beyond `count` are sent through it again
    (cycle walking: Black and Rogaway, CT-RSA 2002)."""
    bits = np.frexp(np.asarray(count) - 1)[1]  # the bit length of a number below 2 ** 53
    shape = positions.shape
    halves = np.broadcast_to(np.maximum(1, (bits + 1) // 2).astype(np.uint64), shape)
    keys = np.broadcast_to(words_of(stream), shape)
    counts = np.broadcast_to(words_of(count), shape)

    items = feistel(words_of(positions), keys, halves)
    is_beyond = items >= counts
    while is_beyond.any():
        items[is_beyond] = feistel(items[is_beyond], keys[is_beyond], halves[is_beyond])
        is_beyond = items >= counts
    return items.astype(np.int64)


def feistel(words: np.ndarray, keys: np.ndarray, half: np.ndarray) -> np.ndarray:
    """Keyed bijections of the integers below 4 ** half, each [B]."""
    low_bits = (np.uint64(1) << half) - np.uint64(1)
    left_half = words >> half
    right_half = words & low_bits
    for round_keys in mix_bits(keys + np.arange(ROUNDS, dtype=np.uint64)[:, None]):
        mixed = left_half ^ (mix_bits(right_half ^ round_keys) & low_bits)
        left_half = right_half
        right_half = mixed
    return (left_half << half) | right_half
