"""Orders that the texts decide: the domains' texts are read, embedded and compared before a run begins.

The similarity is kept in the cache, known by the texts' stamps and by what embeds them, so that a second
start has the order at once."""

from __future__ import annotations

import json
import logging
from dataclasses import asdict, replace
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from cpt.core.cache import make_once
from cpt.core.config import digest
from cpt.data.orders import arrange_domains
from cpt.data.similarity import Similarity
from cpt.data.sources.base import GENERAL, stamp_of
from cpt.training.identity import checkpoint_files, look
from cpt.training.plan import Plan

if TYPE_CHECKING:
    from cpt.data.corpora import Corpora
    from cpt.data.embeddings import Encode

log = logging.getLogger(__name__)
FORMAT = 1  # raise it when other numbers are made of the same texts
FILE = "similarity.json"
ROWS = 32  # documents that a model embeds at once


def arrange(plan: Plan) -> Plan:
    """The plan with its domains in order; where their texts decide it, these are read and embedded unless the
    cache knows the order. Raises ValueError for a plan that cannot be run, before any text is read."""
    if not plan.by_texts:
        tell_unused(plan)
        return plan
    known = recall(plan)
    if known is None:
        from cpt.training import preflight

        preflight.check_model(plan)  # before hours of reading
        make_once(folder_of(plan), make=lambda partial: write_similarity(partial, plan))
        known = recall(plan)
        assert known is not None
    tell_order(known)
    return known


def recall(plan: Plan) -> Plan | None:
    """The plan with its domains in order, as far as that is known without reading; None where it is not."""
    if not plan.by_texts:
        return plan
    path = folder_of(plan) / FILE
    if not path.exists():
        return None
    similarity = Similarity.load(json.loads(path.read_text(encoding="utf-8")))
    return replace(plan, order=arrange_domains(plan.run.order, similarity), similarity=similarity)


def tell_unused(plan: Plan) -> None:
    if plan.source.embedding != "tfidf":
        log.info(
            "domains.embedding=%s without effect: order=%s does not ask how similar texts are",
            plan.source.embedding,
            plan.run.order,
        )


def tell_order(plan: Plan) -> None:
    told = plan.similarity.tell(plan.order)
    neighbours, pairs = mean_similarities(np.array(told["matrix"]))
    log.info(
        "order=%s by %s: from %s to %s; similarity %.2f of neighbours, %.2f of any two",
        plan.run.order,
        plan.source.embedding,
        plan.order[0],
        plan.order[-1],
        neighbours,
        pairs,
    )


def mean_similarities(matrix: np.ndarray) -> tuple[float, float]:
    """Mean similarity of domains learned one after another, and of any two; 0 of a single one."""
    if len(matrix) < 2:
        return 0.0, 0.0
    return float(np.diagonal(matrix, 1).mean()), float(matrix[~np.eye(len(matrix), dtype=bool)].mean())


def folder_of(plan: Plan) -> Path:
    """Where the similarity of a plan's texts is kept."""
    texts = {name: stamp_of(plan.source, name) for name in (*sorted(plan.order), GENERAL)}
    made_of = [FORMAT, texts, plan.source.embedding, plan.source.embedding_samples, known_by(plan)]
    return Path(plan.run.cache_dir) / "similarity" / digest(made_of)


def known_by(plan: Plan) -> Any:
    """What embeds texts, as far as names, sizes and times tell."""
    source = plan.source
    if source.embedding == "static":
        return metadata.version("wordllama")
    if source.embedding == "sentence":
        files = sorted(path for path in Path(str(source.embedding_model)).rglob("*") if path.is_file())
        return [source.embedding_model, {str(path): look(path) for path in files}]
    if source.embedding == "model":
        given = checkpoint_files(plan.model.checkpoint) if plan.model.checkpoint else {}
        return [asdict(plan.model), {name: look(path) for name, path in given.items()}]
    return None


def write_similarity(folder: Path, plan: Plan) -> None:
    """Reads the texts of a plan, and writes how alike they are into a folder."""
    from cpt.data.corpora import Corpora
    from cpt.data.embeddings import embed_by_vectors, embed_by_words, make_encoder, sample_documents

    corpora = Corpora.read(plan.source, plan.order, cache=Path(plan.run.cache_dir), workers=plan.data.workers)
    log.info(
        "embedding samples of %d texts (domains.embedding=%s)", len(corpora.by_name), plan.source.embedding
    )
    most = plan.source.embedding_samples
    texts = {
        name: sample_documents(corpus, name, form=plan.source.form(name), most=most)
        for name, corpus in corpora.by_name.items()
    }
    if plan.source.embedding == "tfidf":
        means = embed_by_words(texts)
    else:
        encode = (
            encode_by_model(plan, corpora) if plan.source.embedding == "model" else make_encoder(plan.source)
        )
        means = embed_by_vectors(texts, encode)
    general = means.pop(GENERAL)
    similarity = Similarity.of(means, general=general)
    (folder / FILE).write_text(json.dumps(similarity.tell(similarity.names)), encoding="utf-8")


def encode_by_model(plan: Plan, corpora: Corpora) -> Encode:
    """A document is the mean of the base model's last hidden states (with two stacks, of the encoder's) of
    its first tokens, as many as a row has."""
    import torch

    from cpt.data.packing import padding_id
    from cpt.models.forward import hidden_states, mean_over
    from cpt.training.pretraining import make_base
    from cpt.training.readiness import find_device

    base = make_base(plan.model, corpora, accelerator=plan.trainer.accelerator)
    device = find_device(plan.trainer)
    model, pad = base.model().eval().to(device), padding_id(base.tokenizer)

    @torch.inference_mode()
    def embed(rows: list[list[int]]) -> np.ndarray:
        width = max(map(len, rows))
        ids = torch.tensor([row + [pad] * (width - len(row)) for row in rows], device=device)
        present = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in rows], device=device)
        hidden = hidden_states(model, {"input_ids": ids, "attention_mask": present})
        return mean_over(hidden, present).float().cpu().numpy()

    def encode(documents: list[str]) -> np.ndarray:
        encoded = base.tokenizer(documents, truncation=True, max_length=base.length, verbose=False)[
            "input_ids"
        ]
        rows = [row or [pad] for row in encoded]
        return np.concatenate([embed(rows[at : at + ROWS]) for at in range(0, len(rows), ROWS)])

    return encode
