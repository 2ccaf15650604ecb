"""Prose of docstrings: what of them is text, and which files of a package are read."""

import importlib
import sys
import sysconfig
import warnings

import pytest

from cpt.data.sources.docstrings import docstrings, documents, modules, prose

NUMPYDOC = r"""Return the shortest path between two nodes
    of a graph that may be `directed`.

    The search keeps a heap of *reachable* nodes; see :func:`~networkx.algorithms.bfs` and
    :class:`the graph class <networkx.Graph>` for the structures that ``G[u]`` walks over [2]_.

    .. math::

       d(u, v) = \min_{w} \left( d(u, w) + 1 \right)

    .. versionchanged:: 3.2
       Negative weights are refused because the heap would return wrong paths for them.

    Parameters
    ----------
    G : NetworkX graph that holds all of the nodes, edges and attributes of it
        The graph in which the path is searched, its edges may carry weights.
    source, target : node, optional
        Ends of the path. They must both be in the graph
        or an error is raised.
    *args : tuple
        too short

    Returns
    -------
    list
        All of the nodes on the path in the order in which they are walked::

            [source, and, the, other, nodes, that, are, in, the, path, target]

    =====  =====================================
    name   what the column is for in the results
    =====  =====================================
    Alpha  This row of the table is not a sentence.
    =====  =====================================

    Examples
    --------
    For the path graph there is only one possible answer to give:
    >>> for node in shortest_path(nx.path_graph(4), 0, 3): print(node in the_graph)
    The output of this example is printed on one line.

    See Also
    --------
    has_path : Return True if there is a path between the two nodes of the graph.
    The other functions of this module are also worth a look.

    References
    ----------
    .. [2] Dijkstra, A note on two problems in connexion with graphs,
       Numerische Mathematik and the other journals of that time.
    """


def test_numpydoc_keeps_the_sentences_and_nothing_else():
    assert prose(NUMPYDOC) == [
        "Return the shortest path between two nodes of a graph that may be directed.",
        "The search keeps a heap of reachable nodes; see bfs and the graph class for the structures "
        "that G[u] walks over [2].",
        "Negative weights are refused because the heap would return wrong paths for them.",
        "The graph in which the path is searched, its edges may carry weights.",
        "Ends of the path. They must both be in the graph or an error is raised.",
        "All of the nodes on the path in the order in which they are walked:",
        "For the path graph there is only one possible answer to give:",
    ]


MARKUP = {
    r"Here :math:`\alpha \leq \mathbb{R}` bounds it": "Here alpha <= R bounds it",
    "Here $O(n)$ is how :meth:`.Graph.add_node` scales": "Here O(n) is how .Graph.add_node scales",
    "Here :py:class:`~a.b.C` holds `None` or ``x``": "Here C holds None or x",
    "Here `the manual <https://a.org/x>`_ tells **all**": "Here the manual tells all",
    "Here [`~models.Bert`] is one": "Here Bert is one",
    r"Here \*args and **kwargs go on": "Here *args and **kwargs go on",
}


def test_markup_is_reduced_to_its_words_and_items_are_paragraphs():
    rest = " of the many things that can be said in a docstring."
    for given, expected in MARKUP.items():
        assert prose(given + rest) == [expected + rest]
    items = ["The first of the two is wrapped here and so it goes on.", "The second of them is on one line."]
    wrapped = items[0].replace("here and", "here\n      and")
    assert prose(f"\n    - {wrapped}\n    - {items[1]}\n    ") == items


@pytest.mark.parametrize(
    "text",
    [
        "Too short to be prose.",
        "```python\n\nThis is what the code prints and not a sentence of the text.\n\n```",
        "The sum a + (b * c) / d == 2 is in [0, 1] and of the order (i, j) != (k, l) for 0 <= i < j.",
        "Arcsin Benini Beta Binomial Cauchy Dagum Davis Erlang Exponential Gamma Gumbel Weibull",
        "+------------------------------+\n| this is one row of a table with many words in it |",
        "where the first of the two numbers is the smaller one.",
        "Knuth, The Art of Computer Programming, Vol. 2, in the third edition of 1997 by the press.",
        "See the page of the project at https://example.org/ for all of the things that it can do.",
        ".. image:: the_picture_of_the_thing.png\n   :alt: this is a picture of the thing that is meant",
        "The value that is given to the function by the",
    ],
)
def test_what_is_not_prose_is_dropped(text):
    assert prose(text) == []


def test_source_that_does_not_parse_gives_nothing_and_other_warnings_are_heard():
    for source in ("'text'\ndef f(:", "'text'\0", "'text \ud800'", "'text'\nprint 'Py2'"):
        assert list(docstrings(source)) == []
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert list(docstrings('"""a \\d escape"""')) == ["a \\d escape"]
    with pytest.warns((DeprecationWarning, SyntaxWarning), match="decimal literal"):
        assert list(docstrings('"""text"""\nx = 1if True else 2')) == ["text"]


SHARED = "This sentence stands in the licence of every single file of the package."
FILES = {
    "__init__.py": f"""'{SHARED}'
def f():
    'The package tells about the many things that it can do for you.'
raise ImportError""",
    "b.py": f"""'{SHARED}'
def f():
    'The second module has something else to say, and it needs a few more words to say all of it.'
raise ImportError""",
    "a/c.py": f"'{SHARED}'",
    "short.py": "'There is not enough in this to be a document.'",
    "broken.py": "'The text of this file is lost because the file is not Python at all.'\ndef (",
    "latin.py": """'''The text of this file is lost.

It is not UTF-8, as it should be for the word été; Python would refuse it too.'''""",
    "coding.py": """# coding: latin-1
'This file says that it is in Latin-1, and so the word été is read as it was meant to be.'""",
    "tests/test_b.py": "'The tests of a package are not what is to be learned, so they are left out.'",
    "pydoc_data/topics.py": r"""raise ImportError
topics = {
    'assert': 'The assert statement is a convenient way to put assertions into\n'
              'a program, and it is not a function but a part of the language.\n\n'
              '   assert_stmt ::= the grammar of it is not prose\n',
    'del': 'Deletion of a target list deletes each target in turn, from the left to\n'
           'the right, and then all of them are gone for good.\n',
}""",
}


@pytest.fixture
def package(tmp_path, monkeypatch):
    for name, text in FILES.items():
        path = tmp_path / "fake_package" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text.encode("latin-1"))  # ASCII, but for the two files that are about it
    (tmp_path / "fake_module.py").write_text('"""A module that is one file is also a package for us."""\n')
    monkeypatch.syspath_prepend(tmp_path)
    importlib.invalidate_caches()
    return "fake_package"


def test_documents_are_read_without_importing_and_hold_each_paragraph_once(package):
    assert list(documents([package])) == [
        f"{SHARED}\n\nThe package tells about the many things that it can do for you.",
        "The second module has something else to say, and it needs a few more words to say all of it.",
        "This file says that it is in Latin-1, and so the word été is read as it was meant to be.",
        "The assert statement is a convenient way to put assertions into a program, and it is not a function "
        "but a part of the language.",
        "Deletion of a target list deletes each target in turn, from the left to the right, and then all of "
        "them are gone for good.",
    ]
    assert not any(name.startswith("fake_") for name in sys.modules)


def test_modules_are_sorted_and_without_tests(package):
    paths = list(modules(package))
    names = [path.relative_to(paths[0].parent).as_posix() for path in paths]
    assert names == sorted(FILES.keys() - {"tests/test_b.py"})
    assert {path.name: name for path, name in modules("fake_module").items()} == {
        "fake_module.py": "fake_module"
    }


@pytest.mark.parametrize("name", ["no_such_package", "os.path", "not-a-name", "sys", ""])
def test_unknown_package_is_named_in_the_error(name):
    with pytest.raises(ValueError, match=f"{name!r}.*installed package"):
        list(documents([name]))


def test_stdlib_has_its_modules_and_the_language_reference_but_not_what_is_installed():
    root = sysconfig.get_paths()["stdlib"]
    names = [path.relative_to(root).as_posix() for path in modules("stdlib")]
    assert {"ast.py", "json/decoder.py", "pydoc_data/topics.py"} <= set(names)
    assert not {"site-packages", "dist-packages", "test", "idlelib"} & {name.split("/")[0] for name in names}


def test_statements_that_hold_others_are_known():
    """Every field of a statement that is a list of statements is looked into, in the order of the file."""
    source = "if a:\n  'x'\n  def f():\n    'f'\nelse:\n  class A:\n    'A'\n    async def g():\n      'g'\n"
    source += (
        "try:\n  def h(): 'h'\nexcept E:\n  def i(): 'i'\nelse:\n  def j(): 'j'\nfinally:\n  def k(): 'k'\n"
    )
    source += "match m:\n  case 1:\n    def l(): 'l'\nfor a in b:\n  def m(): 'm'\nelse:\n  def n(): 'n'\n"
    source += "while a:\n  with b:\n    def o(): 'o'\n"
    assert "".join(docstrings(source)) == "fAghijklmno"
