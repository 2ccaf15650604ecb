"""What SECURITY.md says of the code: how files are read, and what of a user's secrets a run writes."""

import ast
import json
import os

import pytest
import torch

from cpt import verify
from cpt.core.secrets import HIDDEN, redact
from cpt.core.tensors import load_tensors
from cpt.models import loading
from cpt.trainer.run_dir import RunDir
from tests.conftest import ROOT, SMALL
from tests.support.forked_scripts import run_script

CANARY = "canary-7f3a9"


def test_no_file_is_read_that_could_bring_code():
    called, imported = [], set()
    for path in sorted((ROOT / "cpt").rglob("*.py")):
        where = path.relative_to(ROOT).as_posix()
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call):
                given = {each.arg: ast.unparse(each.value) for each in node.keywords}
                called.append((where, ast.unparse(node.func), given))
            elif isinstance(node, ast.Import):
                imported |= {(where, each.name) for each in node.names}
            elif isinstance(node, ast.ImportFrom):
                imported.add((where, node.module))
    loads = [(where, given.get("weights_only")) for where, name, given in called if name == "torch.load"]
    assert loads == [("cpt/core/tensors.py", "True")]
    for key in ("allow_pickle", "shell"):
        assert {where for where, _, given in called if given.get(key, "False") != "False"} == set()
    loaders = {given.get("Loader") for _, name, given in called if name == "yaml.load"}
    assert loaders <= {"Loader"}  # cpt.reporting.load_runs: CSafeLoader or SafeLoader
    never = {"yaml.unsafe_load", "yaml.full_load", "eval", "os.system"}
    assert never.isdisjoint(name for _, name, _ in called)
    kinds = {"dill", "cloudpickle", "joblib", "shelve", "marshal", "pickle"}
    assert {each for each in imported if each[1] in kinds} <= {("cpt/core/tensors.py", "pickle")}
    loads = [(name, given) for _, name, given in called if name.endswith(".from_pretrained")]
    code_free = ("kind.", "PeftModel", "GenerationConfig")  # which take no code of a checkpoint
    asked = [given.get("trust_remote_code") for name, given in loads if not name.startswith(code_free)]
    assert len(asked) >= 4 and set(asked) == {"False"}


def test_a_checkpoint_with_code_of_its_own_is_refused_and_nobody_is_asked(tmp_path, monkeypatch):
    kinds = {"AutoConfig": "own.Own", "AutoModelForMaskedLM": "own.M", "AutoTokenizer": ["own.Words", None]}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "own", "auto_map": kinds}))
    words = {"auto_map": kinds, "tokenizer_class": "Words"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(words))
    (tmp_path / "own.py").write_text(f"import os\nos.mkdir({str(tmp_path / 'ran')!r})\n")
    monkeypatch.setattr("builtins.input", lambda prompt="": pytest.fail("asked") if prompt else "y")
    for read in (loading.load_config, loading.load_tokenizer):
        with pytest.raises(ValueError):
            read(str(tmp_path))
    assert not (tmp_path / "ran").exists()


class Evil:
    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return os.mkdir, (self.path,)


def test_a_state_with_a_pickle_in_it_is_refused_in_a_line(tmp_path, capsys):
    run, mark = tmp_path / "run", tmp_path / "ran"
    stage = run / "stages" / "001.pt"
    stage.parent.mkdir(parents=True)
    torch.save({"weight": torch.zeros(2), "more": Evil(mark)}, stage)
    (run / "config.yaml").write_text("name: x\n")
    with pytest.raises(ValueError, match=r"001.pt holds other things than tensors"):
        load_tensors(stage)
    assert verify.main([str(run)]) == 1
    assert "001.pt holds other things than tensors" in capsys.readouterr().out
    assert not mark.exists()
    torch.load(stage, weights_only=False)
    assert mark.exists()  # the file is what it is meant to be


def test_what_looks_secret_is_hidden_and_a_folder_is_claimed_again_with_it(tmp_path):
    secret = {"hub": {"token": CANARY, "name": "x"}, "list": [{"password": CANARY}]}
    secret["logger"] = {"mine": {"api_key": CANARY, "tracking_uri": f"https://me:{CANARY}@host/x"}}
    plain = {"method": {"key": "cosine", "tokens": 5, "token": None}, "url": "https://host/me@x"}
    told = redact(secret | plain)
    assert CANARY not in json.dumps(told) and told == redact(told) and told == told | plain
    assert told["logger"]["mine"]["tracking_uri"] == f"https://{HIDDEN}@host/x"
    assert told["hub"] == {"token": HIDDEN, "name": "x"}
    place = RunDir(tmp_path / "run")
    settings = {"seed": 0, "method": {"api_key": CANARY}}
    place.write_config(settings)
    assert CANARY not in place.config.read_text()
    place.check_config(settings)


@pytest.mark.slow
def test_a_run_writes_nothing_secret_of_its_environment(corpora, cache, tmp_path, monkeypatch):
    """A process of its own with W&B: every byte of what it leaves is looked at."""
    for kind in ("TOKEN", "PASSWORD", "API_KEY"):
        monkeypatch.setenv(f"MY_{kind}", f"{CANARY}-{kind}")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://me:{CANARY}-uri@localhost:1/x")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("HF_TOKEN", f"{CANARY}-hub")
    monkeypatch.setenv("WANDB_API_KEY", CANARY.ljust(40, "0"))
    folder = tmp_path / "run"
    given = [each for each in SMALL if each != "logger=none"]
    given += ["domains=texts", f"domains.root={corpora}", f"cache_dir={cache}", "order=[law]"]
    given += ["domains.column=${oc.env:MLFLOW_TRACKING_URI}", f"hydra.run.dir={folder}"]
    ended = run_script(ROOT / "run.py", *given, cwd=tmp_path)
    assert ended.returncode == 0, ended.stderr
    written = [path for path in folder.rglob("*") if path.is_file()]
    assert len(written) > 15 and any(path.suffix == ".wandb" for path in written)
    assert {str(path) for path in written if CANARY.encode() in path.read_bytes()} == set()
    assert CANARY not in ended.stdout + ended.stderr
    stored = (folder / "config.yaml").read_text()
    assert r"column: \${oc.env:MLFLOW_TRACKING_URI}#" in stored
    again = run_script(ROOT / "run.py", *given, cwd=tmp_path)  # another password is the same run
    assert "Nothing to train" in again.stdout + again.stderr
