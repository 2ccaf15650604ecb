"""What pyproject.toml cannot say: conf/, beside the package in a checkout, is installed within it."""

from setuptools import find_packages, setup

setup(packages=[*find_packages(include=["cpt", "cpt.*"]), "cpt.conf"], package_dir={"cpt.conf": "conf"})
