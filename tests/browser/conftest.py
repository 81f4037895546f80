"""Chromium for the tests of this folder; without Playwright they are not even collected."""

import importlib.util

import pytest

# Chromium's processes and pipes may outlive Playwright's own end by a moment.
NEEDED = ("playwright", "axe_playwright_python", "zxingcpp")
if any(importlib.util.find_spec(name) is None for name in NEEDED):
    collect_ignore_glob = ["test_*.py"]
else:
    from playwright.sync_api import expect, sync_playwright

    from browser import kit

    expect.set_options(timeout=kit.WAIT_MS)

    @pytest.fixture(scope="session")
    def browser():
        with sync_playwright() as playwright:
            found = playwright.chromium.launch(executable_path=kit.chromium(), args=kit.FLAGS)
            yield found
            found.close()

    @pytest.fixture
    def chromium(browser):
        """Open visits; at the end of the test no page may have done what it must not."""
        opened = kit.Chromium(browser)
        yield opened
        opened.close()
        opened.check()
