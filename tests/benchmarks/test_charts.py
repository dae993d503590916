"""The documentation's charts are drawn from the raw results."""

import pytest

pytest.importorskip("matplotlib")

import charts


def test_training(tmp_path):
    shapes = charts.rows()
    assert len(shapes) == 7
    assert all(1 < row["cuda"] < row["triton"] < row["fla"] for row in shapes.values())
    charts.training(tmp_path / "training.svg")
    assert "<svg" in (tmp_path / "training.svg").read_text()
