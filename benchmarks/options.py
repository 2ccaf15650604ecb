"""How soon a wrong option is told: `python benchmarks/options.py`, each in a process of its own, as a user starts it.

The options are those of tests/support/wrong_options.py. Those on the model need torch, Lightning and transformers."""

import json
import subprocess
import sys
import tempfile
import time
from statistics import median

from measuring import ROOT, machine, save

sys.path.insert(0, str(ROOT))
from tests.support.wrong_options import AT_ONCE, ON_THE_MODEL  # noqa: E402


def seconds(given: str, folder: str) -> float:
    """Until a start with these overrides has ended in one line."""
    overrides = [given] if "{" in given else given.split()
    began = time.perf_counter()
    ended = subprocess.run(
        [sys.executable, str(ROOT / "run.py"), *overrides], cwd=folder, capture_output=True, text=True
    )
    took = time.perf_counter() - began
    assert ended.returncode and len(ended.stderr.splitlines()) == 1, (given, ended.stderr)
    return took


def main() -> None:
    found = {"machine": machine()}
    with tempfile.TemporaryDirectory() as folder:
        for name, table in (("at_once", AT_ONCE), ("on_the_model", ON_THE_MODEL)):
            took = {given: seconds(given, folder) for given in table}
            slowest = max(took, key=took.get)
            found[name] = {
                "count": len(took),
                "median": median(took.values()),
                "slowest": [slowest, took[slowest]],
            }
            print(name, found[name])
    (RESULTS / "options.json").write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
