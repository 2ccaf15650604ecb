"""`order=similar`: the texts are read and embedded before a run, and their similarity is cached."""

import json
import logging
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from functools import partial
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from cpt.core.cache import make_once
from cpt.core.config import digest
from cpt.core.randomness import key, shuffle
from cpt.data import orders
from cpt.data.example import read_example
from cpt.data.sources.base import EXAMPLES, GENERAL, stamp_of
from cpt.trainer.manifest import checkpoint_files, file_stat
from cpt.trainer.plan import Plan

log = logging.getLogger(__name__)
CACHE_FORMAT = 1  # raise it when the same texts give another similarity
CHARACTERS_READ = 20_000  # of a document, at most
MODEL_BATCH = 32  # documents
Encode = Callable[[list[str]], np.ndarray]  # the vectors of documents, [B, D]


def order_domains(plan: Plan) -> Plan:
    """The plan with its domains in order. Texts that decide it are read and embedded, unless the cache has
    their similarity. Raises ValueError for a plan that cannot be run, before any text is read."""
    order, name = plan.run.order, plan.source.embedding
    if not plan.by_texts:
        if name != "tfidf":
            log.info("domains.embedding=%s has no effect: order=%s ignores similarity", name, order)
        return plan
    if (known := load_cached_order(plan)) is None:
        from cpt.trainer import preflight  # loads torch

        preflight.check_model(plan)  # before hours of reading
        make_once(similarity_folder(plan), make=partial(write_similarity, plan=plan))
        known = load_cached_order(plan)
        assert known is not None
    log.info("order=%s by %s: from %s to %s", order, name, known.order[0], known.order[-1])
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
    if source.embedding == "static":
        embedder = metadata.version("wordllama")
    elif source.embedding == "sentence":
        files = sorted(path for path in Path(str(source.embedding_model)).rglob("*") if path.is_file())
        embedder = [source.embedding_model, {str(path): file_stat(path) for path in files}]
    elif source.embedding == "model":
        given = checkpoint_files(plan.model.checkpoint) if plan.model.checkpoint else {}
        embedder = [asdict(plan.model), {name: file_stat(path) for name, path in given.items()}]
    texts = {name: stamp_of(source, name) for name in (*sorted(plan.order), GENERAL)}
    made_of = [CACHE_FORMAT, texts, source.embedding, source.embedding_samples, embedder]
    return Path(plan.run.cache_dir) / "similarity" / digest(made_of)


def write_similarity(folder: Path, plan: Plan) -> None:
    """Reads and embeds the texts of a plan, and writes their similarity."""
    from cpt.data.corpora import Corpora  # loads torch

    source, kind = plan.source, plan.source.embedding
    corpora = Corpora.read(source, plan.order, cache=Path(plan.run.cache_dir), workers=plan.data.workers)
    log.info("Embedding samples of %d texts (domains.embedding=%s)", len(corpora.by_name), kind)
    texts = {
        name: sample_documents(corpus, name, form=source.form(name), most=source.embedding_samples)
        for name, corpus in corpora.by_name.items()
    }
    if kind == "tfidf":
        means = orders.embed_by_words(texts)
    else:
        encode = static_encoder() if kind == "static" else None
        if kind == "sentence":
            from sentence_transformers import SentenceTransformer

            place = str(source.embedding_model)
            model = SentenceTransformer(place, local_files_only=True, trust_remote_code=False)
            encode = partial(model.encode, show_progress_bar=False, convert_to_numpy=True)
        means = orders.embed_by_vectors(texts, encode or model_encoder(plan, corpora))
    similarity = orders.Similarity.of(means, general=means.pop(GENERAL))
    (folder / "similarity.json").write_text(json.dumps(similarity.tell(similarity.names)), encoding="utf-8")


def sample_documents(corpus: Any, name: str, *, form: str, most: int) -> Iterator[list[str]]:
    """A deterministic sample of the training documents of a corpus, in batches; of examples the questions."""
    from cpt.data.corpus import in_batches  # loads datasets

    documents = corpus.documents("train")
    drawn = shuffle(np.arange(min(most, len(documents))), len(documents), stream=key("embedding", name))
    for texts in in_batches(documents.select(np.sort(drawn))):
        read = [read_example(text).question if form == EXAMPLES else text for text in texts]
        yield [text[:CHARACTERS_READ] for text in read]


def static_encoder() -> Encode:
    """A document is the mean of its tokens' rows of the table in the package wordllama, [256]. The package is
    not imported, as its loader looks for the tokenizer on the network."""
    from safetensors.numpy import load_file
    from tokenizers import Tokenizer

    package: Any = find_spec("wordllama")
    place = Path(package.submodule_search_locations[0])
    (table,) = load_file(min(place.glob("weights/*_256.safetensors"))).values()
    tokenizer = Tokenizer.from_file(str(min(place.glob("tokenizers/*.json"))))

    def encode(documents: list[str]) -> np.ndarray:
        rows = [each.ids for each in tokenizer.encode_batch(documents, add_special_tokens=False)]
        return np.stack([table[ids].astype(np.float32).sum(0) / max(1, len(ids)) for ids in rows])

    return encode


def model_encoder(plan: Plan, corpora: Any) -> Encode:
    """A document is the mean of the base model's last hidden states (of an encoder-decoder's encoder) over
    its first tokens, at most model.length."""
    import torch
    from torch.nn.utils.rnn import pad_sequence

    from cpt.data.packing import padding_id
    from cpt.models.forward import hidden_states, mean_over
    from cpt.trainer.base_model import make_base
    from cpt.trainer.lightning import try_trainer

    base = make_base(plan.model, corpora, accelerator=plan.trainer.accelerator)
    device = try_trainer(plan.trainer.lightning).strategy.root_device
    model, pad = base.model().eval().to(device), padding_id(base.tokenizer)

    @torch.inference_mode()
    def encode(documents: list[str]) -> np.ndarray:
        encoded = base.tokenizer(documents, truncation=True, max_length=base.length, verbose=False)
        rows, means = [torch.tensor(row or [pad]) for row in encoded["input_ids"]], []
        for at in range(0, len(rows), MODEL_BATCH):
            batch = rows[at : at + MODEL_BATCH]
            ids = pad_sequence(batch, batch_first=True, padding_value=pad).to(device)
            present = pad_sequence([torch.ones_like(row) for row in batch], batch_first=True).to(device)
            hidden = hidden_states(model, {"input_ids": ids, "attention_mask": present})
            means.append(mean_over(hidden, present).float().cpu().numpy())
        return np.concatenate(means)

    return encode
