"""Downstream tasks by a bag of words, the reference that pre-trained weights must beat:
`python benchmarks/bag_of_words.py EXPERIMENT --root FOLDER` writes results/studies/bag_of_words.json.

Logistic regression on tf-idf of single words, on the same sampled examples as the experiment's tasks. Its
penalty is chosen by five folds of train; the score is each task's own metric on test."""

import argparse
import json
import re
from collections import Counter
from collections.abc import Sequence

import numpy as np
import torch
from hydra import compose, initialize_config_dir
from study import SCORES
from torch import Tensor

import cpt.core.naming  # noqa: F401  (registers the resolvers)
from cpt.core.config import CONF
from cpt.evaluation.finetune import scores_of
from cpt.evaluation.finetune_tasks import FinetuneTask, LabelledExample, plan_endtasks

FILE = SCORES / "bag_of_words.json"
PENALTIES = (0.1, 1.0, 10.0, 100.0)  # weights of the losses against half the squared weights
FOLDS = 5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("experiment")
    parser.add_argument("--root", required=True, help="the data, as for the study")
    options = parser.parse_args()
    torch.set_num_threads(1)
    with initialize_config_dir(str(CONF), version_base="1.3"):
        cfg = compose("config", [f"experiment={options.experiment}", f"domains.root={options.root}"])
    order = cfg.domains.orders[0] if cfg.domains.get("orders") else cfg.order
    plan = plan_endtasks(cfg.endtask, None, order)
    assert plan is not None, f"experiment={options.experiment} has no end tasks"
    found = {}
    for name in plan.tasks:
        task = plan.task(name)
        found[name] = score(task)
        print(f"{name}: {task.settings.metric} {found[name]:.3f} of {len(task.train)} examples")
    known = json.loads(FILE.read_text(encoding="utf-8")) if FILE.exists() else {}
    FILE.write_text(json.dumps(known | {options.experiment: found}, indent=1) + "\n", encoding="utf-8")


def score(task: FinetuneTask) -> float:
    """The task's own metric on test."""
    words = [Counter(split_words(example)) for example in task.train]
    documents = Counter(word for each in words for word in each)
    places = {word: place for place, word in enumerate(sorted(documents))}
    idf = np.array([np.log((1 + len(words)) / (1 + documents[word])) + 1 for word in places])

    def vectors(examples: Sequence[LabelledExample]) -> Tensor:
        counts = np.zeros((len(examples), len(places)))
        for row, example in enumerate(examples):
            for word, count in Counter(split_words(example)).items():
                if word in places:
                    counts[row, places[word]] = count
        weighted = counts * idf
        return torch.tensor(weighted / np.maximum(np.linalg.norm(weighted, axis=1, keepdims=True), 1e-9))

    classes = {name: number for number, name in enumerate(task.classes)}
    features, labels = vectors(task.train), torch.tensor([classes[each.label] for each in task.train])
    folds = torch.from_numpy(np.random.default_rng(0).permutation(len(labels)) % FOLDS)

    def validate(inverse: float) -> float:
        predictions = torch.empty_like(labels)
        for fold in range(FOLDS):
            weights = fit(features[folds != fold], labels[folds != fold], len(classes), inverse)
            predictions[folds == fold] = predict(weights, features[folds == fold])
        return scores_of(predictions, labels, len(classes))[task.settings.metric]

    weights = fit(features, labels, len(classes), max(PENALTIES, key=validate))
    truth = torch.tensor([classes[each.label] for each in task.test])
    return scores_of(predict(weights, vectors(task.test)), truth, len(classes))[task.settings.metric]


def split_words(example: LabelledExample) -> list[str]:
    return re.findall(r"\w+", f"{example.text} {example.text_pair or ''}".lower())


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
