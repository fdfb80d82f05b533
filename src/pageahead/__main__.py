"""``python -m pageahead``."""

from pageahead.cli import main

if __name__ == "__main__":
    main()
