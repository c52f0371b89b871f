"""``python -m martlet``: the same as the ``martlet`` command."""

import sys

from martlet.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
