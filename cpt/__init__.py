"""Continual pre-training of language models: learn a sequence of text domains, measure what is kept."""

__version__ = "0.1.0"
