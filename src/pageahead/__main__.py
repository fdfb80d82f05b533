"""``python -m pageahead``, and the ``pageahead`` command."""

import sys


def main() -> None:
    """Entry point of the command. `run` imports nothing that the other commands need."""
    if sys.argv[1:2] == ["run"]:
        from pageahead import launch

        launch.main()
    else:
        from pageahead import cli

        cli.main()


if __name__ == "__main__":
    main()
