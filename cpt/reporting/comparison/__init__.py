"""Runs side by side: `python -m cpt.report FOLDER…`."""
