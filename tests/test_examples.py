"""The examples of docs/examples and of CONTRIBUTING.md; tests/test_docs.py composes their commands."""

import json
import math
import re
import shutil
import subprocess
import sys

import pytest
import torch
from omegaconf import OmegaConf
from transformers import (
    AutoModelForCausalLM,
    AutoProcessor,
    AutoTokenizer,
    CLIPImageProcessor,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaProcessor,
)

from cpt.models.loading import load_config
from cpt.trainer.check_checkpoint import check_stored_weights
from tests.conftest import ROOT, VOCABULARIES, sentences
from tests.support.chat_decoder import write_checkpoint
from tests.support.example_runs import save_scores
from tests.support.forked_scripts import run_script

EXAMPLES = ROOT / "docs" / "examples"


def test_corpora_are_made_of_what_every_python_has(tmp_path):
    subprocess.run([sys.executable, EXAMPLES / "make_corpora.py", tmp_path], check=True)
    for name in ("network", "files", "numbers", "general"):
        lines = (tmp_path / name / "all.jsonl").read_text(encoding="utf-8").splitlines()
        assert len({json.loads(line)["text"] for line in lines}) == len(lines) > 200


@pytest.mark.skipif(shutil.which("node") is None, reason="Node.js is not installed")
def test_scores_are_read_in_another_language(tmp_path):
    nll = [[5.0, 5.2, 5.4], [4.6, None, 5.3], [4.7, 4.2, 5.2]]
    scores = save_scores(tmp_path / "run", nll=nll, order=["law", "food"])
    command = ["node", EXAMPLES / "read_scores.js", tmp_path / "run" / "scores.json"]
    output = subprocess.run(command, check=True, stdout=subprocess.PIPE, encoding="utf-8").stdout
    cells = [line.split("\t") for line in output.splitlines()]
    assert cells[:3] == [
        ["after", "law", "food", "general"],
        ["base", "148.41", "181.27", "221.41"],
        ["law", "99.48", "", "200.34"],
    ]
    assert cells[4:] == [
        ["learned", "0.7000"],
        ["forgot", "0.1000", f"in the file: {scores.metrics['FG']['nats']:.4f}"],
    ]

    changed = json.loads((tmp_path / "run" / "scores.json").read_text()) | {"version": 2}
    (tmp_path / "run" / "scores.json").write_text(json.dumps(changed))
    process = subprocess.run(command, check=False, capture_output=True, encoding="utf-8")
    assert process.returncode == 1 and "version 2 is invalid. Allowed: 1" in process.stderr


@pytest.mark.slow
def test_the_method_of_contributing_runs_as_it_is_shown(small, start, tmp_path, monkeypatch):
    page = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    (module,) = re.findall(r"^```python\n# cpt/methods/l1.py\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    (config,) = re.findall(r"^```yaml\n# conf/method/l1.yaml\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "shown_l1.py").write_text(module)
    cfg = small("order=[law,food]", "trainer.log_every_n_steps=1", "logger=csv")
    cfg.method = OmegaConf.create(config.replace("cpt.methods.l1", "shown_l1"))
    start(cfg, tmp_path / "run")
    assert json.loads((tmp_path / "run/scores.json").read_text())["rows"] == ["base", "law", "food"]
    assert "train/l1/food" in (tmp_path / "run" / "metrics.csv").read_text()


@pytest.mark.slow
def test_the_perplexity_of_a_report_is_that_of_plain_transformers(small_gpt2, start, tmp_path):
    for name in ("general", "law"):
        (tmp_path / "texts" / name).mkdir(parents=True)
        for seed, split in enumerate(("train", "valid", "test")):
            rows = sentences(VOCABULARIES[name], count=30, seed=seed)
            lines = "".join(json.dumps({"text": row}) + "\n" for row in rows)
            (tmp_path / "texts" / name / f"{split}.jsonl").write_text(lines)
    start(small_gpt2(f"domains.root={tmp_path / 'texts'}", "order=[law]"), tmp_path / "run")
    scores = json.loads((tmp_path / "run" / "scores.json").read_text())

    model = str(tmp_path / "run" / "model")
    text = str(tmp_path / "texts" / "law" / "test.jsonl")
    process = run_script(EXAMPLES / "perplexity.py", model, "16", text, cwd=tmp_path)
    pattern = r"([\d.]+) over (\d+) tokens of 30 documents"
    perplexity, num_scored = re.match(pattern, process.stdout).groups()
    column = scores["domains"].index("law")
    assert int(num_scored) == scores["scored"][column]
    assert float(perplexity) == pytest.approx(math.exp(scores["nll"][-1][column]), rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("is_tied", [False, True])
def test_the_text_decoder_of_a_model_of_images_is_saved_alone_and_put_back(is_tied, tmp_path):
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
    text = {**sizes, "model_type": "llama", "vocab_size": 400, "num_key_value_heads": 1}
    images = {**sizes, "model_type": "clip_vision_model", "image_size": 28, "patch_size": 14}
    config = LlavaConfig(text_config=text, vision_config=images, tie_word_embeddings=is_tied)
    model = LlavaForConditionalGeneration(config).eval()
    model.save_pretrained(tmp_path / "llava")
    write_checkpoint(tmp_path / "text")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "text")
    pictures = CLIPImageProcessor(size={"shortest_edge": 28}, crop_size={"height": 28, "width": 28})
    LlavaProcessor(pictures, tokenizer, patch_size=14).save_pretrained(tmp_path / "llava")

    run_script(EXAMPLES / "text_decoder.py", "llava", "decoder", cwd=tmp_path)
    decoder = AutoModelForCausalLM.from_pretrained(tmp_path / "decoder").eval()
    ids = torch.arange(3, 20)[None]
    assert torch.equal(decoder(ids).logits, model(input_ids=ids).logits)
    assert len(AutoTokenizer.from_pretrained(tmp_path / "decoder")) == len(tokenizer)
    check_stored_weights(
        str(tmp_path / "decoder"), load_config(str(tmp_path / "decoder")), "causal", head_steps=None
    )

    with torch.no_grad():
        for parameter in decoder.parameters():
            parameter.add_(0.01)
    decoder.save_pretrained(tmp_path / "decoder")
    run_script(EXAMPLES / "text_decoder.py", "llava", "decoder", "trained", cwd=tmp_path)
    trained = LlavaForConditionalGeneration.from_pretrained(tmp_path / "trained").eval()
    assert torch.equal(trained(input_ids=ids).logits, decoder(ids).logits)
    for name, parameter in trained.model.vision_tower.named_parameters():
        assert torch.equal(parameter, model.model.vision_tower.get_parameter(name))
    assert AutoProcessor.from_pretrained(tmp_path / "trained").tokenizer.vocab_size == tokenizer.vocab_size
