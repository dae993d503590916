"""Applies the one tolerance rule of ``keraunos.numerics`` to results; no test has a tolerance of its own."""

from keraunos.numerics import bound, error


def assert_within_rule(names, got, truth, in_dtype, dtypes, scales=None):
    """Each result must be as near to the float64 truth as the rule asks; says which are not, and by how much."""
    wrong = []
    scales = scales or truth
    for name, g, t, r, dtype, scale in zip(names, got, truth, in_dtype, dtypes, scales, strict=True):
        if t is None:
            assert g is None, f"{name}: got a result, expected none"
            continue
        allowed, found = bound(r, t, dtype, scale), error(g, t, scale)
        if not found <= allowed:
            wrong.append(f"{name}: error {found:.3g} against float64; allowed {allowed:.3g}")
    assert not wrong, "; ".join(wrong)
