"""The program: `cpt`, `python -m cpt` and, in a checkout, `python run.py` are the same."""

from cpt.core.output import open_streams, require_working_folder
from cpt.core.preemption import handle_signals, handle_signals_in_imports
from cpt.core.processes import die_with_parent


def main() -> None:
    """Runs the command line. A signal ends it as preemption.py says, from here on."""
    die_with_parent()
    open_streams()
    require_working_folder()
    handle_signals_in_imports()
    from cpt.cli import start  # Hydra: most of a second, in which signals may come

    with handle_signals():
        start()


if __name__ == "__main__":
    main()
