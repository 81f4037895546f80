"""What can be looked at without a server: the frozen report, and runs compared."""

from pathlib import Path

import pytest
from playwright.sync_api import expect

import page_kit
from browser import kit
from fcil_server.reports import run_directory

pytestmark = [pytest.mark.browser, pytest.mark.processes]


def frozen(folder: Path, build) -> str:
    """Write a run's directory and return the address of its report."""
    folder.mkdir()
    with build(folder / "ledger.sqlite") as ledger:
        run = ledger.runs.newest().run_id
        run_directory.write(ledger, run, folder / "run", plots=False)
    return (folder / "run" / "report.html").as_uri()


def short(path: Path):
    return page_kit.long(path, rounds=400, tasks=8)


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("build", [page_kit.small, short])
def test_a_report_has_charts_and_asks_nobody_for_anything(chromium, tmp_path, build, dark):
    url = frozen(tmp_path / "f", build)
    visit = chromium.visit("file://", dark=dark)
    asked = []
    visit.page.on("request", lambda request: asked.append(request.url))
    visit.page.goto(url)
    visit.ready()
    assert visit.page.locator("figure.chart .uplot canvas").count() >= 3
    visit.shot(f"report-{build.__name__}-{'dark' if dark else 'light'}")
    assert kit.axe_faults(visit.page) == []
    assert asked == [url]


def test_a_report_is_whole_on_a_phone_and_on_paper(chromium, tmp_path):
    url = frozen(tmp_path / "f", page_kit.small)
    visit = chromium.visit("file://", size=kit.PHONE)
    visit.page.goto(url)
    visit.ready()
    visit.shot("report-phone")
    assert kit.too_wide(visit.page) == []
    visit.page.set_viewport_size({"width": 794, "height": 1123})  # A4
    visit.page.emulate_media(media="print")
    visit.shot("report-print")
    assert kit.too_wide(visit.page) == []
    expect(visit.page.locator("figure.chart svg").first).to_be_visible()
    pages = visit.page.pdf(path=kit.ARTEFACTS / "report.pdf", format="A4")
    assert len(pages) > 10_000


def test_a_report_without_scripts_shows_its_charts_too(chromium, tmp_path):
    url = frozen(tmp_path / "f", page_kit.small)
    visit = chromium.visit("file://", java_script_enabled=False)
    visit.page.goto(url)
    assert visit.page.locator("figure.chart svg:visible").count() >= 3
    visit.shot("report-no-scripts")


def test_two_runs_are_compared_on_one_page(chromium, tmp_path):
    frozen(tmp_path / "other", short)
    with kit.ledger_door(
        tmp_path / "d", page_kit.small, "--beside", str(tmp_path / "other")
    ) as door:
        visit = chromium.visit(door.origin, cookie=door.cookie())
        visit.page.goto(door.origin)
        visit.ready()
        visit.page.locator("#menu summary").click()
        visit.page.locator("[data-compare]").first.click()
        dialog = visit.page.get_by_role("dialog")
        boxes = dialog.get_by_role("checkbox")
        expect(boxes).to_have_count(2)
        for k in range(2):
            boxes.nth(k).check()
        dialog.get_by_role("button", name="Compare").click()
        expect(dialog.locator("figure.chart").first).to_be_visible()
        expect(dialog).to_contain_text(page_kit.LONG_RUN)
        expect(dialog).to_contain_text(page_kit.RUN)
        expect(dialog).to_contain_text("MB")
        visit.look("compare", whole=False)
        chromium.close()
