"""The certificate of an exported model: `model/CARD.md` and, for programs, `model/card.json`."""
