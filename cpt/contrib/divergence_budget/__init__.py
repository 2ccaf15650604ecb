"""A bound on how far a stage may take the model from the base, on its own text: without old text."""
