"""Prose of docstrings: what of them is text, and which files of a package are read."""

import importlib
import sys

import pytest

from cpt.data.sources.docstrings import documents, modules, prose

NUMPYDOC = r"""Return the shortest path between two nodes
    of a graph that may be `directed`; see :func:`~networkx.algorithms.bfs` and
    :class:`the graph class <networkx.Graph>` for the *structures* that ``G[u]`` walks over [2]_.

    .. versionchanged:: 3.2
       Negative weights are refused because the heap would return wrong paths for them.

    Parameters
    ----------
    G : NetworkX graph that holds all of the nodes, edges and attributes of it
        The graph in which the path is searched, its edges may carry weights.
    *args : tuple
        too short

        - Here :math:`\alpha \leq \mathbb{R}` bounds all of the things and so it
          goes on.
        - The second of them is on one line.

    =====  =====================================
    Alpha  This row of the table is not a sentence.
    =====  =====================================

    Examples
    --------
    For the path graph there is only one possible answer to give:
    >>> for node in shortest_path(nx.path_graph(4), 0, 3): print(node in the_graph)
    The output of this example is printed on one line.

    References
    ----------
    .. [2] Dijkstra, A note on two problems in connexion with graphs,
       Numerische Mathematik and the other journals of that time.
    """
DROPPED = [
    "Too short to be prose.",
    "```python\n\nThis is what the code prints and not a sentence of the text.\n\n```",
    "The sum a + (b * c) / d == 2 is in [0, 1] and of the order (i, j) != (k, l) for 0 <= i < j.",
    "Arcsin Benini Beta Binomial Cauchy Dagum Davis Erlang Exponential Gamma Gumbel Weibull",
    "Knuth, The Art of Computer Programming, Vol. 2, in the third edition of 1997 by the press.",
    "See the page of the project at https://example.org/ for all of the things that it can do.",
    "The value that is given to the function by the",
]


def test_numpydoc_keeps_the_sentences_and_nothing_else():
    assert prose(NUMPYDOC) == [
        "Return the shortest path between two nodes of a graph that may be directed; see bfs and the graph "
        "class for the structures that G[u] walks over [2].",
        "Negative weights are refused because the heap would return wrong paths for them.",
        "The graph in which the path is searched, its edges may carry weights.",
        "Here alpha <= R bounds all of the things and so it goes on.",
        "The second of them is on one line.",
        "For the path graph there is only one possible answer to give:",
    ]
    assert [prose(text) for text in DROPPED] == [[]] * len(DROPPED)


SHARED = "This sentence stands in the licence of every single file of the package."
LONG = "The second module has something else to say, and it needs a few more words to say all of it."
ASSERT = "The assert is a way to put it into a program, and it is a part of the language as such."
FILES = {
    "__init__.py": f"'{SHARED}'\ndef f():\n  'The package tells about many things.'\nraise ImportError",
    "b.py": f"'{SHARED}'\ndef f():\n  '{LONG}'\nraise ImportError",
    "short.py": "'There is not enough in this to be a document.'",
    "broken.py": "'The text of this file is lost because the file is not Python at all.'\ndef (",
    "latin.py": "'It is not UTF-8, as it should be for the word été; Python would refuse it, so it is lost.'",
    "coding.py": f"# coding: latin-1\n'{LONG[:-1]}, été and the like.'",
    "tests/test_b.py": f"'{ASSERT} It is of the tests, which are left out.'",
    "pydoc_data/topics.py": f"raise ImportError\ntopics = {{'assert': '{ASSERT}\\n\\n   stmt ::= no prose'}}",
}


def test_documents_are_read_without_importing_and_hold_each_paragraph_once(tmp_path, monkeypatch):
    for name, text in FILES.items():
        path = tmp_path / "fake_package" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text.encode("latin-1"))  # ASCII, but for the two files that are about it
    (tmp_path / "fake_module.py").write_text('"""A module that is one file is also a package for us."""\n')
    monkeypatch.syspath_prepend(tmp_path)
    importlib.invalidate_caches()
    assert list(documents(["fake_package"])) == [LONG, f"{LONG[:-1]}, été and the like.", ASSERT]
    assert not any(name.startswith("fake_") for name in sys.modules)
    names = [path.relative_to(tmp_path / "fake_package").as_posix() for path in modules("fake_package")]
    assert names == sorted(FILES.keys() - {"tests/test_b.py"})
    assert [*modules("fake_module").values()] == ["fake_module"]
    for name in ("no_such_package", "os.path", "sys"):
        with pytest.raises(ValueError, match=f"{name!r}.*installed package"):
            list(documents([name]))
