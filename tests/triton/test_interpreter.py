"""Every Triton kernel's values, in Triton's interpreter, against the float64 recurrence.

The interpreter is chosen when kernels are defined, so these tests run in a process of their own.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.linear_attention.cases import GPU

pytest.importorskip("torch")
pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(GPU, reason="needs no GPU: part of the run without --gpu")


# The interpreter makes loop bounds of arrays with one element.
IGNORED = "ignore:Conversion of an array:DeprecationWarning"


VALUES = "tests/linear_attention/test_values.py"
TORCH = "tests/linear_attention/test_torch.py"
SOFTMAX = "tests/softmax_attention/test_values.py"
BLOCKS = "tests/softmax_attention/test_blocks.py"
PARTS = "tests/softmax_attention/test_parts.py"
# Files of these folders that launch no kernel of Triton here; and two whose kernels serving and DELTA run.
LEFT_OUT = ("test_builds", "test_ejkernel", "test_example", "test_hopper", "test_jax", "test_fla_delta",
            "test_transformers_delta")
TESTS = Path(__file__).parents[1]
SERVING = " ".join(f"tests/{folder}/{file.name}" for folder in ("serving", "compat")
                   for file in sorted((TESTS / folder).glob("test_*.py")) if file.stem not in LEFT_OUT)
DELTA = "tests/gated_delta_rule/test_values.py"
DELTA_DIMENSIONS = "tests/gated_delta_rule/test_dimension_gradients.py"
# Platform cuda, whose own kernels run in the emulator.
DELTA_CUDA = "tests/cuda/test_delta_rule.py"
PREFILL = "tests/serving/test_values.py tests/serving/test_torch.py"
STRETCHES = "tests/distributed/test_stretches.py"
SHARDS = "tests/distributed/test_torch_linear.py"
DELTA_SHARDS = "tests/distributed/test_torch_delta.py"
PEERS = "tests/distributed/test_peers.py"
ADDRESSES = "tests/triton/test_addresses.py"
CHIPS = "tests/triton/test_chips.py"


# A process takes seconds to begin: few, each for what is cut alike.
@pytest.mark.parametrize(("segment", "parts", "runs"), [
    # There is but one order of sums in the interpreter: it gives the same bits on every run. Chunks have groups on
    # another platform.
    ("", "", {
        VALUES: "not any and not rerun and not group", f"{SOFTMAX} {BLOCKS} {PARTS} {STRETCHES}": "test",
        PEERS: "comes",
    }),
    # Compilers see operators only, which a layer alone shows as well as its whole model, and two steps as well as four;
    # how a model generates, one kind of model.
    ("", "", {
        SERVING: "not errors and not gradients and not recurrence and not on_the_host and not compiled_model and "
                 "not without_breaks and not (one_step and (verify or commit)) and not (generate and LSL)",
        f"{ADDRESSES} {CHIPS}": "test",
    }),
    ("64", "", {
        VALUES: "every_gate or packed or lightning_options",
        # Others of its tests are about the torch platform, or about numbers that no kernel sees; and one graph of a
        # constant decay is enough.
        TORCH: "not gradcheck and not groups and not rounded and not nothing_inside and not takes_numbers and not "
               "(once_for_all and lightning) and not (promises and reverse)",
        f"{PREFILL} {SHARDS}": "every_gate and exported or parts and 65 or alike",
        DELTA_SHARDS: "whole",
    }),
    # The delta rule has parts of its own.
    ("", "1", {VALUES: "every_gate and not none or every_array and own", DELTA: "not same_bits",
               DELTA_CUDA: "per_dimension and values", DELTA_DIMENSIONS: "gradients"}),
    ("64", "1", {VALUES: "group and (scalar or strong)"}),
], ids=["linear, softmax, stretches, peers", "serving, addresses, chips", "segments", "parts, delta rule", "pairs"])
def test_in_the_interpreter(segment, parts, runs):
    env = dict(os.environ, TRITON_INTERPRET="1", KERAUNOS_TEST_PARTS=parts, KERAUNOS_TEST_SEGMENT=segment)
    tests = {file: f"({tests})" for files, tests in runs.items() for file in files.split()}
    chosen = " or ".join(" and ".join([*file.split("/")[1:], tests]) for file, tests in tests.items())
    command = [sys.executable, "-m", "pytest", "-p", "tests.triton.interpreter", "-p", "no:cacheprovider", "-x"]
    run = subprocess.run([*command, "-W", IGNORED, "-k", chosen, *tests], env=env, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout[-4000:] + run.stderr[-2000:]


PLAIN = """
import torch, keraunos
from keraunos import serving
q, k, v = (torch.randn(1, 40, 2, 16, dtype=torch.bfloat16) for _ in range(3))
g, decays = -torch.rand(1, 40, 2, 16), [-0.1, -0.2]
states, slots = torch.zeros(3, 2, 16, 16), torch.tensor([0, 2])
calls = {
    "lightning_attention": lambda **p: keraunos.lightning_attention(q, k, v, log_decay=decays, **p),
    "gla_attention": lambda **p: keraunos.gla_attention(q.float(), k.float(), v.float(), g, **p),
    "attention": lambda **p: keraunos.attention(q, k, v, causal=True, logits_soft_cap=9.0, **p),
    "decode": lambda **p: serving.decode(q[0, :2], k[0, :2], v[0, :2], states.clone(), slots, log_decay=decays, **p),
}
for name, call in calls.items():
    auto, torch_s = call(), call(platform="torch")
    assert all(map(torch.equal, *[x if isinstance(x, tuple) else (x,) for x in (auto, torch_s)])), name
    try:
        call(platform="triton")
    except keraunos.UnsupportedError as error:
        assert str(error).startswith(name) and "TRITON_INTERPRET is set" in str(error), error
    else:
        raise AssertionError(name)
"""


def test_interpreter_as_triton_has_it_is_refused():
    env = dict(os.environ, TRITON_INTERPRET="1")
    run = subprocess.run([sys.executable, "-c", PLAIN], env=env, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-2000:]
