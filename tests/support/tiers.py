"""The tier `fast`: rooms and files of pure Python, or of few compiled programs.

Elsewhere single tests are marked with `pytest.mark.fast`. What is marked slow is never fast.
"""

from pathlib import Path

TESTS = Path(__file__).parents[1]
ROOMS = ["audit", "collectives", "core", "data", "mesh", "partition"]
FILES = {
    "": ["tiers"],
    "checkpoint": ["damage", "deleted_folders", "paths"],
    "cli": ["audit", "communication_refusals", "plan", "schedule"],
    "docs": ["commands"],
    "fuzz": ["mesh_strings", "rules"],
    "local_updates": ["refusals"],
    "parameter_server": ["clock", "plot", "progress", "ray_refusals", "rules", "server", "simulate"],
    "pipeline": ["check", "formulas", "plot", "refusals", "rows", "text"],
    "planning": ["plan", "tiles", "topology"],
    "reducers": ["refusals"],
    "strategies": ["hybrid_refusals", "refusals"],
    "training": ["arguments", "early_stopping", "loggers", "position"],
    "transforms": ["refusals"],
}
PATHS = [TESTS / room for room in ROOMS]
PATHS += [TESTS / room / f"test_{name}.py" for room, names in FILES.items() for name in names]


def is_fast(path: Path) -> bool:
    """Whether a whole file is of the fast tier."""
    return any(path == one or one in path.parents for one in PATHS)
