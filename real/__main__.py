"""`python -m real` is the command `twin-real`."""

from real.cli import main

if __name__ == "__main__":
    main()
