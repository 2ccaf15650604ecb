"""What pyproject.toml cannot say: conf/ and the published numbers are installed within the package."""

from pathlib import Path

from setuptools import find_packages, setup

FOLDERS = [path for path in (Path("conf"), *Path("conf").rglob("*")) if path.is_dir() and path.name[0] != "_"]
PLACES = {f"cpt.{'.'.join(path.parts)}": path.as_posix() for path in FOLDERS}
PLACES |= {
    "cpt.published": "benchmarks/results/published",
    "cpt.reporting.templates": "cpt/reporting/templates",
}
setup(packages=[*find_packages(include=["cpt", "cpt.*"]), *PLACES], package_dir=PLACES)
