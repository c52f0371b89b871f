"""What the project itself uses and nobody installs: the generator of the pages in ``docs/``."""
