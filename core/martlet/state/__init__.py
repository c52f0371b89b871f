"""State that is derived from the log: projections, their snapshots and their replay."""

from martlet.state.projection import NOTHING, Projection
from martlet.state.projections import Projections

__all__ = ["NOTHING", "Projection", "Projections"]
