"""`order=similar`: samples of the texts are embedded by TF-IDF before a run; their similarity is cached."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from cpt.core.cache import find_artifact_damage, make_once
from cpt.core.config import digest
from cpt.core.messages import count_noun
from cpt.core.randomness import key, permute
from cpt.data import orders
from cpt.data.sources.base import EXAMPLES, GENERAL, Source, make_stamp
from cpt.data.sources.examples import read_example
from cpt.trainer.plan import Plan

if TYPE_CHECKING:
    from cpt.data.corpora import Corpora

log = logging.getLogger(__name__)
CACHE_FORMAT = 2  # raise it when the same texts give another similarity
CHARACTERS_READ = 20_000  # of a document, at most
BATCH_SIZE = 16  # documents that are read at once


def order_domains(plan: Plan) -> Plan:
    """The plan with its domains in order. Texts that decide it are read and embedded, unless the cache has
    their similarity. Raises ValueError for a plan that cannot be run, before any text is read."""
    if not plan.is_ordered_by_texts:
        return plan
    ordered_plan = load_cached_order(plan)
    if ordered_plan is None:
        make_similarity(plan)
        ordered_plan = load_cached_order(plan)
        assert ordered_plan is not None
    log.info(
        "Ordering domains (order=%s): from %s to %s",
        plan.run.order,
        ordered_plan.order[0],
        ordered_plan.order[-1],
    )
    return ordered_plan


def load_cached_order(plan: Plan) -> Plan | None:
    """The plan with its domains in order; None if that takes reading the texts."""
    if not plan.is_ordered_by_texts:
        return plan
    folder = choose_similarity_folder(plan)
    if find_artifact_damage(folder):  # make_once makes it again
        return None
    values = json.loads((folder / "similarity.json").read_text(encoding="utf-8"))
    similarity = orders.Similarity.load(values)
    return replace(plan, order=orders.arrange_domains(plan.run.order, similarity), similarity=similarity)


def make_similarity(plan: Plan) -> None:
    """Reads and embeds the texts of a plan into the cache."""
    from cpt.trainer import build, check_model  # load torch

    check_model.check_model(plan)  # before hours of reading
    make_once(
        choose_similarity_folder(plan),
        make=lambda folder: write_similarity(folder, plan.source, build.read_corpora(plan)),
    )


def choose_similarity_folder(plan: Plan) -> Path:
    """The cache entry: a hash of the names, sizes and times of the texts."""
    stamps = {name: make_stamp(plan.source, name) for name in (*sorted(plan.order), GENERAL)}
    contents = [CACHE_FORMAT, stamps, plan.source.embedding_samples]
    return Path(plan.run.cache_dir) / "similarity" / digest(contents)


def write_similarity(folder: Path, source: Source, corpora: Corpora) -> None:
    """Embeds a deterministic sample of the training documents of each domain and of the general text, and
    writes the domains' similarity into the folder of the cache entry."""
    log.info("Embedding samples of %s", count_noun(len(corpora.by_name), "text"))
    samples = {name: sample_documents(name, source, corpora) for name in corpora.by_name}
    embeddings = orders.embed_by_words(samples)  # by text, the mean over its documents
    general_embedding = embeddings.pop(GENERAL)
    similarity = orders.Similarity.of(embeddings, general=general_embedding)
    text = json.dumps(similarity.to_json())
    (folder / "similarity.json").write_text(text, encoding="utf-8")


def sample_documents(name: str, source: Source, corpora: Corpora) -> Iterator[list[str]]:
    """Yields the first characters of sampled training documents in batches; of examples their questions."""
    documents = corpora.by_name[name].documents("train")
    num_samples = min(source.embedding_samples, len(documents))
    indices = permute(np.arange(num_samples), len(documents), stream=key("embedding", name))
    for batch in documents.select(np.sort(indices)).iter(batch_size=BATCH_SIZE):
        texts = batch["text"]
        if source.form(name) == EXAMPLES:
            texts = [read_example(text).question for text in texts]
        yield [text[:CHARACTERS_READ] for text in texts]
