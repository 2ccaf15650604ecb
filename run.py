"""Learns a sequence of text domains: `python run.py method=ncl order=1`; `--help` lists the choices."""

from cpt.__main__ import main

if __name__ == "__main__":
    main()
