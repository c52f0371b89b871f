"""State computed from the log: projections, their snapshots and their replay."""

from martlet.state.pages import Pages
from martlet.state.projection import NOTHING, HoldsMessages, Projection
from martlet.state.projections import Projections
from martlet.state.rows import pack_rows, unpack_rows

__all__ = ["NOTHING", "HoldsMessages", "Pages", "Projection", "Projections", "pack_rows", "unpack_rows"]
