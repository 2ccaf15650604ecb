"""Made-up scores of a run, for what is logged of it."""

from cpt.evaluation.scores import Scores


def scores(*, domains=("law", "food"), finished=True, endtasks=True, **run):
    """A run of made-up numbers over these domains: loss 4 at first, 3 when learned, 3.3 after that."""
    texts = [*domains, "general"]
    keys = {"name": "first", "method": "das", "mask": "none", "replay": "none", "variant": ""}
    keys |= {"model": "tiny", "order": list(domains), "seed": 0, "finished": finished, "objective": "mlm"}
    made = Scores(
        domains=texts,
        tokens=[100 + i for i in range(len(texts))],
        bytes=[400 + i for i in range(len(texts))],
        scored=[10] * len(texts),
        run=keys | run,
        texts={text: {"hash": f"d{text}", "documents": {"train": 3}} for text in texts},
        config_hash="c0",
        versions={"torch": "2"},
    )
    for row, name in enumerate(["base", *domains]):
        nll = [3.0 if d + 1 == row else 3.3 if d + 1 < row else 4.0 for d in range(len(domains))]
        nll.append(4.0 + row)
        parts = {text: {"base": 0.25, domains[0]: 0.75} for text in texts} if row else None
        costs = {"seen": 100, "flops": 10**12, "memory": 5 + row, "trained": 7, "stored": 8 * row}
        costs = costs if row else {}
        costs |= {"protected_movement": [0.25, 0.5]} if row == 2 else {}
        made.append(name, nll=nll, modules=parts, **costs)
    made.measure()
    made.metrics["LC"]["interval"] = {"nats": [3.0, 3.5]}
    made.phases = {"start": {"read the texts": 2.0}, "learn": dict.fromkeys(domains, 10.0)}
    made.phases |= {"score": {domains[0]: 0.5}}
    if endtasks:
        made.endtasks = examined(list(domains))
    return made


def examined(tasks):
    """End tasks after their own stage and all later ones: macro-F1 0.6, the rest 0.8, and then 0.1 less."""

    def cube(score):
        blank = [None, None]
        later = [[[score - 0.1 * (row > task + 1)] * 2 if task < row else blank for task in range(len(tasks))]
                 for row in range(1, len(tasks) + 1)]  # fmt: skip
        return [[blank] * len(tasks), *later]

    kinds = {"macro_f1": cube(0.6), "micro_f1": cube(0.8), "accuracy": cube(0.8)}
    about = {"metric": dict.fromkeys(tasks, "macro_f1"), "classes": dict.fromkeys(tasks, 2)}
    sizes = {"examples": dict.fromkeys(tasks, 50), "seconds": 9.0}
    return {"when": "each", "tasks": tasks, "seeds": [3, 5], "hash": "e", **about, **sizes, "scores": kinds}
