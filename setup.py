"""What pyproject.toml cannot say: conf/ and the published numbers are installed within the package."""

from setuptools import find_packages, setup

PLACES = {"cpt.conf": "conf", "cpt.published": "benchmarks/results/published"}
setup(packages=[*find_packages(include=["cpt", "cpt.*"]), *PLACES], package_dir=PLACES)
