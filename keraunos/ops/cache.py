"""Where configurations are remembered: in memory, on disk, and shipped with the package.

A file holds the entries of one kind of device::

    {"schema": 1, "device": "NVIDIA H200",
     "entries": {key: {"winner": {...}, "backward": false, "measurements": [...], ...}}}

``keraunos/tuned/<device>.json`` has the same form. See docs/tuning.md.
"""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.resources
import json
import logging
import os
import re
import reprlib
import stat
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from keraunos.ops.invocation import Config, Invocation, Platform
from keraunos.ops.registry import Row
from keraunos.text import printable
from keraunos.version import __version__

SCHEMA = 1
LOCK_SECONDS = 30.0
# A file of thousands of entries has a few megabytes, and each entry six levels of tables.
MOST_BYTES = 1 << 26
_MOST_LEVELS = 32
# What may go wrong with files: NotImplementedError is a file system without locks, ImportError no filelock.
_FAILURES = (OSError, NotImplementedError, ImportError)

_log = logging.getLogger("keraunos")
_compilers: dict[str, str] = {
    Platform.XLA: "jaxlib",
    Platform.PALLAS: "jaxlib",
    Platform.TRITON: "triton",
    Platform.CUDA: "triton",
    Platform.TORCH: "torch",
}
_frameworks = {"jax": "jaxlib", "torch": "torch"}
_SOURCE = " | source "


def cache_key(inv: Invocation, row: Row) -> str:
    """The key of a stored configuration, readable: device, platform, call, then source and versions."""
    return f"{inv.device} | {row.platform}/{row.backend} | {inv.key}{_provenance(row, inv.framework)}"


def _provenance(row: Row, framework: str) -> str:
    compiler = _compilers.get(row.platform, _frameworks.get(framework, framework))
    versions = f"keraunos {__version__}, {compiler} {_version(compiler)}"
    return f"{_SOURCE}{row.implementation.source_version} | {versions}"


@functools.cache
def _version(distribution: str) -> str:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return "unknown"


def split_key(key: str) -> tuple[str, str]:
    """The two parts of a key: the call on its device and platform; the hash of the kernel's source."""
    call, _, rest = key.partition(_SOURCE)
    return call, rest.partition(" | ")[0]


class ConfigCache:
    """Configurations by key, in memory.

    Args:
        entries: what it holds at first, taken as good for forward and backward.
    """

    def __init__(self, entries: Mapping[str, Config] | None = None):
        self._entries: dict[str, tuple[Config, bool]] = {}
        self.generation = 0
        for key, cfg in (entries or {}).items():
            self.put(key, cfg)

    def get(self, key: str, backward: bool = False) -> Config | None:
        """The configuration stored under ``key``; with ``backward`` only if its gradient was checked too."""
        cfg, checked = self._entries.get(key, (None, True))
        return cfg if checked or not backward else None

    def put(self, key: str, cfg: Config, backward: bool = True) -> None:
        """Store a configuration; ``backward``: its gradient is known to be right.

        Raises:
            TypeError: it is none.
        """
        if not isinstance(cfg, Config):
            raise TypeError(f"ConfigCache: {key!r} has {cfg!r}; expected a configuration such as keraunos.ops.Config")
        self._entries[key] = cfg, backward
        self.generation += 1


class PersistentCache:
    """Measured winners on disk: one JSON file per kind of device, shared by all processes of the user.

    Writing merges under a file lock and replaces the file in one step, so that a reader always finds a whole one. A
    file that cannot be read is reported and moved aside. Nothing that goes wrong here fails a call, not even that there
    is no folder: it is logged, once, and what is measured is kept in memory.

    Args:
        name: the folder's name in the user's cache directory, ``KERAUNOS_CACHE_DIR`` if that is set.
        directory: the folder itself, instead.
    """

    def __init__(self, name: str, directory: str | os.PathLike | None = None):
        self.name = name
        self._directory = directory
        self._held: dict[Path, tuple[Any, dict[str, dict]]] = {}

    def directory(self) -> Path:
        """The folder that the files are in; it need not exist.

        Raises:
            OSError: there is none, as for a user who has no home directory; the message says what to do.
        """
        if self._directory is not None:
            return Path(self._directory)
        root = os.environ.get("KERAUNOS_CACHE_DIR")
        try:
            return Path(root or _users_directory()).expanduser() / self.name
        except RuntimeError:
            if root:
                raise OSError(f"KERAUNOS_CACHE_DIR is {root!r}, a home directory that does not exist") from None
            raise OSError("this user has no home directory: set KERAUNOS_CACHE_DIR to a folder") from None

    def path(self, device: str) -> Path:
        """The file for a kind of device; raises what :meth:`directory` does."""
        return self.directory() / file_name(device)

    def files(self) -> list[Path]:
        """The files that exist; raises what :meth:`directory` does."""
        return sorted(self.directory().glob("*.json"))

    def entries(self, path: Path) -> dict[str, dict]:
        """The entries of a file by key, read again only if the file has changed."""
        try:
            status = path.stat()
        except FileNotFoundError:
            return {}
        except OSError as error:
            return _unread(path, error)
        signature = status.st_mtime_ns, status.st_size, status.st_ino
        held = self._held.get(path)
        if held is None or held[0] != signature:
            held = self._held[path] = signature, self._read(path)
        return held[1]

    def find(self, key: str, device: str, config: type[Config], backward: bool = False) -> Config | str:
        """The configuration stored under ``key``, or why there is none.

        Args:
            key: as :func:`cache_key` makes it.
            device: the kind of device.
            config: the class to make of the entry.
            backward: take only what was timed and checked with its gradient.
        """
        try:
            path = self.path(device)
        except OSError as error:
            return _no_directory(error)
        entry = self.entries(path).get(key)
        return f"no entry in {path}" if entry is None else _winner(entry, config, backward)

    def put(self, key: str, device: str, entry: dict[str, Any], keep: Callable[[str], bool] = lambda key: True) -> bool:
        """Store one entry, next to those that other processes have stored meanwhile.

        Args:
            key: as :func:`cache_key` makes it.
            device: the kind of device.
            entry: as :meth:`keraunos.ops.tuner.TuneResult.to_json` makes it.
            keep: of the entries there, those whose key it accepts stay.

        Returns:
            Whether it was stored; if not, the reason was logged.
        """
        try:
            path = self.path(device)
        except OSError as error:
            _no_directory(error)
            return False
        return self._change(path, device, lambda entries: {**{k: e for k, e in entries.items() if keep(k)}, key: entry})

    def clear(self, path: Path, keep: Callable[[str], bool] = lambda key: False) -> bool:
        """Drop the entries of a file other than those whose key ``keep`` accepts; see :meth:`put` for the result."""
        return self._change(path, None, lambda entries: {k: e for k, e in entries.items() if keep(k)})

    def _change(self, path: Path, device: str | None, change: Callable[[dict], dict]) -> bool:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with _locked(path):
                data = _load_or_move_aside(path)
                data = {"schema": SCHEMA, "device": data.get("device", device), "entries": change(data["entries"])}
                _replace(path, json.dumps(data, indent=1) + "\n")
        except _FAILURES as error:
            _say(path, f"cannot be written ({_reason(error)}); what was measured is kept for this process only")
            return False
        return True

    def _read(self, path: Path) -> dict[str, dict]:
        try:
            return load(path)["entries"]
        except FileNotFoundError:
            return {}
        except OSError as error:
            return _unread(path, error)
        except ValueError as problem:
            try:
                with _locked(path):
                    return _load_or_move_aside(path)["entries"]
            except _FAILURES as error:
                _say(path, f"is not used: {problem}. It cannot be moved aside ({_reason(error)})")
                return {}


def _users_directory() -> str:
    try:
        import platformdirs
    except ImportError as error:
        raise OSError(f"platformdirs cannot be imported ({error}): install it, or set KERAUNOS_CACHE_DIR") from None
    return platformdirs.user_cache_dir("keraunos")


def file_name(device: str) -> str:
    """The name of the file for a kind of device, such as ``nvidia-h200.json``."""
    return re.sub(r"[^a-z0-9]+", "-", device.lower()).strip("-") + ".json"


def load(path: Any) -> dict[str, Any]:
    """Read a file of configurations.

    Raises:
        OSError: it cannot be read, or is no regular file.
        ValueError: it is none, or of another schema.
    """
    # A folder inside of a zip file has no paths of the file system.
    content = _content(path) if isinstance(path, Path) else path.read_bytes()
    if len(content) > MOST_BYTES:
        raise ValueError(f"it has more than {MOST_BYTES >> 20} MiB")
    try:
        data = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"it is no JSON file ({error})") from None
    schema = data.get("schema") if isinstance(data, dict) else None
    if schema != SCHEMA:
        raise ValueError(f"its schema is {reprlib.repr(schema)}; this version of keraunos reads schema {SCHEMA}")
    if _is_deep(data, _MOST_LEVELS):
        raise ValueError(f"it has values that are more than {_MOST_LEVELS} levels deep")
    entries = data.get("entries")
    if not isinstance(entries, dict) or not all(isinstance(entry, dict) for entry in entries.values()):
        raise ValueError("it has no table of entries")
    return data


def _content(path: Path) -> bytes:
    """A regular file's bytes, at most one more than are allowed.

    Anything else is only looked at: to open or to read a pipe may wait for ever, and a device may never end.
    """
    if not stat.S_ISREG(path.stat().st_mode):
        raise OSError("it is no regular file")
    # By the time it is opened it may be something else.
    with open(os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_NOCTTY", 0)), "rb") as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise OSError("it is no regular file")
        return file.read(MOST_BYTES + 1) or b""


def _is_deep(value: object, levels: int) -> bool:
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return levels == 0 or any(_is_deep(part, levels - 1) for part in parts)


def _load_or_move_aside(path: Path) -> dict[str, Any]:
    """The file's contents; the caller holds the lock, so a bad file that is found here is nobody's work in progress."""
    try:
        return load(path)
    except FileNotFoundError:
        return {"entries": {}}
    except ValueError as problem:
        aside = next(p for n in range(1, 10**9) if not (p := path.with_name(f"{path.name}.aside-{n}")).exists())
        os.rename(path, aside)
        _warn(f"{path} is not used: {problem}. Moved aside to {aside.name}")
        return {"entries": {}}


def _replace(path: Path, text: str) -> None:
    """Write a file in one step; the caller holds the lock, so other temporary files are left from killed writers."""
    if len(text) > MOST_BYTES:
        raise OSError(f"it would have more than {MOST_BYTES >> 20} MiB: see `keraunos cache clear`")
    for left in path.parent.glob(f".{path.name}.*.tmp"):
        left.unlink(missing_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}-{threading.get_ident()}.tmp")
    try:
        with open(temporary, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def _locked(path: Path) -> Any:
    import filelock

    return filelock.FileLock(path.with_name(f".{path.name}.lock"), timeout=LOCK_SECONDS, poll_interval=0.01)


def _winner(entry: dict[str, Any], config: type[Config], backward: bool) -> Config | str:
    if backward and entry.get("backward") is not True:
        return "its entry was measured without the backward"
    try:
        return config.from_json(entry["winner"])
    except (KeyError, TypeError, ValueError) as error:
        return f"its entry is no configuration ({type(error).__name__}: {error})"


def shipped_directory() -> Any:
    """The folder of the configurations shipped with the package."""
    return importlib.resources.files("keraunos") / "tuned"


@functools.cache
def _shipped_entries(file: str) -> dict[str, list[tuple[str, dict]]]:
    """For each call, ``(source hash, entry)`` of those shipped."""
    path = shipped_directory() / file
    try:
        entries = load(path)["entries"] if path.is_file() else {}
    except (OSError, ValueError) as problem:
        _warn(f"{path} is not used: {problem}")
        entries = {}
    calls: dict[str, list] = {}
    for key, entry in entries.items():
        call, source = split_key(key)
        calls.setdefault(call, []).append((source, entry))
    return calls


def find_shipped(key: str, device: str, config: type[Config], backward: bool = False) -> Config | str:
    """The configuration shipped with the package for a call, or why there is none; see :meth:`PersistentCache.find`.

    A shipped entry is found by device, platform, call and the kernel's source; the versions of keraunos and of the
    compiler in its key only say what it was measured with, so that a release does not lose what was tuned before it.
    """
    call, source = split_key(key)
    found = _shipped_entries(file_name(device)).get(call, [])
    same = [entry for its_source, entry in found if its_source == source]
    if same:
        return _winner(same[-1], config, backward)
    if found:
        return f"its entry was measured with another version of the kernel (source {found[-1][0]}, now {source})"
    return f"no entry for {device}"


def ship(key: str, device: str, entry: dict[str, Any]) -> bool:
    """Store one entry among those shipped, in place of those that other versions had for the call.

    Returns:
        Whether it was stored; if not, the reason was logged.
    """
    call, _ = split_key(key)
    shipped = PersistentCache("tuned", str(shipped_directory()))
    return shipped.put(key, device, entry, keep=lambda other: split_key(other)[0] != call)


_said: set[tuple[str, str]] = set()


def _no_directory(error: OSError) -> str:
    _say("the cache", f"is kept in memory only: {error}")
    return str(error)


def _unread(path: Path, error: OSError) -> dict[str, dict]:
    _say(path, f"cannot be read ({_reason(error)}); configurations are chosen without it")
    return {}


def _say(what: Path | str, problem: str) -> None:
    """Log a warning, once. Not warnings.warn: where warnings are errors it would fail the call."""
    if (str(what), problem) not in _said:
        _said.add((str(what), problem))
        _warn(f"{what} {problem}")


def _warn(text: str) -> None:
    # The names of files, and what is in them, may be anybody's.
    _log.warning("%s", printable(text))


def _reason(error: Exception) -> str:
    text = getattr(error, "strerror", None) or str(error)
    return text if type(error) is OSError else f"{type(error).__name__}: {text}"
