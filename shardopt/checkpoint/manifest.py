"""The manifest: size and SHA-256 of every file of a checkpoint, so that no damaged byte is ever loaded."""

import hashlib
import json
import os
from pathlib import Path
from typing import Any

from shardopt.checkpoint.agree import exchange, share

NAME = "MANIFEST.json"
_FORMAT = 1


def write_manifest(folder: Path, digests: dict[str, str]) -> None:
    """Write the manifest of a folder, whose files have these digests, and see it onto the disk."""
    files = {name: {"size": (folder / name).stat().st_size, "sha256": digests[name]} for name in sorted(digests)}
    with (folder / NAME).open("w") as file:
        file.write(_render({"format": _FORMAT, "files": files}))
        file.flush()
        os.fsync(file.fileno())


def file_sizes(folder: Path) -> dict[str, int]:
    """Return the sizes of all files in a folder, by their path inside it."""
    return {
        path.relative_to(folder).as_posix(): path.stat().st_size
        for path in folder.rglob("*")
        if path.is_file() and path != folder / NAME
    }


def digest(path: Path, sync: bool = False) -> str:
    """Return the SHA-256 of a file, in hexadecimal; `sync` sees its bytes onto the disk first."""
    with path.open("rb") as file:
        if sync:
            os.fsync(file.fileno())
        return hashlib.file_digest(file, "sha256").hexdigest()


def damage(folder: Path) -> list[str]:
    """Compare a folder with its manifest; return a line for every file that is missing or changed.

    All processes must call it: each reads its share of the bytes, and all return the same list.
    """
    files, complaints = _read(folder)
    if not complaints:
        complaints = _damaged_sizes(folder, files)
    if not complaints:
        sizes = {name: record["size"] for name, record in files.items()}
        complaints = [line for name in share(sizes) for line in _damaged_bytes(folder, name, files[name])]
    heard = exchange(json.dumps(complaints))
    return sorted({line for text in heard for line in json.loads(text)})


def _render(body: dict[str, Any]) -> str:
    # The manifest vouches for itself as well: a digest over its own body.
    own = hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
    return json.dumps({"manifest": body, "sha256": own}, indent=1, sort_keys=True) + "\n"


def _read(folder: Path) -> tuple[dict[str, Any], list[str]]:
    where = f"{folder.name}/{NAME}"
    try:
        text = (folder / NAME).read_bytes().decode()
        body = json.loads(text)["manifest"]
        if text != _render(body):
            return {}, [f"{where}: its bytes are not those that were written"]
        if body["format"] != _FORMAT:
            return {}, [f"{where}: format {body['format']}, this version of shardopt reads {_FORMAT}"]
        return body["files"], []
    except FileNotFoundError:
        return {}, [f"{where}: missing"]
    except (ValueError, KeyError, TypeError, OSError) as error:
        return {}, [f"{where}: cannot be read ({type(error).__name__})"]


def _damaged_sizes(folder: Path, files: dict[str, Any]) -> list[str]:
    there = file_sizes(folder)
    lines = []
    for name, record in files.items():
        if name not in there:
            lines.append(f"{folder.name}/{name}: missing")
        elif there[name] != record["size"]:
            lines.append(f"{folder.name}/{name}: {there[name]} bytes, {record['size']} were written")
    return lines


def _damaged_bytes(folder: Path, name: str, record: dict[str, Any]) -> list[str]:
    where = f"{folder.name}/{name}"
    try:
        found = digest(folder / name)
    except OSError as error:
        return [f"{where}: cannot be read ({error.strerror})"]
    if found == record["sha256"]:
        return []
    return [
        f"{where}: its bytes are not those that were written (SHA-256 {found[:8]}..., not {record['sha256'][:8]}...)"
    ]
