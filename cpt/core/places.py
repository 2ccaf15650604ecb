"""Where the package keeps the files that are no code."""

from pathlib import Path

PACKAGE = Path(__file__).parents[1]
# Within the package once that is installed, beside it in a checkout.
CONF = PACKAGE / "conf" if (PACKAGE / "conf").is_dir() else PACKAGE.parent / "conf"
