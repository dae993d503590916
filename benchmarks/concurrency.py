"""Eight processes write 200 entries each into one cache while a reader looks, and writers are killed on the way.

    python benchmarks/concurrency.py [--writers 8] [--entries 200] [--kills 20]

Prints how many of the entries are there afterwards, how often the reader found a whole file, and whether an entry that
was there was lost when writers were killed by SIGKILL at random moments.
"""

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from keraunos.ops.cache import PersistentCache, load

DEVICE = "some device"
WRITE = """
import sys
from keraunos.ops.cache import PersistentCache
store = PersistentCache("", sys.argv[1])
measurements = [{"config": {"block_q": 1 << n}, "microseconds": {"median": 1.0}, "rounds": 100} for n in range(5)]
entry = {"winner": {"block_q": 16}, "backward": False, "measurements": measurements}
for i in range(int(sys.argv[3])):
    if not store.put(f"{sys.argv[2]} {i}", "some device", entry):
        sys.exit(1)
"""


def writer(folder, name, entries):
    return subprocess.Popen([sys.executable, "-c", WRITE, str(folder), str(name), str(entries)])


def write_together(folder, writers, entries):
    path, start = PersistentCache("", folder).path(DEVICE), time.monotonic()
    running, reads = [writer(folder, n, entries) for n in range(writers)], 0
    while any(process.poll() is None for process in running):
        if path.exists():
            load(path)  # raises unless the file is whole
            reads += 1
    found = load(path)["entries"]
    wanted = {f"{n} {i}" for n in range(writers) for i in range(entries)}
    return {
        "writers": writers,
        "entries_written": len(wanted),
        "entries_found": len(wanted & set(found)),
        "whole_files_read_meanwhile": reads,
        "exit_codes": [process.returncode for process in running],
        "seconds": round(time.monotonic() - start, 1),
    }


def kill_writers(folder, kills):
    store, lost, left, rng = PersistentCache("", folder), 0, 0, random.Random(0)
    path = store.path(DEVICE)
    for n in range(kills):
        before = set(load(path)["entries"]) if path.exists() else set()
        process = writer(folder, f"killed {n}", 10**6)
        while not path.exists() or len(load(path)["entries"]) <= len(before):
            time.sleep(0.001)
        time.sleep(rng.random() / 20)
        seen = set(load(path)["entries"])
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        left += bool(list(Path(folder).glob(".*.tmp")))
        lost += len((before | seen) - set(load(path)["entries"]))
    store.put("last", DEVICE, {"winner": {"block_q": 16}})
    return {
        "writers_killed": kills,
        "killed_with_a_temporary_file_open": left,
        "entries_lost": lost,
        "writable_afterwards": "last" in load(path)["entries"],
        "temporary_files_left": len(list(Path(folder).glob(".*.tmp"))),
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--writers", type=int, default=8)
    parser.add_argument("--entries", type=int, default=200)
    parser.add_argument("--kills", type=int, default=20)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as one, tempfile.TemporaryDirectory() as other:
        print(json.dumps(write_together(one, arguments.writers, arguments.entries), indent=1), flush=True)
        print(json.dumps(kill_writers(other, arguments.kills), indent=1))


if __name__ == "__main__":
    main()
