"""An exported task, measured by the lm-evaluation-harness itself: our ranked accuracy, example by example."""

import json
from copy import deepcopy
from dataclasses import replace

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, T5Config, T5ForConditionalGeneration

pytest.importorskip("lm_eval", reason="the extra: pip install -e '.[lm-eval]'")


from cpt.contrib.lm_eval_export.__main__ import export
from cpt.contrib.lm_eval_export.tasks import HarnessTexts, export_group, export_task
from cpt.evaluation.lm_eval import Harness, silence
from cpt.evaluation.options import LMEvalOptions
from cpt.evaluation.task_answers import Question, rank_choices, score_choices
from cpt.models.objectives import Causal, CausalAnswers, Seq2SeqAnswers
from cpt.trainer.plan import make_plan
from tests.contrib.test_export import prompts
from tests.evaluation.test_lm_eval_options import PLAIN
from tests.support.task_fixtures import STYLES, encoder, some_examples, write_tasks

COUNT, START = 40, 0
CHOICES = ("mu", "na", "pe", "so", "tu")  # of one length, so that not always the same is the likeliest
pytestmark = pytest.mark.slow  # the harness takes eight seconds to be read in


def questions(count, **given):
    """Questions with five choices, of which each is right in turn."""
    examples = some_examples(count, **given)
    return [
        replace(each, choices=CHOICES, target=CHOICES[number % len(CHOICES)])
        for number, each in enumerate(examples)
    ]


def causal(vocabulary):
    return GPT2LMHeadModel(
        GPT2Config(vocab_size=vocabulary, n_embd=32, n_layer=2, n_head=2, n_positions=256)
    ), CausalAnswers(Causal(), pad=0)


def seq2seq(vocabulary):
    sizes = {"d_model": 32, "d_kv": 16, "d_ff": 48, "num_layers": 2, "num_heads": 2}
    tokens = {"pad_token_id": 0, "eos_token_id": 2, "decoder_start_token_id": START}
    return T5ForConditionalGeneration(T5Config(vocab_size=vocabulary, **sizes, **tokens)), Seq2SeqAnswers(
        Causal(), pad=0, start=START
    )


def made(build, style, *, length=200):
    """A model whose answers differ, its objective and an encoder."""
    encoding = encoder(STYLES[style](), length=length, seq2seq=build is seq2seq)
    torch.manual_seed(5)
    model, objective = build(len(encoding.tokenizer))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(8)
    return model.eval(), objective, encoding


def ranked(model, objective, given):
    """The choices of ours, by example."""
    questions = [Question.of_prompt(prompt) for prompt in given]
    sums = score_choices(model, objective, questions, batch_size=7, step=lambda count: None)
    return rank_choices(questions, sums)[0]


def harness_samples(folder, model, encoding, *, task):
    """What the harness found of each example, called from outside."""
    from lm_eval import simple_evaluate
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    ends = encoding.frame[1] and not encoding.seq2seq
    with silence():
        found = simple_evaluate(
            model=HFLM(
                pretrained=model,
                tokenizer=deepcopy(encoding.tokenizer),
                backend="seq2seq" if encoding.seq2seq else "causal",
                batch_size=3,
                add_bos_token=False if ends else None,
            ),
            tasks=[task],
            task_manager=TaskManager(include_path=str(folder), include_defaults=False),
            bootstrap_iters=0,
        )
    return found["results"][task]["acc,none"], found["samples"][task]


def sums_of(sample):
    """The log-likelihoods of a sample's choices."""
    return [float(response[0]) for response in sample["filtered_resps"]]


@pytest.mark.parametrize(
    ("build", "style", "length"),
    [(causal, style, 200) for style in STYLES]
    + [(seq2seq, style, 200) for style in ("closed", "framed", "metaspace")]
    + [(causal, "opened", 60), (seq2seq, "closed", 40)],
)
def test_accuracy_is_ours_example_by_example(build, style, length, tmp_path):
    model, objective, encoding = made(build, style, length=length)
    examples = questions(COUNT, words=(1, 30))
    given = list(prompts(encoding, examples))
    exported = export_task(tmp_path, "TC", given, HarnessTexts(encoding))
    assert exported.differing == []
    ours = ranked(model, objective, given)
    accuracy, samples = harness_samples(tmp_path, model, encoding, task="cpt_TC")
    theirs = {}
    for sample in samples:
        sums = sums_of(sample)
        theirs[sample["doc"]["id"]] = (CHOICES[sums.index(max(sums))], sample["acc"])
    right = [choice == example.target for choice, example in zip(ours, examples, strict=True)]
    expected = {e.id: (choice, hit) for e, choice, hit in zip(examples, ours, right, strict=True)}
    assert theirs == expected and accuracy == sum(right) / COUNT
    assert len(set(ours)) > 1, "the answers differ"


def test_our_probe_of_all_tasks_is_their_mean(tmp_path):
    model, objective, encoding = made(causal, "framed")
    texts, done, accuracies = HarnessTexts(encoding), [], []
    for seed, count in enumerate((30, 10)):
        examples = questions(count, seed=seed)
        given = list(prompts(encoding, examples))
        done.append(export_task(tmp_path, f"t{seed}", given, texts))
        ours = ranked(model, objective, given)
        accuracies.append(sum(one == each.target for one, each in zip(ours, examples, strict=True)) / count)
    group = export_group(tmp_path, done)
    options = LMEvalOptions(**{**PLAIN, "tasks": (group, "cpt_t0"), "include": str(tmp_path)})
    harness, nothing = Harness(options), {"expect": lambda n: None, "step": lambda: None}
    whole, first = (
        harness.measure(name, model, encoding.tokenizer, **nothing)["metrics"]["acc"]["value"]
        for name in (group, "cpt_t0")
    )
    assert first == accuracies[0] != accuracies[1]
    assert whole == pytest.approx(sum(accuracies) / 2)


def test_a_run_s_tasks_are_exported_and_probed(small_gpt2, start, tmp_path):
    """What the matrix of scores says of a run, the probe says of it too."""
    root = write_tasks(tmp_path, ("food", "law"), train=60, test=24)
    given = ["domains=tasks", f"domains.root={root}", "order=[food,law]", "model.length=64"]
    given += ["answers.written=false", "optim.lr=0.01"]
    lines = export(make_plan(small_gpt2(*given)), tmp_path / "exported")
    assert lines[:2] == ["cpt_food: 24 examples", "cpt_law: 24 examples"]
    probe = ["probe=lm_eval", f"probe.include={tmp_path / 'exported'}"]
    probe += ["probe.tasks=[cpt_tasks,cpt_food,cpt_law]", "probe.when=each"]
    start(small_gpt2(*given, *probe), tmp_path / "run")
    scores = json.loads((tmp_path / "run" / "scores.json").read_text())
    answers, probes = scores["answers"], scores["probes"]["tasks"]
    for task in ("food", "law"):
        assert probes[f"cpt_{task}"]["values"] == answers["tasks"][task]["measures"]["accuracy_ranked"]
    assert probes["cpt_tasks"]["values"][-1] == pytest.approx(answers["metrics"]["AP"])
    assert probes["cpt_food"]["chance"] == answers["tasks"]["food"]["chance"]
