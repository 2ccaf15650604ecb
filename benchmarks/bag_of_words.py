"""A bag of words as a task's classifier: what a model of the text that knows no order of words reaches.

Logistic regression on tf-idf weights of lower-cased words, of the examples that a run learns and is asked."""

import re
from collections import Counter
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from cpt.data.example import Example

WORD = re.compile(r"\w+")
DECAY = 1e-4  # half of it is the weight of the squares
ROUNDS = 200


def text_of(example: Example) -> set[str]:
    """The words of the part of a question that it is about."""
    begin, end = example.text
    return set(WORD.findall(example.source[begin:end].lower()))


def weigh_words(examples: Sequence[Example], vocabulary: dict[str, float]) -> Tensor:
    """tf-idf rows of unit length, [examples, words]; `vocabulary`: the weight of each word."""
    places = {word: place for place, word in enumerate(vocabulary)}
    rows = torch.zeros(len(examples), len(places))
    for number, example in enumerate(examples):
        for word in text_of(example) & places.keys():
            rows[number, places[word]] = vocabulary[word]
    return F.normalize(rows)


def classify(train: Sequence[Example], test: Sequence[Example]) -> float:
    """The accuracy on the test examples after learning from the others, 0 to 1."""
    counts = Counter(word for example in train for word in text_of(example))
    idf = {word: float(torch.tensor(len(train) / n).log()) for word, n in counts.items() if n > 1}
    labels = {label: number for number, label in enumerate(sorted({each.target for each in train}))}
    inputs, targets = weigh_words(train, idf), torch.tensor([labels[each.target] for each in train])
    weights = torch.zeros(len(idf), len(labels), requires_grad=True)
    optimizer = torch.optim.LBFGS([weights], max_iter=ROUNDS)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(inputs @ weights, targets) + DECAY * weights.square().sum()
        loss.backward()
        return loss

    optimizer.step(closure)
    with torch.no_grad():
        guessed = (weigh_words(test, idf) @ weights).argmax(1).tolist()
    names = list(labels)
    return sum(names[guess] == each.target for guess, each in zip(guessed, test, strict=True)) / len(test)
