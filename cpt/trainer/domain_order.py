"""`order=similar`: samples of the texts are embedded by TF-IDF before a run; their similarity is cached."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from cpt.core.cache import artifact_damage, make_once
from cpt.core.config import digest
from cpt.core.randomness import key, shuffle
from cpt.data import orders
from cpt.data.sources.base import EXAMPLES, GENERAL, Source, read_example, stamp_of
from cpt.trainer.plan import Plan

if TYPE_CHECKING:
    from cpt.data.corpora import Corpora

log = logging.getLogger(__name__)
CACHE_FORMAT = 2  # raise it when the same texts give another similarity
CHARACTERS_READ = 20_000  # of a document, at most


def order_domains(plan: Plan) -> Plan:
    """The plan with its domains in order. Texts that decide it are read and embedded, unless the cache has
    their similarity. Raises ValueError for a plan that cannot be run, before any text is read."""
    if not plan.is_ordered_by_texts:
        return plan
    if (known := load_cached_order(plan)) is None:
        from cpt.trainer import build, check_model  # load torch

        check_model.check_model(plan)  # before hours of reading
        make_once(
            similarity_folder(plan),
            make=lambda folder: write_similarity(folder, plan.source, build.read_corpora(plan)),
        )
        known = load_cached_order(plan)
        assert known is not None
    log.info("Ordering domains (order=%s): from %s to %s", plan.run.order, known.order[0], known.order[-1])
    return known


def load_cached_order(plan: Plan) -> Plan | None:
    """The plan with its domains in order; None if that takes reading the texts."""
    if not plan.is_ordered_by_texts:
        return plan
    folder = similarity_folder(plan)
    if artifact_damage(folder):  # make_once makes it again
        return None
    stored = json.loads((folder / "similarity.json").read_text(encoding="utf-8"))
    similarity = orders.Similarity.load(stored)
    return replace(plan, order=orders.arrange_domains(plan.run.order, similarity), similarity=similarity)


def similarity_folder(plan: Plan) -> Path:
    """The cache entry: a hash of the names, sizes and times of the texts."""
    texts = {name: stamp_of(plan.source, name) for name in (*sorted(plan.order), GENERAL)}
    made_of = [CACHE_FORMAT, texts, plan.source.embedding_samples]
    return Path(plan.run.cache_dir) / "similarity" / digest(made_of)


def write_similarity(folder: Path, source: Source, corpora: Corpora) -> None:
    """Embeds a deterministic sample of the training documents of each text, of examples the questions, and
    writes the similarity."""
    most = source.embedding_samples
    log.info("Embedding samples of %d texts", len(corpora.by_name))

    def sample(name: str) -> Iterator[list[str]]:
        documents, has_examples = corpora.by_name[name].documents("train"), source.form(name) == EXAMPLES
        drawn = shuffle(np.arange(min(most, len(documents))), len(documents), stream=key("embedding", name))
        for few in documents.select(np.sort(drawn)).iter(batch_size=16):
            read = [read_example(text).question if has_examples else text for text in few["text"]]
            yield [text[:CHARACTERS_READ] for text in read]

    means = orders.embed_by_words({name: sample(name) for name in corpora.by_name})
    similarity = orders.Similarity.of(means, general=means.pop(GENERAL))
    (folder / "similarity.json").write_text(
        json.dumps(similarity.to_json(similarity.names)), encoding="utf-8"
    )
