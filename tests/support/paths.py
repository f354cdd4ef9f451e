"""The paths of folders, for tests in folders of any depth."""

from pathlib import Path

ROOT = Path(__file__).parents[2]
TESTS = ROOT / "tests"
PROGRAMS = TESTS / "rooms" / "hlo" / "programs"
