import math

import numpy as np
import pytest
from language_model import DemoError, data


def _library(folder, count):
    for i in range(count):
        (folder / f"module_{i}.py").write_text(f"value = {i}\n")
    (folder / "site-packages").mkdir()
    (folder / "site-packages" / "other.py").write_text("installed = True\n")


def test_library_is_split_by_file_in_the_same_way_everywhere(tmp_path):
    _library(tmp_path, 200)
    first, second = data.python_library(tmp_path), data.python_library(tmp_path)
    lines = [set(part.tobytes().split()) - {b"value", b"="} for part in (first.train, first.held_out)]
    assert lines[0].isdisjoint(lines[1])
    assert len(lines[0] | lines[1]) == 200
    assert 2 <= len(lines[1]) <= 30
    assert first.fingerprint == second.fingerprint
    # A further file changes nothing about where the others go.
    (tmp_path / "another.py").write_text("value = another\n")
    assert lines[1] <= set(data.python_library(tmp_path).held_out.tobytes().split())


def test_library_without_sources_is_named(tmp_path):
    with pytest.raises(DemoError, match="no Python sources under"):
        data.python_library(tmp_path)


def test_text_file_holds_out_its_last_tenth(tmp_path):
    file = tmp_path / "text"
    file.write_bytes(bytes(range(200)))
    corpus = data.text_file(file, context=10)
    assert corpus.train.tobytes() == bytes(range(180))
    assert corpus.held_out.tobytes() == bytes(range(180, 200))


@pytest.mark.parametrize("size", [0, 1, 109])
def test_text_file_too_short(tmp_path, size):
    file = tmp_path / "text"
    file.write_bytes(b"x" * size)
    with pytest.raises(DemoError, match=f"has {size} bytes; at least 110 are needed"):
        data.text_file(file, context=10)


def test_text_file_missing_or_a_folder(tmp_path):
    with pytest.raises(DemoError, match=r"cannot read .*: No such file"):
        data.text_file(tmp_path / "none", 10)
    with pytest.raises(DemoError, match=r"cannot read .*: Is a directory"):
        data.text_file(tmp_path, 10)


def test_shortest_text_file_has_a_window(tmp_path):
    file = tmp_path / "text"
    file.write_bytes(b"x" * 110)
    corpus = data.text_file(file, context=10)
    assert data.held_out_windows(corpus.held_out, 10).shape == (1, 11)
    assert data.training_batch(corpus.train, 10, 2, seed=0, step=0).shape == (2, 11)


def test_training_batches_depend_on_seed_and_step_only():
    text = np.arange(256, dtype=np.uint8).repeat(4)
    batch = data.training_batch(text, 16, 3, seed=1, step=7)
    np.testing.assert_array_equal(batch, data.training_batch(text, 16, 3, seed=1, step=7))
    assert (batch != data.training_batch(text, 16, 3, seed=1, step=8)).any()
    assert (batch != data.training_batch(text, 16, 3, seed=2, step=7)).any()


def test_training_batches_reach_both_ends():
    text = np.arange(20, dtype=np.uint8)
    seen = np.concatenate([data.training_batch(text, 16, 8, 0, step) for step in range(10)])
    assert seen.min() == 0
    assert seen.max() == 19


@pytest.mark.parametrize(("size", "count"), [(11, 1), (20, 1), (21, 2), (160, 15), (161, 16), (400, 32), (10000, 256)])
def test_held_out_windows_are_whole_batches_spread_over_the_text(size, count):
    windows = data.held_out_windows(np.zeros(size, np.uint8), 10)
    assert windows.shape == (count, 11)
    assert count % min(count, data.EVALUATION_BATCH) == 0
    starts = data.held_out_windows(np.arange(size), 10)[:, 0]
    assert len(set(starts)) == count


def test_bigram_by_hand():
    # Pairs of "abab": ab twice, ba once. Add-one over 256 bytes: p(b|a) = 3/258, p(a|b) = 2/257, p(c|b) = 1/257,
    # and after c, never seen, every byte has 1/256.
    train = np.frombuffer(b"abab", np.uint8)
    windows = np.frombuffer(b"abacba", np.uint8)[None].astype(np.int32)
    pairs = [3 / 258, 2 / 257, 1 / 258, 1 / 256, 2 / 257]
    assert data.bigram_bits_per_byte(train, windows) == pytest.approx(-sum(map(math.log2, pairs)) / 5)
    assert data.bigram_bits_per_byte(train, windows[:, :2]) == pytest.approx(-math.log2(3 / 258))


def test_bigram_of_a_constant_text_learns_it():
    train = np.zeros(100_000, np.uint8)
    assert data.bigram_bits_per_byte(train, np.zeros((1, 50), np.int32)) < 0.01
