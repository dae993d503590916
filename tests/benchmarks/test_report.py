"""The page that is made from what was measured."""

import json

import report


def test_the_committed_page_has_the_committed_results():
    text = report.PAGE.read_text()
    assert text == report.page(text), "run: python benchmarks/report.py"


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
    both = case | {"pass": "forward+backward", "contestants": {"triton (torch)": contestant("triton", 0.0025)}}
    about = dict.fromkeys(("keraunos", "torch", "jax", "triton", "jax-triton", "fla-core", "driver", "python"), "1.2.3")
    about |= {"device": "NVIDIA X", "date": "2026-01-02", "copy_bandwidth": 4.2e12}
    section = {
        "about": about, "cases": [case, both], "first_calls": [], "left_out": [{"workload": "w", "reason": "no time"}],
        "equalities": {"jax_equals_torch": True, "reruns_equal": False},
    }
    (tmp_path / "nvidia-x.json").write_text(json.dumps({"gla_attention": section}))
    page = report.page("<!-- measured: python benchmarks/report.py -->\nold\n<!-- end -->\nprose", tmp_path)
    assert "old" not in page
    for expected in ("`gla_attention`", "NVIDIA X, 2026-01-02:", "| 1,8192,64 | 1.50; 2.50 | 6.00; |", "prose"):
        assert expected in page
