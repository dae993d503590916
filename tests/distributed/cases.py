"""Calls whose tokens are spread over devices; 8 devices do not share their tokens evenly."""

from tests.gated_delta_rule.cases import Case as Delta
from tests.linear_attention.cases import Case

_SMALL = {"T": 83, "H": 2, "G": 1, "V": 24, "state": True}
_PACKED = {"lengths": (0, 30, 1, 0, 20, 29, 0, 13, 0), "B": 1, "state": True}

CASES = [
    Case(**_SMALL, gamma=1),
    Case(**_SMALL, gate="scalar", decay="infinite", reverse=True),
    Case(**_SMALL, gate="vector", gamma=2),
    Case(**_SMALL, gate="vector", decay="strong", reverse=True),
    Case(T=80, gate="none", dstate=False),
    Case(T=83, H=4, HQ=2, G=1, HV=4, HG=2, gate="scalar", gamma=1, state=True),
    Case(**_PACKED, gamma=1, reverse=True),
    Case(**_PACKED, gate="scalar", decay="infinite"),
    Case(**_PACKED, gate="vector", gamma=1),
    Case(**_PACKED, H=4, HQ=1, G=2, HV=4, HG=2, gate="vector", reverse=True),
]
# No sequences, or none with tokens.
EMPTY = [
    Case(B=0, gate="vector", gamma=2, state=True),
    Case(B=0, T=5, gamma=1, reverse=True),
    Case(T=0, gate="scalar", gamma=1, state=True),
    Case(lengths=(0, 0), gate="scalar", state=True, reverse=True),
]

# The gated delta rule.
_DELTA = {"T": 83, "H": 2, "G": 1, "V": 24, "state": True}
DELTA = [
    Delta(**_DELTA, norm=True),
    Delta(**_DELTA, gate="vector", beta=2.0, reverse=True),
    Delta(**_DELTA, gate="none", beta=None, keys="equal"),
    Delta(**_DELTA, gate="vector", decay=40.0),
    Delta(**_PACKED, gate="vector", norm=True, reverse=True),
    Delta(T=80, H=4, HQ=2, G=1, HV=4, HG=2, HB=1),
    Delta(**_DELTA, decay=None, reverse=True, scale=0.7, dtype="bfloat16"),
    Delta(**_PACKED, H=4, HQ=1, G=2, HV=4, HG=2, beta=2.0),
    Delta(**_PACKED, gate="none", beta=1.0, reverse=True),
    Delta(lengths=(0, 3, 0, 90), gate="vector", decay=None, state=True),
]
EMPTY_DELTA = [
    Delta(B=0, gate="vector", state=True),
    Delta(B=0, T=5, reverse=True),
    Delta(T=0, state=True),
    Delta(lengths=(0, 0), state=True, reverse=True),
]
