"""The documentation's charts are drawn from the raw results."""

import pytest

pytest.importorskip("matplotlib")

import charts


@pytest.mark.parametrize("draw", [charts.training, charts.serving, charts.softmax, charts.devices])
def test_a_chart_is_drawn_and_committed(draw, tmp_path):
    draw(tmp_path / "chart.svg")
    assert "<svg" in (tmp_path / "chart.svg").read_text()
    assert (charts.ROOT / "docs" / "charts" / f"{draw.__name__}.svg").exists()
