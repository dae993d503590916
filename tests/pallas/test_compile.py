"""Every kernel compiles for Hopper without a GPU, and needs no more registers and shared memory than was recorded."""

import json
import os
import subprocess
import sys

import pytest

from tests.linear_attention.cases import GPU
from tests.pallas.compile import BUDGETS, missing

pytestmark = pytest.mark.skipif(GPU, reason="needs no GPU: part of the run without --gpu")


def test_kernels_stay_within_their_budgets():
    pytest.importorskip("jax")
    if reason := missing():
        pytest.skip(reason)
    # A process of its own: what it sets must be set before jax is imported.
    command = [sys.executable, "-m", "tests.pallas.compile", "--print"]
    done = subprocess.run(
        command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found, budgets = json.loads(done.stdout), json.loads(BUDGETS.read_text())
    assert found.keys() == budgets.keys()
    for call, kernels in found.items():
        assert kernels.keys() == budgets[call].keys()
        for kernel, used in kernels.items():
            for what, most in budgets[call][kernel].items():
                assert used[what] <= most, f"{call}: {kernel}: {what} {used[what]}, budget {most}; record it if meant"
