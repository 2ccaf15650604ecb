"""`python -m cpt.graft`: the sum by tensor and by token, what becomes of the vocabulary, and its row."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from cpt import graft
from cpt.evaluation.derived_rows import DerivedRow
from cpt.evaluation.scores import Scores
from cpt.models.residual import add_residual
from cpt.trainer.run_dir import RunDir
from tests.support.chat_decoder import TEMPLATE as CHAT_TEMPLATE
from tests.support.quantized_models import save_checkpoint

TEMPLATE = "{% for message in messages %}<turn>{{ message['content'] }}{% endfor %}"
EMBEDDING = "transformer.wte.weight"


def save_tuned(folder, base, *, tokens=(), seed=1, template=TEMPLATE):
    """A model trained from a base: other weights, further tokens, a chat template."""
    tokenizer = AutoTokenizer.from_pretrained(base)
    model = AutoModelForCausalLM.from_pretrained(base)
    if tokens:
        tokenizer.add_tokens(list(tokens), special_tokens=True)
        model.resize_token_embeddings(len(tokenizer), mean_resizing=False)
    tokenizer.chat_template = template
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.02 * torch.randn(parameter.shape, generator=generator))
    model.generation_config.max_new_tokens = 77
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def weights(folder):
    return load_file(folder / "model.safetensors")


@pytest.fixture
def base(tmp_path):
    return save_checkpoint(tmp_path / "base", "gpt2")


def plan_graft(tmp_path, base, tuned, *, run_tokens=(), weight=1.0):
    """Of a run whose model is trained from the base, with tokens of its own."""
    run = RunDir(tmp_path / "run")
    save_tuned(run.model, base, tokens=run_tokens, seed=2, template=None)
    return graft.Graft.plan(run, instruct=str(tuned), base=str(base), weight=weight)


def test_the_sum_by_tensor_has_its_row_on_the_page_and_leaves_the_run_whole(
    small_gpt2, start, tmp_path, monkeypatch, capsys
):
    run = tmp_path / "run"
    start(small_gpt2("order=[law,food]", "optim.lr=0.01", f"cache_dir={tmp_path / 'cache'}"), run)
    (base,) = (path.parent for path in (tmp_path / "cache" / "base").glob("*/config.json"))
    tuned = save_tuned(tmp_path / "tuned", base, template=CHAT_TEMPLATE)
    question, answer = [{"role": role, "content": f"the {role}"} for role in ("user", "assistant")]
    (tmp_path / "chats.jsonl").write_text(json.dumps({"messages": [question, answer]}) + "\n")
    monkeypatch.setattr("cpt.evaluation.chat_set.SHIPPED", tmp_path / "chats.jsonl")
    stored_scores = (run / "scores.json").read_bytes()
    scores = Scores.load(run / "scores.json")
    monkeypatch.setattr(graft, "MAX_SHARD_BYTES", 20_000)
    arguments = [str(run), "--instruct", str(tuned), "--base", str(base)]
    assert graft.main([*arguments, "--weight", "0.5"]) == 0
    assert "all three vocabularies are one" in capsys.readouterr().out

    folder = run / "graft"
    trained = weights(run / "model")
    tuned_weights = weights(tuned)
    base_weights = weights(base)
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) > 2
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in trained.values())
    model = AutoModelForCausalLM.from_pretrained(folder)
    for name, tensor in trained.items():
        expected = tensor + 0.5 * (tuned_weights[name] - base_weights[name])
        assert torch.equal(model.state_dict()[name], expected) and tensor.dtype == expected.dtype, name
    assert model.lm_head.weight is model.transformer.wte.weight  # tied, as the run's
    assert AutoTokenizer.from_pretrained(folder).chat_template == CHAT_TEMPLATE
    assert model.generation_config.max_new_tokens == 77

    row = DerivedRow.load(folder / "row.json")
    changes = [abs(loss - before) for loss, before in zip(row.nll, scores.nll[-1], strict=True)]
    assert row.domains == scores.domains and min(changes) > 0
    assert "0.5 x (tuned - " in row.description and row.description in (folder / "README.md").read_text()
    assert row.chats["chats"] == 1 and row.chats["rise"][0] == row.chats["nll"] - row.chats["tuned_nll"]
    assert "of 1 held-out chat" in (folder / "README.md").read_text()
    assert "Models made of this run" in (run / "report.md").read_text()
    assert (run / "scores.json").read_bytes() == stored_scores
    assert RunDir(run).find_damaged_outputs(full=True) == []

    # A start that was killed before it wrote the page is finished by the same command, and by no other.
    (run / "report.md").write_text("killed here")
    capsys.readouterr()
    assert graft.main([*arguments, "--weight", "0.5"]) == 0
    assert "made by an earlier start, and left as it is" in capsys.readouterr().out
    assert "Models made of this run" in (run / "report.md").read_text()
    assert RunDir(run).find_damaged_outputs(full=True) == []
    with pytest.raises(SystemExit):
        graft.main([*arguments, "--weight", "0.25"])
    assert f"--output={folder} is invalid: it exists" in capsys.readouterr().err
    namesake = shutil.copytree(tuned, tmp_path / "other" / "tuned")  # another model with the same name
    with pytest.raises(SystemExit):
        graft.main([str(run), "--instruct", str(namesake), "--base", str(base), "--weight", "0.5"])
    assert f"--output={folder} is invalid: it exists" in capsys.readouterr().err

    # Without weight it is the run's model, and is scored as the run has scored it.
    assert graft.main([*arguments, "--weight", "0", "--output", str(tmp_path / "none")]) == 0
    assert DerivedRow.load(tmp_path / "none" / "row.json").nll == scores.nll[-1]

    # With the run's own model as the base it is the tuned model.
    assert (
        graft.main(
            [
                str(run),
                "--instruct",
                str(tuned),
                "--base",
                str(run / "model"),
                "--output",
                str(tmp_path / "tuned_again"),
            ]
        )
        == 0
    )
    chats = DerivedRow.load(tmp_path / "tuned_again" / "row.json").chats
    assert chats["nll"] == pytest.approx(chats["tuned_nll"], abs=1e-5)


def test_close_weights_have_descriptions_of_their_own():
    descriptions = {graft.describe_graft("tuned", "base", weight=weight) for weight in (0.3, 0.3000001)}
    assert len(descriptions) == 2


def test_a_sum_is_computed_in_32_bits_and_keeps_the_type_of_the_run():
    run, base, tuned = (torch.tensor([value], dtype=torch.bfloat16) for value in (1.0, 256.0, 257.0))
    total = add_residual(run, base, tuned.float() + 0.5, 0.5)
    assert total.dtype == torch.bfloat16 and total.item() == 1.25


def test_tokens_that_the_tuned_model_alone_has_are_added_with_its_rows(tmp_path, base):
    tuned = save_tuned(tmp_path / "tuned", base, tokens=["<turn>", "<end>"])
    plan = plan_graft(tmp_path, base, tuned)
    (tmp_path / "graft").mkdir()
    plan.write(tmp_path / "graft")
    table = weights(tmp_path / "graft")[EMBEDDING]
    trained = weights(tmp_path / "run" / "model")[EMBEDDING]
    tuned_table = weights(tuned)[EMBEDDING]
    base_table = weights(base)[EMBEDDING]
    size = len(trained)
    assert torch.equal(table[:size], trained + 1.0 * (tuned_table[:size] - base_table))
    assert torch.equal(table[size:], tuned_table[size:]) and len(table) == size + 2
    assert f"{size} rows summed, 0 as in the run" in plan.describe_rows()
    assert "2 as in the tuned model" in plan.describe_rows()
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "graft").config.vocab_size == size + 2
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "graft")
    assert tokenizer.convert_tokens_to_ids("<end>") == size + 1 and tokenizer.chat_template == TEMPLATE


def test_rows_are_matched_by_token_and_not_by_id(tmp_path, base):
    """The run has words of its own where the tuned model has its control tokens; they share one word."""
    tuned = save_tuned(tmp_path / "tuned", base, tokens=["<turn>", "shared"])
    untuned = save_tuned(tmp_path / "untuned", base, tokens=["shared"], seed=3, template=None)
    plan = plan_graft(tmp_path, base, tuned, run_tokens=["law", "shared", "food"])
    plan = graft.Graft.plan(RunDir(tmp_path / "run"), instruct=str(tuned), base=str(untuned), weight=1.0)
    (tmp_path / "graft").mkdir()
    plan.write(tmp_path / "graft")

    table = weights(tmp_path / "graft")[EMBEDDING]
    trained = weights(tmp_path / "run" / "model")[EMBEDDING]
    tuned_table = weights(tuned)[EMBEDDING]
    base_table = weights(untuned)[EMBEDDING]
    size = len(base_table) - 1
    assert torch.equal(table[:size], trained[:size] + (tuned_table[:size] - base_table[:size]))
    assert torch.equal(table[size + 1], trained[size + 1] + (tuned_table[size + 1] - base_table[size]))
    assert torch.equal(table[[size, size + 2]], trained[[size, size + 2]])  # which the others lack

    assert f"{size + 1} rows summed, 2 as in the run" in plan.describe_rows()
    assert "1 token of the tuned model left out" in plan.describe_rows()
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "graft")
    assert "law" in tokenizer.get_vocab() and not tokenizer.chat_template
    assert "without the tuned model's chat template" in plan.describe_tokenizer()


def test_files_without_the_prefix_of_the_body_have_the_same_tensors(tmp_path, base):
    tuned = save_tuned(tmp_path / "tuned", base)
    expected = plan_graft(tmp_path, base, tuned)
    AutoModelForCausalLM.from_pretrained(base).transformer.save_pretrained(tmp_path / "body")
    AutoTokenizer.from_pretrained(base).save_pretrained(tmp_path / "body")
    assert EMBEDDING not in weights(tmp_path / "body")
    plan = graft.Graft.plan(
        RunDir(tmp_path / "run"), instruct=str(tuned), base=str(tmp_path / "body"), weight=1.0
    )
    for folder, planned in (("one", expected), ("other", plan)):
        (tmp_path / folder).mkdir()
        planned.write(tmp_path / folder)
    totals = weights(tmp_path / "other")
    assert all(torch.equal(totals[name], tensor) for name, tensor in weights(tmp_path / "one").items())


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.float8_e4m3fn])
def test_a_model_in_few_bits_is_refused_and_masks_of_attention_are_no_weights(dtype, tmp_path, base):
    tuned = save_tuned(tmp_path / "tuned", base)
    masks = {
        "transformer.h.0.attn.bias": torch.ones(1, 1, 4, 4, dtype=torch.uint8),
        "transformer.h.1.attn.bias": torch.ones(1, 1, 4, 4, dtype=torch.bool),
    }
    save_file(weights(base) | masks, base / "model.safetensors", metadata={"format": "pt"})
    assert plan_graft(tmp_path, base, tuned).weight == 1

    name = "transformer.h.0.mlp.c_fc.weight"
    narrow = {name: weights(base)[name].to(dtype)}
    save_file(weights(base) | narrow, base / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=f"--base=.* is invalid: {name} is stored in few bits"):
        plan_graft(tmp_path, base, tuned)


def test_models_that_do_not_go_together_are_refused_in_one_line(tmp_path, base, capsys):
    tuned = save_tuned(tmp_path / "tuned", base)
    untied = save_checkpoint(tmp_path / "untied", "gpt2", tie_word_embeddings=False)
    instruct_by_reason = {
        "it is a llama": save_checkpoint(tmp_path / "llama", "llama"),
        "is 384, in the run 192": save_checkpoint(tmp_path / "wide", "gpt2", n_embd=128),
        "lacks 1 tensor of it: lm_head.weight": untied,
    }
    for reason, instruct in instruct_by_reason.items():
        with pytest.raises(ValueError, match=reason):
            plan_graft(tmp_path, base, instruct)
    with pytest.raises(
        ValueError, match="--base=.* is invalid: --instruct has the same weights, so that noth"
    ):
        plan_graft(tmp_path, tuned, tuned)
    (tuned / "tokenizer.json").rename(tmp_path / "tokenizer.json")
    with pytest.raises(ValueError, match="--instruct=.*tuned is invalid: its tokenizer is not loaded: "):
        plan_graft(tmp_path, base, tuned)
    (tmp_path / "tokenizer.json").rename(tuned / "tokenizer.json")
    with pytest.raises(ValueError, match="--base=.* is invalid: no such folder"):
        graft.Graft.plan(
            RunDir(tmp_path / "run"), instruct=str(tuned), base=str(tmp_path / "absent"), weight=1.0
        )
    (tmp_path / "graft").mkdir()
    with pytest.raises(ValueError, match="--weight=1e\\+39 is invalid: .* is not finite in torch.float32"):
        plan_graft(tmp_path, base, tuned, weight=1e39).write(tmp_path / "graft")

    run = RunDir(tmp_path / "run")
    (run.model / "adapters").mkdir()
    with pytest.raises(ValueError, match="weights apart from the plain model .adapters."):
        graft.check_model_folder(run)
    for arguments in (["--weight", "nan"], ["--output", str(tuned)], []):
        with pytest.raises(SystemExit) as exit_info:
            graft.main([str(run.path), "--instruct", str(tuned), "--base", str(base), *arguments])
        assert exit_info.value.code == 1
        lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("cpt: ")]
        assert len(lines) == 1 and "Allowed: " in lines[0]
