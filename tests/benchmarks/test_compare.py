"""`benchmarks/compare.py` and what it is made of: workloads, contestants, their check, their time, tables and plots."""

import io
import json
import sys
import time

import compare
import contestants
import correctness
import measuring
import output
import pytest
import workloads
from rich.console import Console
from workloads import Shape, Workload

TINY = ("--dtype", "float32", "--rounds", "2")


@pytest.fixture
def run(monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("KERAUNOS_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(measuring, "_MOST_SETS", 2)

    def invoke(*arguments, code=0):
        try:
            status = compare.main(arguments)
        except SystemExit as ended:
            status = ended.code
        printed = capsys.readouterr()
        assert status == code, printed
        return printed.out + printed.err

    return invoke


def test_table_json_and_plot(run, tmp_path):
    printed = run(
        "lightning_attention", "--shapes", "1,40,1,16,8", "--against", "fla", "torch", *TINY,
        "--platforms", "xla", "--out", str(tmp_path / "out" / "b.json"), "--plot", str(tmp_path / "drawn" / "b.png"),
    )
    for expected in (
        "xla (jax)",
        "torch (torch)",
        "lightning_attention 1,40,1,16,8 float32 forward+backward\n",
    ):
        assert expected in printed
    heads = [line.split() for line in printed.splitlines() if line.startswith("contestant")]
    assert heads == [["contestant", "ms", "floor", "torch", "µs", "ms", "peak", "error", "s"]] * 2
    # One reason for all tables and frameworks.
    assert printed.count("fla (torch) ") == 1
    results = json.loads((tmp_path / "out" / "b.json").read_text())["lightning_attention"]
    assert {"device", "jax", "torch", "triton", "fla-core", "driver", "date", "copy_bandwidth"} <= results[
        "about"
    ].keys()
    assert [case["pass"] for case in results["cases"]] == ["forward", "forward+backward"]
    for case in results["cases"]:
        assert case["floor_s"] == case["bytes_moved"] / results["about"]["copy_bandwidth"]
        # One that cannot run stays in the table, with its reason.
        assert case["contestants"]["fla (torch)"]["skipped"] in ("fla-core is not installed", "needs a GPU")
        for label in ("xla (jax)", "torch (torch)"):
            found = case["contestants"][label]
            assert found["median_s"] > 0
            assert min(found["host_s"], found["latency_s"], found["in_a_row_s"], found["first_call_s"]) > 0
            assert ("dvalue" in found["errors"]) == (case["pass"] != "forward")
    assert (tmp_path / "drawn" / "b.png").read_bytes().startswith(b"\x89PNG")


def case(**more):
    """One measured workload: three that were timed, and three that were not."""

    def timed(name, framework, seconds, **other):
        figures = dict.fromkeys(("host_s", "in_a_row_s", "first_call_s"), seconds) | {"peak_ratio": 1.43} | other
        return {"name": name, "framework": framework, "median_s": seconds, "errors": {"output": 2.1e-3}, **figures}

    reason = "takes head dims up to 128; [the call] has K = 256, V = 256, " + "and so on " * 8
    found = [
        *({"name": "cuda", "framework": framework, "skipped": reason} for framework in ("jax", "torch")),
        timed("xla", "jax", 0.0018), timed("torch", "torch", 321.5, host_s=0.4321, peak_ratio=None, note="timed once"),
        timed("cudnn", "jax", 0.0014), {"name": "sdpa", "framework": "torch", "skipped": "needs \x1b[31m a GPU"},
    ]
    return {
        "operation": "attention", "variant": "shared-special", "dtype": "bfloat16", "pass": "forward+backward",
        "shape": {"B": 1, "T": 65536, "H": 64, "K": 128, "V": 256}, "floor_s": 3.8e-4, "bytes_moved": 294900,
        "contestants": {f"{one['name']} ({one['framework']})": one for one in found}, **more,
    }


@pytest.mark.parametrize("columns", [80, 100])
def test_results_fit_into_terminals_and_reasons_stand_below(columns):
    console, shown_before = Console(width=columns, record=True, file=io.StringIO(), markup=False), set()
    console.print(output.show(case(), ["cudnn", "xla", "sdpa"], shown_before))
    text = console.export_text(clear=True)
    assert max(map(len, text.splitlines())) <= columns
    assert "…" not in text
    assert "\x1b" not in text
    table, _, below = text.partition("\n\nNot measured:")
    rows = [line.split() for line in table.splitlines()]
    # The fastest first; of those to compare with only who was measured.
    assert ["contestant", "ms", "floor", "cudnn", "xla", "µs", "ms", "peak", "error", "s"] in rows
    assert [row[0] for row in rows[-3:]] == ["cudnn", "xla", "torch"]
    assert "(torch) 321,500 846,053 0.00 0.00 432,100 321,500 2.1e-03 321.5" in " ".join(rows[-1])
    assert "cuda" not in table
    words = " ".join(below.split())
    assert words.count("cuda (jax, torch) takes head dims up to 128; [the call] has K = 256") == 1
    assert "sdpa (torch) needs ·[31m a GPU" in words
    assert "torch (torch) timed once" in words
    console.print(output.show(case(), [], shown_before))
    again = console.export_text()
    assert "torch (torch)" in again
    assert "cuda" not in again, "a reason is shown once"


def drawn(monkeypatch, path, cases):
    """The figure that is saved for some cases."""
    from matplotlib.figure import Figure

    figures = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *_, **__: figures.append(figure))
    about = {"device": "NVIDIA X", "keraunos": "1.0", "jax": "0.9", "torch": None, "date": "2026-01-02"}
    output.plot({"about": about, "cases": cases}, path)
    figures[0].draw_without_rendering()
    return figures[0]


def test_the_plot_is_linear_and_says_where_and_when_it_was_measured(monkeypatch, tmp_path):
    reason = "RESOURCE_EXHAUSTED: Out of $memory$ while trying to allocate 17179869184 bytes. " * 3
    failed = {"name": "cudnn", "framework": "jax", "skipped": reason}
    some = case(shape=case()["shape"] | {"T": 8})
    some["contestants"] |= {"cudnn (jax)": failed, "cuda (jax)": failed | {"name": "cuda", "wrong": True}}
    figure = drawn(monkeypatch, tmp_path / "b.png", [case(), some, case(**{"pass": "forward"})])
    assert [axes.get_title(loc="left") for axes in figure.axes] == [
        "attention shared-special forward+backward", "attention shared-special forward",
    ]
    for axes in figure.axes:
        assert (axes.get_xscale(), axes.get_xlim()[0]) == ("linear", 0)
        assert axes.get_xlabel() == "time over the floor; lower is better"
    first = figure.axes[0]
    assert [label.get_text() for label in first.get_yticklabels()] == ["1,65536,64,128,256", "1,8,64,128,256"]
    texts = [text.get_text() for text in first.texts]
    assert {"4.7", "846,053", "3.7", " the floor"} <= set(texts)
    # One that was timed elsewhere gives the reason next to its missing bar; below stand those that never were.
    assert any(text.startswith("RESOURCE_EXHAUSTED: Out of $memory$") for text in texts)
    caption = " ".join(text.get_text() for text in figure.texts).replace("\n", " ")
    assert "NVIDIA X, bfloat16, keraunos 1.0, jax 0.9, 2026-01-02" in caption
    assert "Not timed: cuda (jax), cuda (torch): takes head dims up to 128; [the call] has K = 256" in caption
    assert "Not timed: sdpa (torch): needs ·[31m a GPU" in caption
    assert [text.get_text() for text in figure.legends[0].texts] == ["xla (jax)", "torch (torch)", "cudnn (jax)"]
    for axes in figure.axes:
        boxes = [text.get_window_extent() for text in axes.texts]
        assert not any(a.overlaps(b) for i, a in enumerate(boxes) for b in boxes[:i])
    for text in (*figure.texts, *figure.legends[0].texts, *(text for axes in figure.axes for text in axes.texts)):
        box = text.get_window_extent()
        assert figure.bbox.x0 <= box.x0 < box.x1 <= figure.bbox.x1, text
        assert figure.bbox.y0 <= box.y0 < box.y1 <= figure.bbox.y1, text


@pytest.mark.parametrize("many", [1, 4, 9])
def test_labels_of_a_plot_do_not_overlap(many, monkeypatch, tmp_path):
    found = {f"p{i} (jax)": {"name": f"p{i}", "framework": "jax", "median_s": 4e-4 + 1e-6 * i} for i in range(many)}
    figure = drawn(monkeypatch, tmp_path / "b.svg", [case(contestants=found)])
    boxes = [text.get_window_extent() for text in figure.axes[0].texts]
    assert len(boxes) == many + 1
    assert not any(a.overlaps(b) for i, a in enumerate(boxes) for b in boxes[:i])
    assert len({bar.get_facecolor() for bar in figure.axes[0].patches}) == min(many, 8)


def test_a_plot_without_times_has_the_reasons(monkeypatch, tmp_path):
    figure = drawn(monkeypatch, tmp_path / "b.svg", [case(contestants={"a (jax)": {"name": "a", "skipped": "broken"}})])
    assert "Not timed: a (jax): broken" in figure.texts[0].get_text()


def test_without_times_there_is_no_table():
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(output.show(case(contestants={"sdpa (torch)": case()["contestants"]["sdpa (torch)"]}), [], set()))
    text = console.export_text()
    assert "contestant" not in text
    assert "Not measured:" in text


def test_variants_of_attention(run, tmp_path):
    run("attention", "--shapes", "1,24,8,16", "--variants", "shared-special", "shared", "--backward", *TINY,
        "--against", "cudnn", "--platforms", "xla", "torch", "--out", str(tmp_path / "b.json"))
    cases = json.loads((tmp_path / "b.json").read_text())["attention"]["cases"]
    assert [case["variant"] for case in cases] == ["shared-special", "shared"]
    for case in cases:
        assert case["floor_s"] >= case["bytes_moved"] / 1e13
        assert case["contestants"]["cudnn (jax)"]["skipped"] in ("is not measured with shared-special", "needs a GPU")
        for label in ("xla (jax)", "torch (torch)"):
            assert case["contestants"][label]["errors"].keys() == {"output", "dquery", "dkey", "dvalue"}
            assert case["contestants"][label]["median_s"] > 0


def test_gates_per_token():
    work, arrays = Workload("gla_attention", Shape(1, 24, 4, 16, 16), "float32", True, "token"), 24 * 4 * 16 * 4
    assert work.bytes_moved == 11 * arrays + 3 * arrays // 16
    ours, fla = contestants.find(work.operation, ["torch"], ["fla"])
    assert correctness.check(ours, work).keys() == {"output", "dquery", "dkey", "dvalue", "dg"}
    assert fla.unsupported(work).startswith("is measured without gates per token")


def test_gates_are_as_strong_as_asked_for():
    mild, strong = (Workload("gla_attention", Shape(1, 999, 1, 16), "float32", variant=variant).inputs("torch", 0)[3]
                    for variant in ("mild", "x4"))
    assert strong.tolist() == (4 * mild).tolist()
    # The mean of log sigmoid over normal numbers is -0.806.
    assert abs(16 * mild.mean().item() + 0.806) < 0.02


def test_products_of_attention():
    def products(variant, T, backward=False):
        return Workload("attention", Shape(1, T, 8, 4, 4), "float32", backward, variant).products

    assert products("plain", 3) == 2 * 8 * 9 * 8
    assert products("causal", 3) == 2 * 8 * 6 * 8
    assert products("window", 3) == products("causal", 3)
    # All but the first 1,023 queries see 1,024 keys.
    assert products("window", 3000) == 2 * 8 * 8 * (1023 * 1024 // 2 + (3000 - 1023) * 1024)
    assert products("causal", 3, True) == products("causal", 3) * 7 // 2
    assert Workload("lightning_attention", Shape(1, 3, 8)).products == 0


@pytest.fixture(autouse=True)
def forgetful():
    correctness._check.cache_clear()


def test_the_wrong_are_not_timed(run, monkeypatch, tmp_path):
    right = contestants.Ours.function

    def wrong(self, *args):
        fn = right(self, *args)
        return (lambda *x: fn(*x) * 1.01) if self.name == "torch" else fn

    monkeypatch.setattr(contestants.Ours, "function", wrong)
    printed = run("gla_attention", "--shapes", "1,64,2,16", "--forward", *TINY, "--platforms", "xla", "torch",
                  "--out", str(tmp_path / "b.json"), code=1)
    assert "wrong: output has error 0.01" in " ".join(printed.split())
    (case,) = json.loads((tmp_path / "b.json").read_text())["gla_attention"]["cases"]
    assert "median_s" not in case["contestants"]["torch (torch)"]
    assert case["contestants"]["xla (jax)"]["median_s"] > 0


def test_a_failure_does_not_end_the_others(monkeypatch):
    right = contestants.Ours.function

    def broken(self, *args):
        if self.name == "torch":
            raise RuntimeError("out of order\nmore")
        return right(self, *args)

    monkeypatch.setattr(contestants.Ours, "function", broken)
    workload = Workload("lightning_attention", Shape(1, 16, 1, 16, 16), "float32")
    case = measuring.measure(workload, contestants.find(workload.operation, ["xla", "torch"], []), 1e9,
                             measuring.Effort(rounds=2))
    assert case["contestants"]["torch (torch)"]["skipped"] == "RuntimeError: out of order"
    assert case["contestants"]["xla (jax)"]["median_s"] > 0


def test_the_first_is_timed_again_under_load(monkeypatch):
    monkeypatch.setattr(measuring, "_UNDER_LOAD", 2)
    workload = Workload("lightning_attention", Shape(1, 16, 1, 16, 16), "float32")
    first, second = contestants.find(workload.operation, ["xla", "torch"], [])[:2]
    began = time.monotonic()
    case = measuring.measure(workload, [first, second], 1e9, measuring.Effort(rounds=2, load=0.3))
    assert time.monotonic() - began > 0.3
    assert 0 < case["contestants"][contestants.label(first)]["hot_s"] < 0.3
    assert "hot_s" not in case["contestants"][contestants.label(second)]


@pytest.mark.parametrize(
    ("operation", "backward", "units"),
    [
        ("lightning_attention", False, 4),
        ("lightning_attention", True, 11),
        ("gla_attention", False, 5),
        ("gla_attention", True, 14),
    ],
)
def test_floors(operation, backward, units):
    unit = 2 * 16384 * 64 * 128 * 2
    assert Workload(operation, Shape(2, 16384, 64), "bfloat16", backward).bytes_moved == units * unit


def test_floors_when_key_and_value_differ():
    # For each of 10 tokens and heads: query, key and gate of 4, value and output of 6, 4 bytes each.
    shape = Shape(1, 5, 2, 4, 6)
    assert Workload("gla_attention", shape, "float32").bytes_moved == 10 * 4 * (12 + 12)
    backward = 10 * 4 * ((12 + 12) + (12 + 12) + (12 + 6))
    assert Workload("gla_attention", shape, "float32", True).bytes_moved == backward
    assert Workload("gla_attention", shape, "float32", True).bytes_kept == 2 * 10 * 4 * 24


def test_shapes():
    assert Shape.parse("1,2048,64") == Shape(1, 2048, 64, 128, 128)
    assert Shape.parse("1,64,2,16") == Shape(1, 64, 2, 16, 16)
    assert Shape.parse("1,64,2,16,8") == Shape(1, 64, 2, 16, 8)
    for text in ("1,2048,64", "1,64,2,16", "1,64,2,16,8"):
        assert str(Shape.parse(text)) == text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["lightning", "--shapes", "1,2,3"], "invalid choice: 'lightning'"),
        (["gla_attention", "--shapes", "1,2"], "shape is '1,2'; expected B,T,H"),
        (["gla_attention", "--shapes", "1,0,2"], "shape is '1,0,2'; expected B,T,H"),
        (["gla_attention", "--shapes", "1,x,2"], "shape is '1,x,2'; expected B,T,H"),
        (["gla_attention", "--against", "flash"], "peer is 'flash'; expected one of fla, "),
        (["gla_attention", "--platforms", "tritom"], "platform is 'tritom'; expected one of "),
        (["gla_attention", "--plot", "bench.text"], "--plot is 'bench.text'; expected an ending such as .png"),
        (["gla_attention", "--dtype", "int8"], "--dtype: invalid choice: 'int8'"),
        (["attention", "--variants", "round"], "variant is 'round'; expected one of causal, plain"),
    ],
)
def test_what_is_wrong_is_said(run, arguments, message):
    assert message in run(*arguments, code=2)


def test_a_missing_matplotlib_is_said_before_anything_is_measured(run, monkeypatch):
    monkeypatch.setattr(measuring, "copy_bandwidth", lambda: pytest.fail("it measured"))
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert "--plot needs matplotlib: pip install 'keraunos[demo]'" in run("gla_attention", "--plot", "x.png", code=2)


def test_every_registered_platform_takes_part():
    for operation in workloads.OPERATIONS:
        op_id = Workload(operation, Shape(1, 1, 1)).kernel.op_id
        rows = contestants.kernel_registry.rows(op_id)
        assert {(c.name, c.framework) for c in contestants.find(operation, [], [])} == {
            (row.platform, framework) for row in rows for framework in row.frameworks
        }
