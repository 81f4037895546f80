"""SECURITY.md promises no address that nobody reads, and leads to where its claims are shown."""

import re
from pathlib import Path

POLICY = (Path(__file__).resolve().parents[2] / "SECURITY.md").read_text(encoding="utf-8")


def test_the_threat_model_has_ten_lines_and_leads_to_the_page():
    assert re.findall(r"^(\d+)\. ", POLICY, re.MULTILINE) == [str(n) for n in range(1, 11)]
    assert "](docs/security.md)" in POLICY


def test_it_names_no_mail_address_and_no_host():
    assert "@" not in POLICY
    assert "://" not in POLICY
