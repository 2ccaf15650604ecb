"""Random numbers as functions of position: the same for any number of workers, ranks and restarts.

A stream is named by a key; its numbers are SplitMix64's (Steele, Lea, Flood, OOPSLA 2014) at the positions
asked for, so nothing is drawn in sequence and nothing has to be saved."""

import hashlib

import numpy as np

# SplitMix64's increment (2^64 over the golden ratio), and the multipliers of its finaliser.
GOLDEN_GAMMA = np.uint64(0x9E3779B97F4A7C15)
FIRST_MULTIPLIER = np.uint64(0xBF58476D1CE4E5B9)
SECOND_MULTIPLIER = np.uint64(0x94D049BB133111EB)
FEISTEL_ROUNDS = 10  # with 6, permutations of less than ten items come out unevenly


def key(*parts: str | int) -> int:
    """A 64-bit key of names and numbers."""
    text = "\x1f".join(str(part) for part in parts)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def torch_seed(*parts: str | int) -> int:
    """A seed for a generator of torch: the key of names and numbers, cut to the 63 bits of a signed integer
    that is not negative."""
    return key(*parts) % 2**63


def to_uint64(numbers: int | np.ndarray) -> np.ndarray:
    """Numbers as an array of uint64, which wraps around silently, where a scalar of NumPy warns."""
    return np.atleast_1d(np.asarray(numbers, np.uint64))


def mix_bits(numbers: int | np.ndarray) -> np.ndarray:
    """SplitMix64's finaliser on 64-bit words of any shape."""
    words = to_uint64(numbers) + GOLDEN_GAMMA
    words = (words ^ (words >> np.uint64(30))) * FIRST_MULTIPLIER
    words = (words ^ (words >> np.uint64(27))) * SECOND_MULTIPLIER
    return words ^ (words >> np.uint64(31))


def sample_keys(stream: int | np.ndarray, samples: np.ndarray) -> np.ndarray:
    """A key for each sample, [B] uint64, from the sample's number in `samples` [B] and the key of its
    `stream`: one key, or one for each sample."""
    return mix_bits(mix_bits(stream) ^ (to_uint64(samples) * GOLDEN_GAMMA))


def draw_uniforms(keys: np.ndarray, length: int, *, stream: int) -> np.ndarray:
    """Uniform numbers in [0, 1), [B, length] float64: row b depends on keys[b] and `stream` only."""
    row_keys = mix_bits(keys + to_uint64(stream) * GOLDEN_GAMMA)
    words = mix_bits(row_keys[:, None] ^ (np.arange(length, dtype=np.uint64) * GOLDEN_GAMMA))
    return (words >> np.uint64(11)).astype(np.float64) * 2.0**-53  # 53 bits: those that a float64 holds


def permute(positions: np.ndarray, count: int | np.ndarray, *, stream: int | np.ndarray) -> np.ndarray:
    """The items [B] int64 at `positions` [B] of a random permutation of the integers from 0 to count - 1, in
    O(1) memory: `permute(np.arange(count), count, stream=stream)` is the whole permutation. Positions are
    below `count`.

    The key `stream` chooses the permutation. Both `stream` and `count` may be an array with a value for each
    position; then each position is looked up in a permutation of its own.

    A Feistel network permutes the integers below a power of 4 that is at least `count`. A position that it
    sends to `count` or beyond is sent through it again until the result is below `count` (cycle walking:
    Black and Rogaway, CT-RSA 2002)."""
    num_bits = np.frexp(np.asarray(count) - 1)[1]  # of the largest item; exact below 2 ** 53
    half_width = np.maximum(1, (num_bits + 1) // 2).astype(np.uint64)  # bits of each half of an item

    # A value for each position.
    shape = positions.shape
    half_widths = np.broadcast_to(half_width, shape)
    keys = np.broadcast_to(to_uint64(stream), shape)
    counts = np.broadcast_to(to_uint64(count), shape)

    items = feistel(to_uint64(positions), keys, half_widths)
    is_beyond = items >= counts
    while is_beyond.any():
        items[is_beyond] = feistel(items[is_beyond], keys[is_beyond], half_widths[is_beyond])
        is_beyond = items >= counts
    return items.astype(np.int64)


def feistel(words: np.ndarray, keys: np.ndarray, half_widths: np.ndarray) -> np.ndarray:
    """Integers below 4 ** half_widths, mapped one to one to integers below 4 ** half_widths, by a bijection
    for each key; all arrays are [B] uint64. A Feistel network: in each round the right half of the bits
    becomes the left half, and the left half, xor a hash of the right half and the round's key, the right."""
    low_bits = (np.uint64(1) << half_widths) - np.uint64(1)
    left_half = words >> half_widths
    right_half = words & low_bits
    for round_keys in mix_bits(keys + np.arange(FEISTEL_ROUNDS, dtype=np.uint64)[:, None]):
        mixed = left_half ^ (mix_bits(right_half ^ round_keys) & low_bits)
        left_half = right_half
        right_half = mixed
    return (left_half << half_widths) | right_half
