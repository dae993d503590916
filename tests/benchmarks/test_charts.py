"""The documentation's charts are drawn from the raw results."""

import pytest

pytest.importorskip("matplotlib")

import charts


def test_rows_of_training():
    shapes = charts.rows()
    assert len(shapes) == 7
    assert all(1 < row["cuda"] < row["triton"] < row["fla"] for row in shapes.values())


@pytest.mark.parametrize("draw", [charts.training, charts.serving, charts.softmax, charts.devices])
def test_a_chart_is_drawn_and_committed(draw, tmp_path):
    draw(tmp_path / "chart.svg")
    assert "<svg" in (tmp_path / "chart.svg").read_text()
    assert (charts.ROOT / "docs" / "charts" / f"{draw.__name__}.svg").exists()
