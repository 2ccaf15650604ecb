"""Small corpora of text that every Python has: `python docs/examples/make_corpora.py FOLDER`.

Three domains, FOLDER/<domain>/all.jsonl with a docstring of the standard library per line, and the language
reference as general text."""

import importlib
import inspect
import json
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from pydoc_data.topics import topics

DOMAINS = {
    "network": (
        *(
            "http.client",
            "http.server",
            "http.cookiejar",
            "urllib.request",
            "urllib.parse",
            "email.message",
            "socket",
        ),
        *(
            "email.policy",
            "email.headerregistry",
            "ssl",
            "smtplib",
            "imaplib",
            "ftplib",
            "asyncio",
            "socketserver",
        ),
        *(
            "ipaddress",
            "poplib",
            "xmlrpc.client",
            "selectors",
            "email.utils",
            "email.charset",
            "urllib.error",
        ),
    ),
    "files": (
        *(
            "os",
            "shutil",
            "pathlib",
            "zipfile",
            "tarfile",
            "csv",
            "tempfile",
            "glob",
            "fileinput",
            "filecmp",
            "io",
        ),
        *(
            "configparser",
            "gzip",
            "bz2",
            "lzma",
            "mailbox",
            "shelve",
            "pickle",
            "mmap",
            "stat",
            "posixpath",
            "plistlib",
        ),
    ),
    "numbers": (
        *(
            "math",
            "cmath",
            "statistics",
            "decimal",
            "fractions",
            "random",
            "numbers",
            "datetime",
            "calendar",
            "time",
        ),
        *(
            "collections",
            "itertools",
            "bisect",
            "heapq",
            "array",
            "struct",
            "colorsys",
            "operator",
            "zoneinfo",
        ),
    ),
}
LEAST = 60  # characters of a document


def docstrings(name: str) -> Iterator[str]:
    """The docstrings of a module, its classes and what is defined in them."""
    module = importlib.import_module(name)
    members = [
        each for _, each in inspect.getmembers(module) if inspect.isclass(each) or inspect.isroutine(each)
    ]
    inner = [each for kind in members if inspect.isclass(kind) for each in vars(kind).values()]
    for each in [module, *members, *filter(callable, inner)]:
        yield inspect.getdoc(each) or ""


def main(root: Path) -> None:
    warnings.simplefilter("ignore")
    texts = {
        domain: [text for name in names for text in docstrings(name)] for domain, names in DOMAINS.items()
    }
    texts["general"] = [part for text in topics.values() for part in text.split("\n\n")]
    for domain, found in texts.items():
        lines = [json.dumps({"text": text}) for text in dict.fromkeys(found) if len(text) >= LEAST]
        (root / domain).mkdir(parents=True, exist_ok=True)
        (root / domain / "all.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
        print(f"{domain}: {len(lines)} documents, {sum(map(len, lines)):,} characters")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        raise SystemExit("usage: python docs/examples/make_corpora.py FOLDER")
    main(Path(sys.argv[1]))
