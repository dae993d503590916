"""Every Triton kernel's values, in Triton's interpreter, against the float64 recurrence.

The interpreter is chosen when kernels are defined, so these tests run in a process of their own.
"""

import os
import subprocess
import sys

import pytest

from tests.linear_attention.cases import GPU

pytest.importorskip("torch")
pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(GPU, reason="needs no GPU: part of the run without --gpu")


# The interpreter makes loop bounds of arrays with one element.
IGNORED = "ignore:Conversion of an array:DeprecationWarning"


@pytest.mark.parametrize(
    ("segment", "tests"), [("", "not any"), ("64", "every_gate or packed or lightning")], ids=["whole", "segments"]
)
def test_values_in_the_interpreter(segment, tests):
    env = dict(os.environ, TRITON_INTERPRET="1", KERAUNOS_TEST_SEGMENT=segment)
    command = [sys.executable, "-m", "pytest", "-p", "tests.triton.interpreter", "-p", "no:cacheprovider", "-x"]
    command += ["-W", IGNORED, "-k", tests, "tests/linear_attention/test_values.py"]
    run = subprocess.run(command, env=env, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout[-4000:] + run.stderr[-2000:]
