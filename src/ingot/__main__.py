"""The `ingot` command, also as `python -m ingot`."""

import signal

from ingot.wall_clock import bound_wall_clock


def main() -> None:
    """Import the command line and run it. Ctrl-C ends the imports without a traceback."""
    bound_wall_clock()
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from ingot.cli import main as run

    run()


if __name__ == "__main__":
    main()
