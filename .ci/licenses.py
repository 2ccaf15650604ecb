"""Prints a bill of materials: the installed packages that cpt needs, with their versions and licenses.

`python .ci/licenses.py [EXTRA …]` adds the packages of extras. The licenses are those that the packages'
metadata state."""

import sys
from collections.abc import Iterator, Sequence
from importlib.metadata import Distribution, PackageNotFoundError, distribution

from packaging.requirements import Requirement

UNKNOWN = "unknown"
OSI_APPROVED = "License :: OSI Approved :: "
LONGEST_NAME = 60  # characters; a longer `License` is the text of one


def find_packages(name: str, extras: Sequence[str]) -> dict[str, Distribution]:
    """The distributions that a package needs, by name; those that are not installed are left out."""
    packages: dict[str, Distribution] = {}
    pending = [(name, extra) for extra in ("", *extras)]
    visited = set(pending)
    while pending:
        package_name, extra = pending.pop()
        try:
            package = distribution(package_name)
        except PackageNotFoundError:  # of another platform, or an extra that was not asked for
            continue
        packages[package.name] = package
        for requirement in find_requirements(package, extra):
            for needed_extra in ("", *requirement.extras):
                needed = (requirement.name, needed_extra)
                if needed not in visited:
                    visited.add(needed)
                    pending.append(needed)
    del packages[distribution(name).name]
    return packages


def find_requirements(package: Distribution, extra: str) -> Iterator[Requirement]:
    """What a package needs here, with an extra or, for "", without any."""
    for line in package.requires or ():
        requirement = Requirement(line)
        if requirement.marker is None or requirement.marker.evaluate({"extra": extra}):
            yield requirement


def read_license(package: Distribution) -> str:
    """The license by its SPDX expression, else by the classifiers, else as the author wrote its name."""
    metadata = package.metadata
    if metadata.get("License-Expression"):
        return metadata["License-Expression"]
    classifiers = metadata.get_all("Classifier") or []
    names = [line.removeprefix(OSI_APPROVED) for line in classifiers if line.startswith(OSI_APPROVED)]
    if names:
        return ", ".join(names)
    lines = (metadata.get("License") or "").strip().splitlines()
    return lines[0] if lines and len(lines[0]) <= LONGEST_NAME else UNKNOWN


def main(extras: Sequence[str]) -> None:
    packages = find_packages("cpt", extras)
    licenses = {name: read_license(package) for name, package in packages.items()}
    for name in sorted(packages, key=str.lower):
        print(f"{name}\t{packages[name].version}\t{licenses[name]}")
    unknown = [name for name, license_name in licenses.items() if license_name == UNKNOWN]
    if unknown:
        print(f"cpt: without a license in their metadata: {', '.join(sorted(unknown))}", file=sys.stderr)


if __name__ == "__main__":
    main(sys.argv[1:])
