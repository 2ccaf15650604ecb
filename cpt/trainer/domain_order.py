"""`order=similar`: the texts are read and embedded before a run, and their similarity is cached."""

import json
import logging
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

from cpt.core.cache import make_once
from cpt.core.config import digest
from cpt.data import orders
from cpt.data.sources.base import GENERAL, stamp_of
from cpt.trainer.plan import Plan
from cpt.trainer.run_dir import checkpoint_files, file_stat

log = logging.getLogger(__name__)
CACHE_FORMAT = 1  # raise it when the same texts give another similarity


def order_domains(plan: Plan) -> Plan:
    """The plan with its domains in order. Texts that decide it are read and embedded, unless the cache has
    their similarity. Raises ValueError for a plan that cannot be run, before any text is read."""
    order, name = plan.run.order, plan.source.embedding
    if not plan.by_texts:
        if name != "tfidf":
            log.info("No effect of domains.embedding=%s: order=%s ignores similarity", name, order)
        return plan
    if (known := load_cached_order(plan)) is None:
        from cpt.trainer import similarity  # loads torch

        similarity.check_model(plan)  # before hours of reading
        make_once(similarity_folder(plan), make=partial(similarity.write_similarity, plan=plan))
        known = load_cached_order(plan)
        assert known is not None
    log.info("Ordering domains (order=%s by %s): from %s to %s", order, name, known.order[0], known.order[-1])
    return known


def load_cached_order(plan: Plan) -> Plan | None:
    """The plan with its domains in order; None if that takes reading the texts."""
    if not plan.by_texts:
        return plan
    path = similarity_folder(plan) / "similarity.json"
    if not path.exists():
        return None
    similarity = orders.Similarity.load(json.loads(path.read_text(encoding="utf-8")))
    return replace(plan, order=orders.arrange_domains(plan.run.order, similarity), similarity=similarity)


def similarity_folder(plan: Plan) -> Path:
    """The cache entry: a hash of the texts and of what embeds them, by names, sizes and times."""
    source = plan.source
    embedder: Any = None
    if source.embedding == "model":
        given = checkpoint_files(plan.model.name_or_path) if plan.model.name_or_path else {}
        embedder = [asdict(plan.model), {name: file_stat(path) for name, path in given.items()}]
    texts = {name: stamp_of(source, name) for name in (*sorted(plan.order), GENERAL)}
    made_of = [CACHE_FORMAT, texts, source.embedding, source.embedding_samples, embedder]
    return Path(plan.run.cache_dir) / "similarity" / digest(made_of)
