"""The page that is made from what was measured."""

import json
from pathlib import Path

import report

ROOT = Path(__file__).parents[2]


def test_the_committed_pages_are_those_of_the_committed_results():
    assert (ROOT / "docs" / "benchmarks.md").read_text() == report.page(), "run: python benchmarks/report.py"
    assert (report.RESULTS / "details.md").read_text() == report.details(), "run: python benchmarks/report.py"
    for file in report.gpu_files():
        assert (report.RESULTS / report.plot_name(file.stem)).exists()


def test_the_page_shows_the_figures(tmp_path):
    def contestant(name, seconds):
        figures = dict.fromkeys(("host_s", "latency_s", "in_a_row_s", "peak_ratio"), 1.0)
        return {"name": name, "framework": "torch", "median_s": seconds, "errors": {"output": 0.002}, **figures}

    case = {
        "operation": "gla_attention", "shape": {"B": 1, "T": 8192, "H": 64, "K": 128, "V": 128}, "dtype": "bfloat16",
        "pass": "forward", "floor_s": 0.001, "contestants": {
            "triton (torch)": contestant("triton", 0.0015), "fla (torch)": contestant("fla", 0.006),
            "xla (jax)": {"name": "xla", "framework": "jax", "skipped": "left out"},
        },
    }
    about = dict.fromkeys(("keraunos", "torch", "jax", "triton", "jax-triton", "fla-core", "driver", "python"), "1.2.3")
    about |= {"device": "NVIDIA X", "date": "2026-01-02", "copy_bandwidth": 4.2e12}
    section = {
        "about": about, "cases": [case], "first_calls": [], "left_out": [{"workload": "w", "reason": "no time"}],
        "equalities": {"jax_equals_torch": True, "reruns_equal": False},
    }
    (tmp_path / "nvidia-x.json").write_text(json.dumps({"gla_attention": section}))
    assert "| 1,8192,64 | 1.50 | 6.00 |" in report.page(tmp_path)
    page = report.details(tmp_path)
    for expected in (
        "gla_attention on NVIDIA X", "2026-01-02; copies 4.20 TB/s", "fla-core 1.2.3",
        "| 1,8192,64 | 1.000 | 1.500 | 6.000 | 1.50 | 6.00 | 4.00 |", "xla (jax): left out (at 1,8192,64)",
        "left out: w: no time", "through JAX and PyTorch: yes; in 20 runs: no", "![", "(benchmarks-nvidia-x.png)",
        "no results from a CPU",
    ):
        assert expected in page
