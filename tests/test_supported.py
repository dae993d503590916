"""docs/supported.md says what the platforms say."""

import pytest

from tests.supported import FRAMEWORKS, PAGE, columns, gpus, read


@pytest.mark.parametrize("operation", ["lightning_attention", "gla_attention", "attention"])
def test_the_page_says_what_the_platforms_say(operation):
    written = read(PAGE.read_text())[operation]
    found = columns(operation)
    assert found
    for (platform, framework), answers in found.items():
        head = f"`{platform}`, {FRAMEWORKS[framework]}"
        assert written[head] == answers, f"{head}: run python -m tests.supported to write the page"


def test_the_page_says_what_was_run_and_what_was_compiled():
    assert "\n".join(gpus()) in PAGE.read_text(), "run python -m tests.supported"
