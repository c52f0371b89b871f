"""``python -m martlet``: the same as the ``martlet`` command."""

import sys

from martlet.cli import main

if __name__ == "__main__":
    sys.exit(main())
