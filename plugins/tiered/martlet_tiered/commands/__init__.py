"""The commands ``martlet tiered ...``, which read a cold tier, with its broker running or gone."""
