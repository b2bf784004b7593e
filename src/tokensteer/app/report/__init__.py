"""A run folder as one HTML page that needs nothing else, and as figures for a paper."""

from tokensteer.app.report.figures import figures
from tokensteer.app.report.page import write

__all__ = ["figures", "write"]
