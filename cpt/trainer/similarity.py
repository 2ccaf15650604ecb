"""The similarity of the domains' texts, for `order=similar`: a sample of each is embedded."""

import json
import logging
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence

from cpt.core.randomness import key, shuffle
from cpt.data import orders
from cpt.data.corpora import Corpora
from cpt.data.corpus import Corpus, in_batches
from cpt.data.packing import padding_id
from cpt.data.sources.base import EXAMPLES, GENERAL, read_example
from cpt.models.forward import hidden_states, mean_over
from cpt.trainer.base_model import make_base
from cpt.trainer.build import read_corpora
from cpt.trainer.lightning import try_trainer
from cpt.trainer.plan import Plan
from cpt.trainer.preflight import check_model  # noqa: F401  (for cpt.trainer.domain_order)

log = logging.getLogger(__name__)
CHARACTERS_READ = 20_000  # of a document, at most
MODEL_BATCH = 32  # documents
Encode = Callable[[list[str]], np.ndarray]  # the vectors of documents, [B, D]


def write_similarity(folder: Path, plan: Plan) -> None:
    """Reads and embeds the texts of a plan, and writes their similarity."""
    source, kind = plan.source, plan.source.embedding
    corpora = read_corpora(plan)
    log.info("Embedding samples of %d texts (domains.embedding=%s)", len(corpora.by_name), kind)
    texts = {
        name: sample_documents(corpus, name, form=source.form(name), most=source.embedding_samples)
        for name, corpus in corpora.by_name.items()
    }
    if kind == "tfidf":
        means = orders.embed_by_words(texts)
    else:
        means = orders.embed_by_vectors(texts, model_encoder(plan, corpora))
    similarity = orders.Similarity.of(means, general=means.pop(GENERAL))
    (folder / "similarity.json").write_text(json.dumps(similarity.tell(similarity.names)), encoding="utf-8")


def sample_documents(corpus: Corpus, name: str, *, form: str, most: int) -> Iterator[list[str]]:
    """A deterministic sample of the training documents of a corpus, in batches; of examples the questions."""
    documents = corpus.documents("train")
    drawn = shuffle(np.arange(min(most, len(documents))), len(documents), stream=key("embedding", name))
    for texts in in_batches(documents.select(np.sort(drawn))):
        read = [read_example(text).question if form == EXAMPLES else text for text in texts]
        yield [text[:CHARACTERS_READ] for text in read]


def model_encoder(plan: Plan, corpora: Corpora) -> Encode:
    """A document is the mean of the base model's last hidden states (of an encoder-decoder's encoder) over
    its first tokens, at most model.max_seq_length."""
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
