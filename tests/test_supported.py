"""docs/supported.md says what the platforms say."""

import pytest

from tests.supported import FRAMEWORKS, PAGE, columns, gpus, read

OPERATIONS = "lightning_attention", "gla_attention", "gated_delta_rule", "attention"


@pytest.mark.parametrize("operation", OPERATIONS)
def test_the_page_says_what_the_platforms_say(operation):
    written = read(PAGE.read_text())[operation]
    found = columns(operation)
    assert found
    for (platform, framework), answers in found.items():
        head = f"`{platform}`, {FRAMEWORKS[framework]}"
        said = written[f"`{platform}`"] if f"`{platform}`" in written else written[head]
        assert said == answers, f"{head}: run python -m tests.supported to write the page"


def test_the_page_says_what_was_run_and_what_was_compiled():
    assert "\n".join(gpus()) in PAGE.read_text(), "run python -m tests.supported"
