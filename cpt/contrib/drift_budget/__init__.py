"""A bound on how far losses on other text may rise while domains are learned."""
