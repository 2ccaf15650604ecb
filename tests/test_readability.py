"""No folder has more constructs at which a reader stops than its bound; each kind of them is recognised."""

import pytest

from tests.readability import count_by_folder, count_code_lines, find_marks, load_bounds

MARKED = {
    "walrus": "if (match := pattern.match(line)) is None: pass",
    "empty name": "def read(given): pass",
    "packed assignment": "rows, columns = len(table), max(sizes)",
    "conditional": "label = 'a' if first else 'b' if second else 'c'",
    "arithmetic with a condition": "suffix = 's' * (count != 1)",
    "comprehension": "flat = [cell for row in table for cell in row]",
    "dict as arguments": "train(**{'steps': 4})",
    "assembled error": "def check():\n    message = f'{name} is wrong'\n    raise ValueError(message)",
}
PLAIN = """
first, second = read_pair(path)
left_edge, right_edge = 0, 1
rows, columns = columns, rows
label = "one" if is_first else "other"
separator = "-" * width
flat = [cell for cell in row if cell]
train(steps=4, **options)
def check():
    raise ValueError(f"{name} is wrong")
"""


def test_no_folder_exceeds_its_bound():
    counts = {folder: num_marks for folder, (num_marks, _) in count_by_folder().items()}
    bounds = load_bounds()
    assert set(counts) == set(bounds), "python tests/readability.py --lower adds and removes folders"
    exceeded = {folder: (count, bounds[folder]) for folder, count in counts.items() if count > bounds[folder]}
    assert exceeded == {}, "python tests/readability.py FOLDER lists the constructs"


@pytest.mark.parametrize("kind", sorted(MARKED))
def test_each_kind_is_marked(kind):
    assert [mark.kind for mark in find_marks(MARKED[kind])] == [kind]


def test_plain_code_has_no_marks():
    assert find_marks(PLAIN) == []


def test_code_lines_leave_out_docstrings_comments_and_blank_lines():
    assert count_code_lines('"""A module.\n\nOf two lines."""\n\n# why\nsteps = 4  # of a stage\n') == 1
