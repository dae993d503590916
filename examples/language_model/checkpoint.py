"""A checkpoint that is either the old one or the new one, never half of one."""

import json
import os
import zipfile
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

_ABOUT = "about.json"


class CorruptCheckpointError(Exception):
    """The file is there, but it is no checkpoint, or not all of one."""


def save(path: Path, arrays: Mapping[str, np.ndarray], about: Mapping[str, Any]) -> None:
    """Writes arrays and a few JSON values to one file, and only then gives it its name.

    Args:
        path: The file; an older one stays whole until the new one is complete and on the disk.
        arrays: Named arrays.
        about: More that belongs to them.
    """
    new = path.with_name(f"{path.name}.{os.getpid()}.new")
    try:
        with new.open("wb") as file:
            np.savez(file, allow_pickle=False, **{_ABOUT: np.array(json.dumps(about)), **arrays})
            file.flush()
            os.fsync(file.fileno())
        os.replace(new, path)
    finally:
        new.unlink(missing_ok=True)


def load(path: Path) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """Reads back what `save` wrote; every byte is checked against the file's checksums.

    Raises:
        CorruptCheckpointError: The file is damaged, or something else altogether.
        FileNotFoundError: There is none.
    """
    try:
        # An open file, not a path: NumPy leaves a path's file open when it is no archive.
        with path.open("rb") as file, np.load(file, allow_pickle=False) as archive:
            arrays = {name: archive[name] for name in archive.files}
        return arrays, json.loads(str(arrays.pop(_ABOUT)))
    except (zipfile.BadZipFile, zlib.error, EOFError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise CorruptCheckpointError(f"{path} is no complete checkpoint ({error})") from error


def set_aside(path: Path) -> Path:
    """Renames a file that cannot be used, without overwriting one that was set aside before; returns its new name."""
    number = 1
    while (kept := path.with_name(f"{path.name}.corrupt-{number}")).exists():
        number += 1
    return path.rename(kept)
