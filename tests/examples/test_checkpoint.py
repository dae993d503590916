import numpy as np
import pytest
from language_model import checkpoint


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "checkpoint.npz"
    checkpoint.save(path, {"['a'][0]": np.arange(1000.0), "b": np.array(3, np.int32)}, {"step": 5, "bits": [1.5, 2.5]})
    return path


def test_round_trip(path):
    arrays, about = checkpoint.load(path)
    assert about == {"step": 5, "bits": [1.5, 2.5]}
    assert list(arrays) == ["['a'][0]", "b"]
    np.testing.assert_array_equal(arrays["['a'][0]"], np.arange(1000.0))
    assert arrays["b"].dtype == np.int32
    assert [file.name for file in path.parent.iterdir()] == ["checkpoint.npz"]


@pytest.mark.parametrize("keep", [0, 1, 100, 0.5, 0.99])
def test_part_of_a_file_is_corrupt(path, keep):
    whole = path.read_bytes()
    path.write_bytes(whole[: keep if isinstance(keep, int) else int(keep * len(whole))])
    with pytest.raises(checkpoint.CorruptCheckpointError, match="no complete checkpoint"):
        checkpoint.load(path)


def test_changed_byte_is_noticed(path):
    damaged = bytearray(path.read_bytes())
    damaged[len(damaged) // 3] ^= 1
    path.write_bytes(damaged)
    with pytest.raises(checkpoint.CorruptCheckpointError):
        checkpoint.load(path)


def test_other_files_are_corrupt(path):
    for content in (b"not a checkpoint", b"\x80\x04pickled"):
        path.write_bytes(content)
        with pytest.raises(checkpoint.CorruptCheckpointError):
            checkpoint.load(path)
    np.savez(path, other=np.arange(3))
    with pytest.raises(checkpoint.CorruptCheckpointError):
        checkpoint.load(path)
    with path.open("wb") as file:
        np.save(file, np.arange(3))
    with pytest.raises(checkpoint.CorruptCheckpointError):
        checkpoint.load(path)


def test_interrupted_write_leaves_the_old_one(path, monkeypatch):
    def interrupted(file, **arrays):
        file.write(b"half of it")
        raise KeyboardInterrupt

    monkeypatch.setattr(np, "savez", interrupted)
    with pytest.raises(KeyboardInterrupt):
        checkpoint.save(path, {"b": np.array(4)}, {"step": 6})
    assert checkpoint.load(path)[1]["step"] == 5
    assert [file.name for file in path.parent.iterdir()] == ["checkpoint.npz"]


def test_set_aside_overwrites_nothing(path):
    first = checkpoint.set_aside(path)
    path.write_bytes(b"second")
    second = checkpoint.set_aside(path)
    assert (first.name, second.name) == ("checkpoint.npz.corrupt-1", "checkpoint.npz.corrupt-2")
    assert second.read_bytes() == b"second"
    assert not path.exists()
