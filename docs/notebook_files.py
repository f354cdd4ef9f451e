"""Puts the notebooks on the site, and what each of them drew as `notebooks/<name>_<number>.png`."""

import base64
import json
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

FOLDER = Path(__file__).parent.parent / "notebooks"


def on_files(files: Files, config: Any, **_: Any) -> Files:
    """Add the notebooks and their pictures to the files of the site."""
    for notebook in sorted(FOLDER.glob("*.ipynb")):
        files.append(
            File.generated(config, f"notebooks/{notebook.name}", abs_src_path=str(notebook))
        )
        for number, picture in enumerate(pictures(notebook), start=1):
            files.append(
                File.generated(config, f"notebooks/{notebook.stem}_{number}.png", content=picture)
            )
    return files


def pictures(notebook: Path) -> list[bytes]:
    """Return what a notebook drew, in order, as PNG."""
    cells = json.loads(notebook.read_text())["cells"]
    shown = [output.get("data", {}) for cell in cells for output in cell.get("outputs", ())]
    return [base64.b64decode(data["image/png"]) for data in shown if "image/png" in data]
