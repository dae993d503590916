"""The text: where it comes from, how it is split, and the bigram model that the trained one has to beat."""

import hashlib
import sysconfig
import zlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from language_model import DemoError

# One file in HELD_OUT_SHARE of the standard library is held out, or that share of a single text.
LIBRARY_HELD_OUT_SHARE = 20
TEXT_HELD_OUT_SHARE = 10
# Packages which are not the library's own code: installed by the user, or tests, which are long tables in part.
_SKIPPED_FOLDERS = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"}
_LIBRARY_PROMPT = b"import os\n\n\nclass Reader:\n    def "
_PROMPT_BYTES = 64
_HELD_OUT_WINDOWS = 256
EVALUATION_BATCH = 16


@dataclass(frozen=True)
class Corpus:
    """Text as bytes, in two parts that share no file (or, of a single file, no byte).

    Args:
        name: A name of the text, for people.
        train: Bytes to learn from, uint8.
        held_out: Bytes to judge by, uint8.
        prompt: The text that generation starts from unless the user gives another.
    """

    name: str
    train: np.ndarray
    held_out: np.ndarray
    prompt: bytes

    @property
    def fingerprint(self) -> str:
        """Identifies the text and its split, so that a checkpoint is never continued on another text."""
        digest = hashlib.sha256(self.train.tobytes())
        digest.update(self.held_out.tobytes())
        return digest.hexdigest()


def python_library(folder: Path | None = None) -> Corpus:
    """Reads the sources of the Python standard library, one file in twenty held out.

    Which files are held out depends on their names alone, so it is the same on every machine and for every run.

    Args:
        folder: Where the library is; the running Python's by default.

    Raises:
        DemoError: There are no sources there.
    """
    folder = folder or Path(sysconfig.get_path("stdlib"))
    parts: dict[bool, list[bytes]] = {True: [], False: []}
    for file in sorted(folder.rglob("*.py")):
        name = file.relative_to(folder)
        if _SKIPPED_FOLDERS.isdisjoint(name.parts):
            is_held_out = zlib.crc32(name.as_posix().encode()) % LIBRARY_HELD_OUT_SHARE == 0
            parts[is_held_out].append(file.read_bytes())
    if not (parts[True] and parts[False]):
        raise DemoError(f"no Python sources under {folder} to learn from; name a text with --text FILE")
    count = len(parts[True]) + len(parts[False])
    train, held_out = (np.frombuffer(b"\n".join(parts[which]), np.uint8) for which in (False, True))
    return Corpus(f"{count} files of the Python standard library", train, held_out, _LIBRARY_PROMPT)


def text_file(path: Path, context: int) -> Corpus:
    """Reads one file; its last tenth is held out.

    Args:
        path: Any file; it is read as bytes.
        context: Bytes per training window, which both parts have to exceed.

    Raises:
        DemoError: The file is missing, unreadable or too short.
    """
    try:
        text = np.frombuffer(path.read_bytes(), np.uint8)
    except OSError as error:
        raise DemoError(f"cannot read {path}: {error.strerror}") from error
    least = TEXT_HELD_OUT_SHARE * (context + 1)
    if len(text) < least:
        raise DemoError(
            f"{path} has {len(text)} bytes; at least {least} are needed, so that the held-out tenth of it "
            f"is longer than a window of {context} bytes"
        )
    cut = len(text) - len(text) // TEXT_HELD_OUT_SHARE
    train, held_out = text[:cut], text[cut:]
    return Corpus(str(path), train, held_out, held_out[:_PROMPT_BYTES].tobytes())


def training_batch(train: np.ndarray, context: int, batch: int, seed: int, step: int) -> np.ndarray:
    """Draws the windows `[batch, context + 1]` of one step.

    They are a function of the seed and the step, so an interrupted run goes on with the windows it would have seen,
    and no generator's state has to be stored.
    """
    starts = np.random.default_rng([seed, step]).integers(0, len(train) - context, batch)
    return _windows(train, starts, context)


def held_out_windows(held_out: np.ndarray, context: int, most: int = _HELD_OUT_WINDOWS) -> np.ndarray:
    """Cuts at most `most` windows `[N, context + 1]`, spread evenly over the text; neighbours share at most a byte."""
    available = (len(held_out) - 1) // context
    count = min(most, available)
    # Whole batches: every window counts the same in the mean.
    count -= count % min(count, EVALUATION_BATCH)
    starts = context * np.linspace(0, available - 1, count).astype(np.int64)
    return _windows(held_out, starts, context)


def bigram_bits_per_byte(train: np.ndarray, windows: np.ndarray) -> float:
    """Bits per byte of a bigram model (add-one smoothing) fitted on `train`, for bytes 1.. of every window.

    These are the very bytes that the language model is asked to predict, each with at least its predecessor known.
    """
    pairs = train[:-1].astype(np.int64) * 256 + train[1:]
    counts = np.bincount(pairs, minlength=256 * 256).reshape(256, 256) + 1
    bits = np.log2(counts.sum(axis=1, keepdims=True)) - np.log2(counts)
    return float(bits[windows[:, :-1], windows[:, 1:]].mean())


def _windows(text: np.ndarray, starts: np.ndarray, context: int) -> np.ndarray:
    return text[starts[:, None] + np.arange(context + 1)].astype(np.int32)
