"""End tasks without labels, made of installed packages' docstrings, for the default domains."""
