"""The cache on disk: many writers, killed writers, and files and disks that are broken."""

import errno
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading

import hypothesis
import jax.numpy as jnp
import pytest
from hypothesis import strategies as st

from keraunos.ops import Config, PersistentCache
from keraunos.ops import cache as cache_module

from .toy import SLOW, choose, executor, planted

ENTRY = {"winner": {"block_q": 16}, "backward": False, "measurements": []}

WRITE = """
import sys
from keraunos.ops import PersistentCache
store, writer, count = PersistentCache("", sys.argv[1]), sys.argv[2], int(sys.argv[3])
for i in range(count):
    assert store.put(f"writer {writer} | entry {i}", "some device", {"winner": {"block_q": 16}, "measurements": []})
"""
KILLED = """
import os, signal, sys
from keraunos.ops import PersistentCache
setattr(os, sys.argv[2], lambda *args: os.kill(os.getpid(), signal.SIGKILL))
PersistentCache("", sys.argv[1]).put("lost", "some device", {"winner": {"block_q": 16}})
"""


@pytest.fixture(autouse=True)
def _say_everything_again():
    cache_module._said.clear()


@pytest.fixture
def store(tmp_path):
    return PersistentCache("", tmp_path)


def python(code, *arguments):
    return subprocess.Popen([sys.executable, "-c", code, *map(str, arguments)], cwd=os.getcwd())


def find(store, key="a"):
    return store.find(key, "some device", Config)


def test_what_is_put_is_found(store, tmp_path):
    assert find(store) == f"no entry in {tmp_path / 'some-device.json'}"
    assert store.put("a", "some device", ENTRY)
    assert find(store) == Config(block_q=16)
    assert PersistentCache("", tmp_path).find("a", "some device", Config) == Config(block_q=16)
    assert [p.name for p in store.files()] == ["some-device.json"]
    data = json.loads((tmp_path / "some-device.json").read_text())
    assert (data["schema"], data["device"]) == (1, "some device")


def test_the_environment_names_the_folder(monkeypatch, tmp_path):
    monkeypatch.setenv("KERAUNOS_CACHE_DIR", str(tmp_path))
    assert PersistentCache("configurations").path("NVIDIA H200") == tmp_path / "configurations" / "nvidia-h200.json"


def test_the_users_cache_directory_is_the_default(monkeypatch):
    platformdirs = pytest.importorskip("platformdirs")
    monkeypatch.delenv("KERAUNOS_CACHE_DIR", raising=False)
    assert str(PersistentCache("configurations").directory()).startswith(platformdirs.user_cache_dir("keraunos"))


def test_neither_importing_nor_making_an_executor_touches_the_disk(tmp_path):
    code = "import keraunos; keraunos.create_default_executor()"
    environment = {**os.environ, "KERAUNOS_CACHE_DIR": str(tmp_path / "new")}
    subprocess.run([sys.executable, "-c", code], env=environment, check=True)
    assert not list(tmp_path.iterdir())


def test_it_is_read_again_only_when_it_has_changed(store, tmp_path, monkeypatch):
    store.put("a", "some device", ENTRY)
    reads = []
    load = cache_module.load
    monkeypatch.setattr(cache_module, "load", lambda path: (reads.append(path), load(path))[1])
    find(store), find(store), find(store, "b")
    assert len(reads) == 1
    PersistentCache("", tmp_path).put("b", "some device", ENTRY)
    before = len(reads)
    assert find(store, "b") == Config(block_q=16)
    assert len(reads) == before + 1


def test_eight_processes_write_at_once_while_a_reader_looks(store, tmp_path):
    # Fewer entries than benchmarks/concurrency.py writes, the same code.
    path, stop, seen = tmp_path / "some-device.json", threading.Event(), []

    def look():
        while not stop.is_set():
            if path.exists():
                seen.append(len(cache_module.load(path)["entries"]))

    reader = threading.Thread(target=look)
    reader.start()
    writers = [python(WRITE, tmp_path, n, 12) for n in range(8)]
    codes = [writer.wait() for writer in writers]
    stop.set()
    reader.join()
    assert codes == [0] * 8
    assert set(store.entries(path)) == {f"writer {n} | entry {i}" for n in range(8) for i in range(12)}
    assert seen
    assert seen == sorted(seen), "an entry was there and then was not"
    assert [p.name for p in tmp_path.iterdir() if "aside" in p.name or p.suffix == ".tmp"] == []


@pytest.mark.parametrize("where", ["fsync", "replace"])
def test_a_writer_killed_in_the_middle_loses_nothing(store, tmp_path, where):
    store.put("a", "some device", ENTRY)
    assert python(KILLED, tmp_path, where).wait() == -signal.SIGKILL
    assert [p.name for p in tmp_path.iterdir() if p.suffix == ".tmp"], "it was not in the middle"
    fresh = PersistentCache("", tmp_path)
    assert find(fresh) == Config(block_q=16)
    assert fresh.put("b", "some device", ENTRY), "the lock of the dead is free"
    assert find(fresh, "b") == find(fresh) == Config(block_q=16)
    assert not [p.name for p in tmp_path.iterdir() if p.suffix == ".tmp"]


BROKEN = {
    "corrupt": (b'{"schema": 1, "entries": {\x00}}', "it is no JSON file"),
    "not text": (b"\xff\xfe\x00\x01", "it is no JSON file"),
    "empty": (b"", "it is no JSON file"),
    "foreign": (b"[1, 2, 3]", "its schema is None"),
    "newer": (b'{"schema": 99, "entries": {}}', "its schema is 99; this version of keraunos reads schema 1"),
    "no entries": (b'{"schema": 1, "entries": [1]}', "it has no table of entries"),
    "bad entries": (b'{"schema": 1, "entries": {"a": 1}}', "it has no table of entries"),
    "too deep": (b'{"schema": 1, "entries": {"a": {"b": ' + b"[" * 40 + b"]" * 40 + b"}}}", "more than 32 levels deep"),
    "a long schema": (b'{"schema": "' + b"x" * 99999 + b'"}', "its schema is 'xxxxxxxxxxxx...xxxxxxxxxxxxx'; this"),
}


@pytest.mark.parametrize("fault", [*BROKEN, "truncated"])
@pytest.mark.parametrize("first", ["find", "put"])
def test_a_broken_file_is_reported_and_moved_aside(store, tmp_path, caplog, fault, first):
    path = tmp_path / "some-device.json"
    if fault == "truncated":
        store.put("a", "some device", ENTRY)
        content, reason = path.read_bytes()[:-20], "it is no JSON file"
    else:
        content, reason = BROKEN[fault]
    for n in (1, 2):
        path.write_bytes(content)
        caplog.clear()
        if first == "find":
            assert "no entry" in find(store)
        assert store.put("b", "some device", ENTRY)
        assert find(store, "b") == Config(block_q=16)
        assert len(caplog.records) == 1
        assert f"{path} is not used: " in caplog.text
        assert reason in caplog.text
        assert f"Moved aside to some-device.json.aside-{n}" in caplog.text
        assert (tmp_path / f"some-device.json.aside-{n}").read_bytes() == content


def test_a_broken_entry_is_passed_over_and_the_others_are_used(store):
    store.put("a", "some device", ENTRY)
    store.put("b", "some device", {"winner": {"block_q": 17}})
    store.put("c", "some device", {"winner": {"block_r": 16}})
    assert "block_q is 17; expected a power of two" in find(store, "b")
    assert "unknown fields ['block_r']" in find(store, "c")
    assert find(store) == Config(block_q=16)


@pytest.mark.parametrize(
    ("function", "number", "text"),
    [
        ("fsync", errno.ENOSPC, "No space left on device"),
        ("replace", errno.EACCES, "Permission denied"),
        ("open", errno.EROFS, "Read-only file system"),
    ],
)
def test_a_disk_that_is_full_or_read_only_is_one_warning(store, tmp_path, monkeypatch, caplog, function, number, text):
    store.put("a", "some device", ENTRY)

    def fail(*args, **kwargs):
        raise OSError(number, os.strerror(number))

    # open is what makes the lock file.
    monkeypatch.setattr(os, function, fail)
    assert not store.put("b", "some device", ENTRY)
    assert not store.put("c", "some device", ENTRY)
    monkeypatch.undo()
    assert len(caplog.records) == 1
    assert "some-device.json cannot be written (" in caplog.text
    assert text in caplog.text
    assert find(store) == Config(block_q=16)
    assert not [p for p in tmp_path.iterdir() if p.suffix == ".tmp"]
    assert store.put("b", "some device", ENTRY)


def test_a_folder_that_cannot_be_made_is_one_warning_each(caplog):
    store = PersistentCache("", "/dev/null/keraunos")
    for _ in range(2):
        assert "no entry" in find(store)
        assert not store.put("a", "some device", ENTRY)
    assert len(caplog.records) == 2
    assert "cannot be read" in caplog.text
    assert "cannot be written" in caplog.text


def no_home(monkeypatch):
    """A user of a container: neither HOME nor an entry in the list of users."""
    pwd = pytest.importorskip("pwd")

    def unknown(user):
        raise KeyError(user)

    for name in ("HOME", "XDG_CACHE_HOME", "KERAUNOS_CACHE_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", unknown)


NO_DIRECTORY = {
    "no home": (no_home, "this user has no home directory: set KERAUNOS_CACHE_DIR to a folder"),
    "no such user": (
        lambda patch: patch.setenv("KERAUNOS_CACHE_DIR", "~nosuchuser/x"),
        "KERAUNOS_CACHE_DIR is '~nosuchuser/x', a home directory that does not exist",
    ),
    "no platformdirs": (
        lambda patch: (patch.delenv("KERAUNOS_CACHE_DIR", raising=False),
                       patch.setitem(sys.modules, "platformdirs", None)),
        "install it, or set KERAUNOS_CACHE_DIR",
    ),
}


@pytest.mark.parametrize("why", NO_DIRECTORY)
def test_without_a_directory_calls_run_and_are_tuned_in_memory(why, monkeypatch, caplog):
    break_it, reason = NO_DIRECTORY[why]
    break_it(monkeypatch)
    with planted({64: {"work": SLOW}, 32: {}}) as toy:
        run = executor()
        run.chain.persistent = PersistentCache("configurations")
        assert choose(run, toy, jnp.ones((2, 32))).tier == "autotune"
        choice = choose(run, toy, jnp.ones((2, 32)))
        assert (choice.tier, choice.cfg.block_q) == ("memory", 32)
        assert reason in choose(run, toy, jnp.ones((2, 64))).missed["disk"]
        run(toy, jnp.ones((2, 32)))
    assert len(caplog.records) == 1
    assert "the cache is kept in memory only" in caplog.text
    assert reason in caplog.text


@pytest.mark.parametrize("why", NO_DIRECTORY)
def test_who_asks_for_the_directory_is_told_why_there_is_none(why, monkeypatch):
    break_it, reason = NO_DIRECTORY[why]
    break_it(monkeypatch)
    store = PersistentCache("configurations")
    for ask in (store.directory, store.files, lambda: store.path("cpu")):
        with pytest.raises(OSError, match=re.escape(reason)):
            ask()


def test_without_filelock_nothing_is_stored_and_that_is_one_warning(store, tmp_path, monkeypatch, caplog):
    monkeypatch.setitem(sys.modules, "filelock", None)
    assert not store.put("a", "some device", ENTRY)
    (tmp_path / "other-device.json").write_text("{")
    assert "no entry" in store.find("a", "other device", Config)
    assert not store.clear(tmp_path / "some-device.json")
    assert len(caplog.records) == 2
    assert caplog.text.count("ModuleNotFoundError") == 2


def irregular(path, kind):
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    else:
        path.symlink_to(kind)


@pytest.mark.timeout(20)
@pytest.mark.parametrize("kind", ["pipe", "folder", "/dev/zero", "/dev/full", "/dev/null"])
def test_what_is_no_regular_file_is_neither_read_nor_written(store, tmp_path, caplog, kind):
    path = tmp_path / "some-device.json"
    irregular(path, kind)
    for _ in range(2):
        assert "no entry" in find(store)
        assert not store.put("a", "some device", ENTRY)
        assert not store.clear(path)
    assert len(caplog.records) == 2
    assert "cannot be read (it is no regular file)" in caplog.text
    assert "cannot be written (it is no regular file)" in caplog.text
    assert [p.name for p in tmp_path.iterdir() if not p.name.startswith(".")] == ["some-device.json"]
    assert path.is_symlink() == kind.startswith("/dev")


@pytest.mark.timeout(20)
def test_a_file_that_becomes_a_pipe_while_it_is_opened_does_not_block(tmp_path, monkeypatch):
    path, other = tmp_path / "some-device.json", tmp_path / "regular"
    os.mkfifo(path)
    other.write_text("{}")
    look = os.stat
    monkeypatch.setattr(os, "stat", lambda p, *a, **k: look(other if p == path else p, *a, **k))
    with pytest.raises(OSError, match="no regular file"):
        cache_module.load(path)


def test_a_file_that_is_too_large_is_moved_aside_and_none_is_made(store, tmp_path, monkeypatch, caplog):
    store.put("a", "some device", ENTRY)
    monkeypatch.setattr(cache_module, "MOST_BYTES", 300)
    assert not store.put("b", "some device", {"winner": {}, "note": "x" * 300})
    assert "it would have more than" in caplog.text
    assert find(store) == Config(block_q=16)
    (tmp_path / "some-device.json").write_text(" " * 301)
    assert "no entry" in find(store)
    assert "it has more than" in caplog.text
    assert (tmp_path / "some-device.json.aside-1").exists()


def test_no_escapes_of_a_files_name_are_logged(tmp_path, caplog):
    (tmp_path / "\x1b[31m").mkdir()
    (tmp_path / "\x1b[31m" / "cpu.json").write_text("{")
    assert "no entry" in PersistentCache("", tmp_path / "\x1b[31m").find("a", "cpu", Config)
    assert "is not used" in caplog.text
    assert "\x1b" not in caplog.text


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.just({"block_q": 16}),
    lambda some: (
        st.lists(some, max_size=3)
        | st.dictionaries(st.sampled_from(["winner", "backward", "block_q", "platform"]) | st.text(max_size=4), some)
    ),
    max_leaves=12,
)
ENTRIES = st.dictionaries(st.just("a") | st.text(max_size=8), st.dictionaries(st.just("winner"), JSON) | JSON)


@hypothesis.given(st.binary() | st.builds(json.dumps, JSON | st.fixed_dictionaries({"schema": st.just(1), "entries":
                  ENTRIES | JSON})).map(str.encode), st.booleans())
@hypothesis.settings(max_examples=150, deadline=None)
def test_whatever_is_in_the_file_no_call_fails(content, backward):
    with tempfile.TemporaryDirectory() as folder:
        store = PersistentCache("", folder)
        store.path("some device").write_bytes(content)
        assert isinstance(store.find("a", "some device", Config, backward), Config | str)
        assert store.put("b", "some device", ENTRY)
        assert find(store, "b") == Config(block_q=16)


def test_a_broken_file_that_cannot_be_moved_is_left_alone(store, tmp_path, monkeypatch, caplog):
    path = tmp_path / "some-device.json"
    path.write_text("{")

    def fail(*args, **kwargs):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(os, "rename", fail)
    assert "no entry" in find(store)
    assert "cannot be moved aside" in caplog.text
    assert not store.put("a", "some device", ENTRY)
    assert path.read_text() == "{"


def test_a_lock_that_is_held_too_long_is_one_warning(store, tmp_path, monkeypatch, caplog):
    store.put("a", "some device", ENTRY)
    monkeypatch.setattr(cache_module, "LOCK_SECONDS", 0.05)
    with cache_module._locked(tmp_path / "some-device.json"):
        assert not PersistentCache("", tmp_path).put("b", "some device", ENTRY)
    assert len(caplog.records) == 1
    assert "Timeout" in caplog.text
    assert set(store.entries(tmp_path / "some-device.json")) == {"a"}


def test_clear_drops_what_is_not_kept(store, tmp_path):
    for key in ("gla | 1", "gla | 2", "toy | 1"):
        store.put(key, "some device", ENTRY)
    path = tmp_path / "some-device.json"
    assert store.clear(path, keep=lambda key: key.startswith("gla"))
    assert set(store.entries(path)) == {"gla | 1", "gla | 2"}
    assert store.clear(path)
    assert not store.entries(path)


def test_every_shipped_file_can_be_read():
    from keraunos.kernels import kernel_registry

    for file in cache_module.shipped_directory().iterdir():
        if file.name.endswith(".json"):
            data = cache_module.load(file)
            assert file.name == cache_module.file_name(data["device"])
            for key, entry in data["entries"].items():
                assert isinstance(Config.from_json(entry["winner"]), Config)
                assert kernel_registry.rows(key.split(" | ")[2]), f"{file.name} is for an operation that is not there"
