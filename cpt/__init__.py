"""Continual pre-training of language models: learn a sequence of text domains, measure what is kept."""
