"""Tasks by a bag of words, the reference that pre-trained weights must beat:
`python benchmarks/studies/bag_of_words.py EXPERIMENT --root FOLDER` writes results/studies/bag_of_words.json.

Logistic regression on tf-idf of single words, on the same examples as the experiment's downstream tasks, or
its supervised tasks. The penalty is chosen by five folds of train; the score is each task's own metric on
test."""

import argparse
import json
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from hydra import compose, initialize_config_dir
from omegaconf import DictConfig
from study import SCORES
from torch import Tensor

import cpt.core.naming  # noqa: F401  (registers the resolvers)
from cpt.core.config import CONF
from cpt.data.corpora import Corpora
from cpt.data.sources.examples import read_example
from cpt.evaluation.finetune import score_predictions
from cpt.evaluation.finetune_tasks import LabelledExample, plan_endtasks
from cpt.trainer.plan import make_plan

FILE = SCORES / "bag_of_words.json"
PENALTIES = (0.1, 1.0, 10.0, 100.0)  # weights of the losses against half the squared weights
FOLDS = 5
Labelled = Sequence[tuple[str, str]]  # texts with their labels


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("experiment")
    parser.add_argument("--root", required=True, help="the data, as for the study")
    options = parser.parse_args()
    torch.set_num_threads(1)
    with initialize_config_dir(str(CONF), version_base="1.3"):
        cfg = compose("config", [f"experiment={options.experiment}", f"domains.root={options.root}"])
    scores = {}
    for name, metric, train, test in read_tasks(cfg):
        scores[name] = score(train, test, metric=metric)
        print(f"{name}: {metric} {scores[name]:.3f} of {len(train)} examples")
    stored_scores = json.loads(FILE.read_text(encoding="utf-8")) if FILE.exists() else {}
    FILE.write_text(
        json.dumps(stored_scores | {options.experiment: scores}, indent=1) + "\n", encoding="utf-8"
    )


def read_tasks(cfg: DictConfig) -> Iterator[tuple[str, str, Labelled, Labelled]]:
    """Name, metric, training and test examples of each downstream task, or of each supervised task."""

    def pairs(examples: Sequence[LabelledExample]) -> Labelled:
        return [(f"{example.text} {example.text_pair or ''}", example.label) for example in examples]

    def answered(documents: Sequence[str]) -> Labelled:
        examples = [read_example(document) for document in documents]
        return [(example.source[slice(*example.text_span)], example.target) for example in examples]

    order = cfg.domains.orders[cfg.order] if isinstance(cfg.order, int) and cfg.domains.orders else cfg.order
    endtasks = plan_endtasks(cfg.endtask, None, order)
    if endtasks:
        for name in endtasks.tasks:
            task = endtasks.source.task(name)
            yield name, task.settings.metric, pairs(task.train), pairs(task.test)
        return
    plan = make_plan(cfg)
    corpora = Corpora.read(plan.source, plan.order, cache=Path(plan.run.cache_dir))
    for name in plan.order:
        splits = ("train", plan.source.score_on)
        train, test = (corpora.by_name[name].documents(split)["text"] for split in splits)
        yield name, "accuracy", answered(train), answered(test)


def score(train: Labelled, test: Labelled, *, metric: str) -> float:
    """The metric on test of a logistic regression on train, with the penalty that is best in five folds."""
    words = [Counter(split_words(text)) for text, _ in train]
    num_documents: Counter[str] = Counter()
    for document_words in words:
        num_documents.update(document_words.keys())
    columns = {word: column for column, word in enumerate(sorted(num_documents))}
    idf = np.array([np.log((1 + len(words)) / (1 + num_documents[word])) + 1 for word in columns])

    def vectors(examples: Labelled) -> Tensor:
        counts = np.zeros((len(examples), len(columns)))
        for row, (text, _) in enumerate(examples):
            for word, count in Counter(split_words(text)).items():
                if word in columns:
                    counts[row, columns[word]] = count
        weighted = counts * idf
        return torch.tensor(weighted / np.maximum(np.linalg.norm(weighted, axis=1, keepdims=True), 1e-9))

    class_names = sorted({label for _, label in train})
    classes = {name: number for number, name in enumerate(class_names)}
    features = vectors(train)
    labels = torch.tensor([classes[label] for _, label in train])
    folds = torch.from_numpy(np.random.default_rng(0).permutation(len(labels)) % FOLDS)

    def validate(inverse: float) -> float:
        predictions = torch.empty_like(labels)
        for fold in range(FOLDS):
            weights = fit(features[folds != fold], labels[folds != fold], len(classes), inverse)
            predictions[folds == fold] = predict(weights, features[folds == fold])
        return score_predictions(predictions, labels, len(classes))[metric]

    weights = fit(features, labels, len(classes), max(PENALTIES, key=validate))
    truth = torch.tensor([classes[label] for _, label in test])
    return score_predictions(predict(weights, vectors(test)), truth, len(classes))[metric]


def split_words(text: str) -> list[str]:
    return re.findall(r"\w+", text.lower())


def fit(features: Tensor, labels: Tensor, classes: int, inverse: float) -> Tensor:
    """Weights of a logistic regression, with a bias in the last row: [words + 1, classes]."""
    weights = torch.zeros(features.shape[1] + 1, classes, dtype=features.dtype, requires_grad=True)
    optimizer = torch.optim.LBFGS([weights], max_iter=100, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        optimizer.zero_grad()
        logits = features @ weights[:-1] + weights[-1]
        errors = torch.nn.functional.cross_entropy(logits, labels, reduction="sum")
        loss = 0.5 * weights[:-1].square().sum() + inverse * errors
        loss.backward()
        return loss

    optimizer.step(closure)
    return weights.detach()


def predict(weights: Tensor, features: Tensor) -> Tensor:
    return (features @ weights[:-1] + weights[-1]).argmax(1)


if __name__ == "__main__":
    main()
