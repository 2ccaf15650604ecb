"""The held-out examples of supervised tasks as tasks of the lm-evaluation-harness."""
