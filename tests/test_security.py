"""What SECURITY.md says of the code: how files are read, and what of a user's secrets a run writes."""

import ast
import json
import os
import pickle
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch.distributed import checkpoint

from cpt import card, gate, load_run, report, status, verify
from cpt.core.files import hash_files
from cpt.core.secrets import HIDDEN, redact
from cpt.core.tensors import load_tensors, save_state
from cpt.models import loading
from cpt.trainer import state_folders
from cpt.trainer.checkpoint import load_stage
from cpt.trainer.run_dir import RunDir
from cpt.trainer.state_folders import SHARDS
from tests.conftest import ROOT, SMALL
from tests.support.example_runs import save_scores
from tests.support.forked_scripts import run_script

CANARY = "canary-7f3a9"


@dataclass(frozen=True)
class FunctionCall:
    """A call in the code of cpt, as it is written."""

    file: str
    function: str
    keywords: dict[str | None, str]


def read_calls_and_imports() -> tuple[list[FunctionCall], set[tuple[str, str | None]]]:
    """All calls in cpt, and its imports as (file, module)."""
    calls = []
    imports = set()
    for path in sorted((ROOT / "cpt").rglob("*.py")):
        file = path.relative_to(ROOT).as_posix()
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call):
                keywords = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
                calls.append(FunctionCall(file, ast.unparse(node.func), keywords))
            elif isinstance(node, ast.Import):
                imports.update((file, alias.name) for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                imports.add((file, node.module))
    return calls, imports


def test_no_file_is_read_that_could_bring_code():
    calls, imports = read_calls_and_imports()

    torch_loads = [call for call in calls if call.function == "torch.load"]
    # Files of runs, and weights of checkpoints that are streamed.
    assert {call.file for call in torch_loads} == {"cpt/core/tensors.py", "cpt/models/stored_weights.py"}
    assert {call.keywords.get("weights_only") for call in torch_loads} == {"True"}
    # `allow_all_kernels`: code of any repository that the config.json of a checkpoint names for its attention.
    program_starts = [call for call in calls if call.function.startswith("subprocess.")]
    assert {call.file for call in program_starts} == {
        "cpt/sweeps/cluster.py",  # squeue, sacct
        "cpt/sweeps/cluster_task.py",  # scontrol
        "cpt/sweeps/jobs.py",  # this program, nvidia-smi
    }
    for keyword in ("allow_pickle", "shell", "allow_all_kernels"):
        assert [call for call in calls if call.keywords.get(keyword, "False") != "False"] == []
    loaders = {call.keywords.get("Loader") for call in calls if call.function == "yaml.load"}
    assert loaders <= {"Loader"}  # cpt.core.files: CSafeLoader or SafeLoader
    unsafe_functions = {"yaml.unsafe_load", "yaml.full_load", "eval", "os.system"}
    assert unsafe_functions.isdisjoint(call.function for call in calls)

    unsafe_modules = {"dill", "cloudpickle", "joblib", "shelve", "marshal", "pickle"}
    unsafe_imports = {(file, module) for file, module in imports if module in unsafe_modules}
    # The error of torch.load; an unpickler that knows the classes of an index of shards alone.
    assert unsafe_imports <= {("cpt/core/tensors.py", "pickle"), ("cpt/core/shards.py", "pickle")}
    unpicklers = {"pickle.load", "pickle.loads", "pickle.Unpickler", "FileSystemReader"}
    assert unpicklers.isdisjoint(call.function.removeprefix("checkpoint.") for call in calls)
    shard_loads = [call for call in calls if call.function == "checkpoint.load"]
    assert {call.keywords.get("storage_reader") for call in shard_loads} == {"ShardReader(folder)"}

    # Transformers runs the code of a checkpoint where this option is true, and asks where it is absent.
    code_free = ("PeftModel", "PeftConfig", "GenerationConfig")  # which take no code of a checkpoint
    loads = [call for call in calls if call.function.endswith(".from_pretrained")]
    loads = [call for call in loads if not call.function.startswith(code_free)]
    assert len(loads) >= 4
    assert {call.keywords.get("trust_remote_code") for call in loads} == {"False"}


def test_a_checkpoint_with_its_own_code_is_refused_without_a_prompt(tmp_path, monkeypatch):
    auto_map = {"AutoConfig": "own.Own", "AutoModelForMaskedLM": "own.M"}
    auto_map["AutoTokenizer"] = ["own.Words", None]
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "own", "auto_map": auto_map}))
    tokenizer_config = {"auto_map": auto_map, "tokenizer_class": "Words"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(tokenizer_config))
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
    run = tmp_path / "run"
    mark = tmp_path / "ran"  # a folder that the pickle makes if it is loaded
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


def test_an_index_of_shards_with_other_things_in_it_is_refused_in_a_line(tmp_path, capsys):
    run = tmp_path / "run"
    stage = run / "stages" / "001.pt"
    folder = stage.with_name("001.1.shards")
    mark = tmp_path / "ran"  # a folder that the pickle makes if it is loaded

    def store_stage():
        sums = hash_files(folder, folder.iterdir())
        save_state(
            {"w": None, SHARDS: {"folder": folder.name, "sums": sums, "places": {"w": [["w"]]}}}, stage
        )

    with state_folders.without_warnings():
        checkpoint.save({"w": torch.arange(3.0)}, checkpoint_id=folder, no_dist=True)
    store_stage()
    assert load_stage(stage)["w"].tolist() == [0, 1, 2]

    (folder / ".metadata").write_bytes(pickle.dumps(Evil(mark)))
    store_stage()
    (run / "config.yaml").write_text("name: x\n")
    with pytest.raises(ValueError, match=r"\.metadata holds other things than an index"):
        load_stage(stage)
    with pytest.raises(ValueError, match=r"\.metadata holds other things than an index"):
        list(state_folders.read_shards({"folder": folder.name, "places": {"w": [["w"]]}}, stage))
    assert verify.main([str(run)]) == 1
    assert ".metadata holds other things than an index" in capsys.readouterr().out
    assert not mark.exists()
    pickle.loads(pickle.dumps(Evil(mark)))
    assert mark.exists()  # the file is what it is meant to be


@pytest.mark.slow
def test_the_config_of_a_run_from_others_is_text(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("MY_WORD", CANARY)
    (tmp_path / "brought.py").write_text("import os\nos.mkdir('ran')\n")
    run = tmp_path / "runs" / "one"
    method = {"name": "ncl", "_target_": "brought.Method", "strength": "${oc.env:MY_WORD}"}
    config = {"method": method, "callbacks": {"own": {"_target_": "brought.Callback"}}}
    scores = save_scores(run, config=config, variant="strength=${oc.env:MY_WORD}")
    (run / "model").mkdir()
    (run / "model" / "config.json").write_text("{}")
    for row in range(len(scores.rows)):  # what the release check compares
        RunDir(run).save_documents(row, dict.fromkeys(scores.domains, np.ones((2, 7))))

    report.main([str(run), "--name", "comparison"])
    for program in (report, status, verify, gate, card):
        program.main([str(run)])
    assert load_run(run).config["method"]["strength"] == "${oc.env:MY_WORD}"
    assert not (tmp_path / "ran").exists()
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert {"comparison.html", "README.md"} <= {path.name for path in files}
    assert [path for path in files if CANARY.encode() in path.read_bytes()] == []
    output = capsys.readouterr()
    assert CANARY not in output.out + output.err


def test_what_looks_secret_is_hidden_and_a_folder_is_claimed_again_with_it(tmp_path):
    secret = {"hub": {"token": CANARY, "name": "x"}, "list": [{"password": CANARY}]}
    secret["logger"] = {"mine": {"api_key": CANARY, "tracking_uri": f"https://me:{CANARY}@host/x"}}
    plain = {"method": {"key": "cosine", "tokens": 5, "token": None}, "url": "https://host/me@x"}
    redacted = redact(secret | plain)
    assert CANARY not in json.dumps(redacted)
    assert redacted == redact(redacted) and redacted == redacted | plain
    assert redacted["logger"]["mine"]["tracking_uri"] == f"https://{HIDDEN}@host/x"
    assert redacted["hub"] == {"token": HIDDEN, "name": "x"}

    run = RunDir(tmp_path / "run")
    settings = {"seed": 0, "method": {"api_key": CANARY}}
    run.write_config(settings)
    assert CANARY not in run.config.read_text()
    run.check_config(settings)


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
    options = [option for option in SMALL if option != "logger=none"]
    options += ["domains=texts", f"domains.root={corpora}", f"cache_dir={cache}", "order=[law]"]
    options += ["domains.column=${oc.env:MLFLOW_TRACKING_URI}", f"hydra.run.dir={folder}"]
    process = run_script(ROOT / "run.py", *options, cwd=tmp_path)
    assert process.returncode == 0, process.stderr

    files = [path for path in folder.rglob("*") if path.is_file()]
    assert len(files) > 15 and any(path.suffix == ".wandb" for path in files)
    assert {str(path) for path in files if CANARY.encode() in path.read_bytes()} == set()
    assert CANARY not in process.stdout + process.stderr
    stored = (folder / "config.yaml").read_text()
    assert r"column: \${oc.env:MLFLOW_TRACKING_URI}#" in stored

    second_process = run_script(ROOT / "run.py", *options, cwd=tmp_path)  # the stored form is the same run
    assert "Nothing to train" in second_process.stdout + second_process.stderr
