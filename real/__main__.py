"""`python -m real` and the command `twin-real`: the same."""

import sys


def main() -> None:
    """Run the command line; Ctrl-C while it is still being loaded ends it like Ctrl-C later."""
    try:
        from real.cli import main as run  # takes half a second, in which Ctrl-C may come

        run()
    except KeyboardInterrupt:
        sys.stderr.write("interrupted\n")
        sys.exit(130)


if __name__ == "__main__":
    main()
