"""Learns a sequence of text domains: `python run.py method=ncl order=1`; `--help` lists the choices."""

import os
from pathlib import Path

from cpt.core.preemption import heed_imports, heeded

if __name__ == "__main__":
    heed_imports()

import hydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

import cpt.sweeps.launcher  # noqa: F401  (registers the sweep launcher)
from cpt.core.errors import readable


@hydra.main(version_base="1.3", config_path="conf", config_name="config")
def main(cfg: DictConfig) -> float | None:
    # OpenMP's threads spin while they wait, which on a busy machine halves the speed (two cores shared with
    # two other processes: 49 s, with this 25 s) and on an idle one gains nothing (13.4 s, with this 13.3 s).
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")
    from cpt.run import run

    with readable(errors_only=not os.environ.get("HYDRA_FULL_ERROR")):
        return run(cfg, folder=Path(HydraConfig.get().runtime.output_dir))


if __name__ == "__main__":
    with heeded():
        main()
