"""The tests that take long without a model that learns, by measured durations: `-m "not slow"` leaves them out.

    pytest --durations=0 > durations.log && python tests/support/slow_tests.py durations.log

writes their names anew to tests/slow_tests.txt: of each test all of whose rows take more than a fifth of a
second together."""

import re
import sys
from collections import defaultdict
from pathlib import Path

SLOW_TESTS = Path(__file__).parents[1] / "slow_tests.txt"
LIMIT_S = 0.2  # of all rows of a test together
DURATION = re.compile(r"\s*([\d.]+)s (?:call|setup|teardown)\s+(\S.*)")  # a line of pytest's list


def name_test(node_id: str) -> str:
    """The file and the name of a test, without the row.

    >>> name_test("tests/a.py::test_b[1-[x]]")
    'tests/a.py::test_b'
    """
    return node_id.partition("[")[0]


def read_slow_tests() -> frozenset[str]:
    return frozenset(SLOW_TESTS.read_text(encoding="utf-8").split())


def find_slow_tests(durations: str) -> list[str]:
    """The tests above the limit, by name, from what `pytest --durations=0` prints."""
    seconds: dict[str, float] = defaultdict(float)
    for line in durations.splitlines():
        match = DURATION.match(line)
        if match:
            seconds[name_test(match[2].strip())] += float(match[1])
    return sorted(test for test, total in seconds.items() if total > LIMIT_S)


if __name__ == "__main__":
    log = Path(sys.argv[1]).read_text(encoding="utf-8")
    SLOW_TESTS.write_text("\n".join(find_slow_tests(log)) + "\n", encoding="utf-8")
