"""Numbers by position: the published values, and functions of their arguments alone."""

import numpy as np

from cpt.core.randomness import draw_uniforms, key, mix_bits, permute, sample_keys

WORD = 2**64
GOLDEN = 0x9E3779B97F4A7C15


def splitmix(state: int, count: int) -> list[int]:
    """The first outputs of SplitMix64 as its authors publish it, in plain integers."""
    outputs = []
    for _ in range(count):
        state = (state + GOLDEN) % WORD
        word = state
        word = (word ^ (word >> 30)) * 0xBF58476D1CE4E5B9 % WORD
        word = (word ^ (word >> 27)) * 0x94D049BB133111EB % WORD
        outputs.append(word ^ (word >> 31))
    return outputs


def test_the_words_are_splitmix64s():
    assert splitmix(0, 3) == [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]
    assert mix_bits(np.array([0, GOLDEN, 2 * GOLDEN % WORD], np.uint64)).tolist() == splitmix(0, 3)


def test_a_key_is_the_same_in_every_process_and_tells_its_parts_apart():
    assert key("probe", "news", 3) == 16634162284742173032
    parts = [("ab", "c"), ("a", "bc"), ("abc",), ("ab", "c", ""), (1, 2), (12,), ("c", "ab")]
    keys = [key(*parts_of_key) for parts_of_key in parts]
    assert len(set(keys)) == len(keys) and min(keys) >= 0 and max(keys) < WORD


def test_a_samples_key_is_a_function_of_stream_and_number_and_keys_do_not_meet():
    stream = splitmix(7, 1)[0]
    expected = [splitmix(stream ^ (number * GOLDEN % WORD), 1)[0] for number in (0, 1, 5, 10**12)]
    assert sample_keys(7, np.array([0, 1, 5, 10**12])).tolist() == expected

    keys = np.concatenate([sample_keys(key("s", stream), np.arange(2000)) for stream in range(50)])
    assert len(np.unique(keys)) == len(keys)


def test_a_draw_depends_on_its_rows_key_its_place_and_its_stream():
    keys = sample_keys(1, np.arange(20))
    numbers = draw_uniforms(keys, 11, stream=0)
    rows = [13, 2, 2, 7]
    assert np.array_equal(draw_uniforms(keys[rows], 11, stream=0), numbers[rows])
    assert np.array_equal(draw_uniforms(keys, 5, stream=0), numbers[:, :5])
    assert not set(numbers.flat) & set(draw_uniforms(keys, 11, stream=1).flat)

    row_key = splitmix((int(keys[4]) + 2 * GOLDEN) % WORD, 1)[0]
    words = [splitmix(row_key ^ (position * GOLDEN % WORD), 1)[0] for position in range(11)]
    expected = [(word >> 11) / 2**53 for word in words]  # the upper 53 bits, as a number from 0 to 1
    assert draw_uniforms(keys, 11, stream=2)[4].tolist() == expected


def test_every_item_comes_once_and_depends_on_its_position_count_and_stream():
    for count in (*range(1, 70), 127, 128, 129, 256, 257, 1000, 4097):
        items = permute(np.arange(count), count, stream=5)
        assert items.dtype == np.int64 and sorted(items.tolist()) == list(range(count))
    assert permute(np.arange(0), 10, stream=0).tolist() == []

    # Several positions and streams in one call give what each gives in a call of its own.
    together = permute(np.array([7, 7, 8]), 1000, stream=np.array([3, 4, 3], np.uint64))
    for item, position, stream in zip(together, (7, 7, 8), (3, 4, 3), strict=True):
        assert item == permute(np.array([position]), 1000, stream=stream)[0]

    # Recorded values: another permutation would change the result of every run.
    assert permute(np.arange(12), 12, stream=1).tolist() == [6, 9, 0, 2, 7, 1, 11, 10, 3, 8, 5, 4]
    assert permute(np.array([10**9 - 1]), 10**9, stream=1).tolist() == [287203451]
