"""One list of cases in which reuse could go wrong, and how a case is played over any engines, with either proof."""

from .cases import CASES
from .model import Case
from .play import Site, play

__all__ = ["CASES", "Case", "Site", "play"]
