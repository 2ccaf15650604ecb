"""Prose of docstrings: what of them is text, and which files of a package are read."""

from cpt.data.sources.docstrings import prose

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
