"""`python -m twin` is the command `twin`."""

from twin.cli import main

if __name__ == "__main__":
    main()
