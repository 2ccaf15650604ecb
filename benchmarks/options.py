"""How soon a wrong option is told, each in a process of its own as a user starts it:
`python benchmarks/options.py`.

The options are those of tests/support/wrong_options.py; those on the model need torch, Lightning and
transformers, and are of the tests' small model."""

import subprocess
import sys
import tempfile
import time
from statistics import median

from measuring import ROOT, save

sys.path.insert(0, str(ROOT))
from tests.conftest import SMALL  # noqa: E402
from tests.support.wrong_options import AT_ONCE, ON_THE_MODEL  # noqa: E402


def seconds(given: str, folder: str, *, size: list[str]) -> float:
    """Until a start with these overrides has ended, in one line."""
    overrides = [given] if "{" in given else [each.replace("=(", "='('") for each in given.split()]
    command = [sys.executable, str(ROOT / "run.py"), *size, *overrides]
    began = time.perf_counter()
    ended = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    took = time.perf_counter() - began
    assert ended.returncode and len(ended.stderr.splitlines()) == 1, (given, ended.stderr)
    return took


def main() -> None:
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, table, size in (("at_once", AT_ONCE, []), ("on_the_model", ON_THE_MODEL, SMALL)):
            took = {given: seconds(given, folder, size=size) for given in table}
            slowest = max(took, key=took.get)
            figures = {"count": len(took), "median": median(took.values()), "most": took[slowest]}
            found[name] = figures | {"slowest": slowest}
            print(name, found[name])
    save("options", found, out=None)


if __name__ == "__main__":
    main()
