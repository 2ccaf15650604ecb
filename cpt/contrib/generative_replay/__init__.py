"""Generative replay (LAMOL, LFPT5): before each stage the model writes what it replays of earlier domains."""
