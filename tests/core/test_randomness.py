"""Numbers by position: the published values, and functions of their arguments alone."""

import numpy as np

from cpt.core.randomness import draws, key, mix_bits, sample_keys, shuffle

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
    keys = [key(*each) for each in parts]
    assert len(set(keys)) == len(keys) and all(0 <= each < WORD for each in keys)


def test_a_samples_key_is_a_function_of_stream_and_number_and_keys_do_not_meet():
    stream = splitmix(7, 1)[0]
    expected = [splitmix(stream ^ (number * GOLDEN % WORD), 1)[0] for number in (0, 1, 5, 10**12)]
    assert sample_keys(7, np.array([0, 1, 5, 10**12])).tolist() == expected
    many = np.concatenate([sample_keys(key("s", stream), np.arange(2000)) for stream in range(50)])
    assert len(np.unique(many)) == len(many)


def test_a_draw_depends_on_its_rows_key_its_place_and_its_stream():
    keys = sample_keys(1, np.arange(20))
    whole = draws(keys, 11, stream=0)
    picked = [13, 2, 2, 7]
    assert np.array_equal(draws(keys[picked], 11, stream=0), whole[picked])
    assert np.array_equal(draws(keys, 5, stream=0), whole[:, :5])
    assert not set(whole.flat) & set(draws(keys, 11, stream=1).flat)
    row = splitmix((int(keys[4]) + 2 * GOLDEN) % WORD, 1)[0]
    expected = [(splitmix(row ^ (place * GOLDEN % WORD), 1)[0] >> 11) / 2**53 for place in range(11)]
    assert draws(keys, 11, stream=2)[4].tolist() == expected


def test_every_item_comes_once_and_depends_on_its_position_count_and_stream():
    for count in (*range(1, 70), 127, 128, 129, 256, 257, 1000, 4097):
        items = shuffle(np.arange(count), count, stream=5)
        assert items.dtype == np.int64 and sorted(items.tolist()) == list(range(count))
    mixed = shuffle(np.array([7, 7, 8]), 1000, stream=np.array([3, 4, 3], np.uint64))
    alone = [int(shuffle(np.array([p]), 1000, stream=s)[0]) for p, s in ((7, 3), (7, 4), (8, 3))]
    assert mixed.tolist() == alone and shuffle(np.arange(0), 10, stream=0).tolist() == []
    assert shuffle(np.arange(12), 12, stream=1).tolist() == [6, 9, 0, 2, 7, 1, 11, 10, 3, 8, 5, 4]
    assert shuffle(np.array([10**9 - 1]), 10**9, stream=1).tolist() == [287203451]
