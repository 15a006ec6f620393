"""`python -m twin` and the command `twin`: the same."""

import signal
import sys


def main() -> None:
    """Run the command line; Ctrl-C while it is still being loaded ends it like Ctrl-C later."""
    try:
        from twin.cli import main as run  # takes a third of a second, in which Ctrl-C may come

        run()
    except KeyboardInterrupt:
        sys.stderr.write("interrupted\n")
        sys.exit(130)
    except SystemExit as end:
        if end.code == 130:
            # Who presses Ctrl-C once more while Python tidies up gets no second message, and the same status.
            signal.signal(signal.SIGINT, signal.SIG_IGN)
        raise


if __name__ == "__main__":
    main()
