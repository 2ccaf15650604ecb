"""Commands as one types them: the program, what Hydra has stored of a start, how an extra is installed."""

from pathlib import Path
from typing import Any

import yaml

import cpt
from cpt.core.files import read_yaml


def find_program_words(root: Path | None = None) -> list[str]:
    """The program as one types it: in a checkout `python run.py`, of an installed package `cpt`. The package
    lies in the folder `root`."""
    return ["python", "run.py"] if is_checkout(root) else ["cpt"]


def format_install_command(extra: str, root: Path | None = None) -> str:
    """The command that installs the packages of an extra, for messages. An installed cpt is kept by it."""
    if is_checkout(root):
        return f"pip install -e '.[{extra}]' in the checkout of cpt"
    return f"pip install 'cpt[{extra}]'"


def is_checkout(root: Path | None = None) -> bool:
    """Whether the package lies in a checkout of the repository, which is the folder `root`."""
    folder = root or Path(cpt.__file__).parents[1]
    return (folder / "run.py").is_file() and (folder / "pyproject.toml").is_file()


def find_config_folders(run: Path) -> list[str]:
    """The --config-dir of the command of a run."""
    sources = read_hydra_settings(run).get("runtime", {}).get("config_sources", [])
    return [f"--config-dir={source['path']}" for source in sources if source["provider"] == "command-line"]


def find_given_folder(run: Path) -> list[str]:
    """The `hydra.run.dir=…` of the command of a run; empty if the folder was named after the options."""
    overrides = read_hydra_settings(run).get("overrides", {}).get("hydra", [])
    return [override for override in overrides if override.startswith("hydra.run.dir=")]


def read_hydra_settings(run: Path) -> dict[str, Any]:
    """Hydra's own settings of the last start; empty if they are missing or damaged."""
    try:
        settings = read_yaml(run / ".hydra" / "hydra.yaml")
    except (OSError, UnicodeDecodeError, yaml.YAMLError):
        return {}
    if not isinstance(settings, dict) or not isinstance(settings.get("hydra"), dict):
        return {}
    return settings["hydra"]
