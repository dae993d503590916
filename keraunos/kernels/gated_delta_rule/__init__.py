"""The gated delta rule: a linear recurrence whose state is corrected, not only added to."""
