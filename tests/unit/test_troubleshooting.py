"""The troubleshooting page has a section for every reason."""

from __future__ import annotations

import re
from pathlib import Path

from backhaul_router.report import Reason

PAGE = Path(__file__).parents[2] / "docs" / "troubleshooting.md"


def test_every_reason_has_its_section_and_every_section_its_reason() -> None:
    sections = re.findall(r"^## (\S+)$", PAGE.read_text(), re.MULTILINE)
    assert sorted(sections) == sorted(Reason)
