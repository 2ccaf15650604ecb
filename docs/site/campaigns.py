"""Writes the table of docs/studies/fault-tolerance.md from benchmarks/results/campaigns/*.json.

python docs/site/campaigns.py
"""

import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "studies" / "fault-tolerance.md"
RESULTS = ROOT / "benchmarks" / "results" / "campaigns"
BEGIN = "<!-- generated: campaigns -->"
END = "<!-- end: campaigns -->"
HEADS = ["campaign", "file", "day", "commit", "asked", "made", "fine", "minutes"]
MISSING = "–"  # in files that are older than the field


def load_campaigns() -> dict[str, dict[str, Any]]:
    """The campaigns of seeded trials by the names of their files."""
    campaigns = {}
    for path in sorted(RESULTS.glob("*.json")):
        campaign = json.loads(path.read_text(encoding="utf-8"))
        if "trials" in campaign:
            campaigns[path.name] = campaign
    return campaigns


def make_row(name: str, campaign: dict[str, Any]) -> str:
    cells = [
        f"`{campaign['campaign']}`",
        f"`{name}`",
        campaign.get("day", MISSING),
        campaign.get("commit", MISSING),
        campaign["asked"],
        campaign["made"],
        campaign["fine"],
        round(campaign["seconds"] / 60),
    ]
    return f"| {' | '.join(map(str, cells))} |"


def page(text: str) -> str:
    """The page with the table as the files are now."""
    rows = [f"| {' | '.join(HEADS)} |", "| :-- | :-- | :-- | :-- | --: | --: | --: | --: |"]
    for name, campaign in load_campaigns().items():
        rows.append(make_row(name, campaign))
    before, rest = text.split(BEGIN)
    return f"{before}{BEGIN}\n\n" + "\n".join(rows) + f"\n\n{END}{rest.split(END)[1]}"


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
