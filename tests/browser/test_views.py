"""What the page shows of a ledger, in every way of looking at it: no server, no client runs."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import expect

import page_kit
from browser import kit
from fcil_server.ledger.ledger import LEDGER_NAME, Ledger

pytestmark = [pytest.mark.browser, pytest.mark.processes]

LEDGERS = {"small": page_kit.small, "long": page_kit.long, "crowd": page_kit.crowd}
WAYS = {
    "light": {},
    "dark": {"dark": True},
    "phone": {"size": kit.PHONE},
    "phone-dark": {"size": kit.PHONE, "dark": True},
}


@pytest.fixture(scope="module")
def doors(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, kit.Door]]:
    from contextlib import ExitStack

    with ExitStack() as stack:
        yield {
            name: stack.enter_context(kit.ledger_door(tmp_path_factory.mktemp(name), build))
            for name, build in LEDGERS.items()
        }


def come_in(chromium, door, **way) -> kit.Visit:
    visit = chromium.visit(door.origin, cookie=door.cookie(), **way)
    visit.page.goto(door.origin)
    visit.ready()
    return visit


@pytest.mark.parametrize(
    ("name", "way"),
    [*(("small", way) for way in WAYS), ("long", "light"), ("crowd", "dark"), ("crowd", "phone")],
)
def test_every_view_is_accessible_and_no_wider_than_its_window(chromium, doors, name, way):
    visit = come_in(chromium, doors[name], **WAYS[way])
    visit.shot(f"{name}-{way}")
    for section in kit.SECTIONS:
        expect(visit.section(section)).to_be_visible()
    assert kit.too_wide(visit.page) == []
    assert kit.axe_faults(visit.page) == []


def test_charts_are_drawn_and_their_numbers_are_in_a_table(chromium, doors):
    visit = come_in(chromium, doors["small"])
    figures = visit.page.locator("figure.chart")
    assert figures.count() >= 3
    for k in range(figures.count()):
        figure = figures.nth(k)
        expect(figure.locator(".uplot canvas").first).to_be_visible()
        figure.locator("details.as-table summary").click()
        assert figure.locator("details.as-table tbody tr").count() > 0


def test_the_accuracy_matrix_is_a_table_with_the_numbers_of_the_ledger(chromium, doors):
    visit = come_in(chromium, doors["small"])
    for number in ("90.0", "70.0", "80.0", "60.0", "85.0", "95.0"):
        expect(visit.section("accuracy").locator("table.heat")).to_contain_text(number)


def test_hostile_names_are_shown_as_they_are_and_do_nothing(chromium, doors):
    visit = come_in(chromium, doors["crowd"])
    clients = visit.section("clients")
    find = clients.locator("input[name=find]")
    for name in page_kit.HOSTILE_NAMES[:9]:
        find.fill(name)
        find.press("Enter")
        expect(clients).to_contain_text(" ".join(name.split()))
    assert visit.page.locator("img[src='x'], section script:not(.spec)").count() == 0


def test_a_thousand_clients_are_shown_in_pages_and_found_by_name(chromium, doors):
    visit = come_in(chromium, doors["crowd"])
    clients = visit.section("clients")
    assert clients.locator("tbody tr").count() <= 50
    # One name of 128 characters does not push what is told of all clients out of the window.
    updates = clients.locator("thead th").filter(has_text="updates").bounding_box()
    assert updates is not None
    assert updates["x"] + updates["width"] < kit.DESK[0]
    clients.locator("input[name=find]").fill("member-0777")
    expect(clients.locator("tbody tr")).to_have_count(1)
    expect(clients).to_contain_text("member-0777")


def test_a_long_run_shows_its_last_rounds_and_all_of_it_when_asked(chromium, doors):
    visit = come_in(chromium, doors["long"])
    rounds = visit.section("rounds")
    assert rounds.locator("tbody tr").count() <= 400
    choice = rounds.locator("[name=last]")
    choice.first.select_option("all")
    expect(rounds).to_contain_text("task 0")
    assert kit.too_wide(visit.page) == []


def test_on_a_desk_what_belongs_together_stands_side_by_side(chromium, doors):
    visit = come_in(chromium, doors["small"], size=(1440, 900))

    def box(where: str) -> dict[str, float]:
        found = visit.page.locator(where).bounding_box()
        assert found is not None, where
        return found

    for left, right in (("#chart-accuracy", "#matrix"), ("#chart-bytes", "#chart-seconds")):
        one, other = box(left), box(right)
        assert one["x"] + one["width"] <= other["x"]
        assert one["y"] < other["y"] + other["height"] <= one["y"] + one["height"] + 60
    # Headlines, the present, and accuracy are seen without scrolling.
    assert box("#chart-accuracy .uplot")["y"] + box("#chart-accuracy .uplot")["height"] < 900
    assert box("#matrix")["y"] + box("#matrix")["height"] < 900
    # A name and a device are one line each.
    for row in visit.section("clients").locator("tbody tr").all():
        for cell in ("th bdi", "[data-label=device] span"):
            place = row.locator(cell).first.bounding_box()
            assert place is not None
            assert place["height"] < 30


def test_the_list_of_sections_says_where_one_is(chromium, doors):
    visit = come_in(chromium, doors["small"], size=(1440, 900))
    side = visit.page.locator("nav.side")
    here = side.locator("[aria-current]")
    expect(here).to_have_text("Overview")
    for name in ("Rounds", "Seconds", "Bytes", "Configuration", "Accuracy"):
        side.get_by_role("link", name=name).click()
        expect(here).to_have_text(name)
    visit.page.keyboard.press("Control+Home")
    expect(here).to_have_text("Overview")
    visit.page.set_viewport_size({"width": 900, "height": 900})
    expect(side).to_be_hidden()
    visit.page.locator("#menu summary").click()
    expect(visit.page.locator("#menu nav a").first).to_be_visible()


def test_a_wide_table_on_a_phone_fades_where_there_is_more_of_it(chromium, doors):
    visit = come_in(chromium, doors["small"], size=kit.PHONE)
    box = visit.page.locator(".scroll[aria-labelledby=lost-title]")
    faded = (
        "e => ['--left', '--right'].map(n => parseFloat(getComputedStyle(e).getPropertyValue(n)))"
    )
    assert box.evaluate("e => e.scrollWidth > e.clientWidth")
    assert box.evaluate(faded) == [0, 48]
    box.evaluate("e => { e.scrollLeft = e.scrollWidth; }")
    visit.page.wait_for_function(
        "e => parseFloat(getComputedStyle(e).getPropertyValue('--right')) === 0",
        arg=box.element_handle(),
    )
    assert box.evaluate(faded) == [48, 0]
    whole = visit.page.locator(".scroll[aria-label=Clients]")  # cards: no wider than the phone
    assert whole.evaluate(faded) == [0, 0]


@pytest.mark.parametrize("name", ["small", "crowd"])
def test_the_keyboard_reaches_everything(chromium, doors, name):
    visit = come_in(chromium, doors[name])
    assert kit.unreachable(visit.page) == []


def test_arrows_move_the_cursor_of_a_chart(chromium, doors):
    visit = come_in(chromium, doors["small"])
    figure = visit.page.locator("figure.chart").first
    plot = figure.locator("[tabindex='0']").first
    plot.focus()
    plot.press("Home")
    before = figure.inner_text()
    plot.press("ArrowRight")
    expect(figure).not_to_have_text(before)


def test_a_client_opens_with_its_rounds_and_escape_closes_it(chromium, doors):
    visit = come_in(chromium, doors["small"])
    opener = visit.section("clients").locator("a[data-client]", has_text="gone").first
    opener.focus()
    opener.press("Enter")
    dialog = visit.page.get_by_role("dialog")
    expect(dialog).to_contain_text("on battery")
    expect(dialog).to_contain_text("signature does not match")
    visit.look("client", whole=False)
    visit.page.keyboard.press("Escape")
    expect(dialog).to_have_count(0)
    expect(opener).to_be_focused()


def test_without_scripts_everything_is_still_there(chromium, doors):
    door = doors["small"]
    visit = chromium.visit(door.origin, cookie=door.cookie(), java_script_enabled=False)
    visit.page.goto(door.origin)
    expect(visit.section("accuracy").locator("svg").first).to_be_visible()
    expect(visit.section("clients")).to_contain_text("alice")
    visit.shot("small-no-scripts")


def test_what_the_ledger_gains_is_seen_without_a_reload_and_what_was_open_stays_open(
    chromium, tmp_path: Path
):
    with kit.ledger_door(tmp_path, page_kit.small) as door:
        visit = come_in(chromium, door)
        table = visit.section("seconds").locator("details").first
        table.locator("summary").click()
        link = visit.section("clients").locator("a[data-client]").first
        link.focus()
        with Ledger(tmp_path / LEDGER_NAME) as ledger:
            ledger.events.add("warning", "heard", "somebody knocked", run=page_kit.OPEN_KEY.run)
            key = page_kit.OPEN_KEY
            ledger.rounds.close(key, "short", why="deadline", phases={"collect_s": 4.0})
        expect(visit.section("events")).to_contain_text("somebody knocked")
        expect(visit.section("rounds")).to_contain_text("short")
        expect(table).to_have_attribute("open", "")
        expect(link).to_be_focused()
        chromium.close()  # before its server: a stream that breaks off is told on the console


def test_nothing_is_seen_without_a_session(chromium, doors):
    door = doors["small"]
    visit = chromium.visit(door.origin)
    visit.witness.expect(r"Failed to load resource.*40[13]")
    answer = visit.page.goto(door.origin)
    assert answer is not None
    assert answer.status == 401
    assert "alice" not in visit.page.content()
    visit.look("enter")
    for path in ("/stream", "/part/clients", "/part/client?id=x", "/pictures/x/y.png"):
        told = visit.context.request.get(door.origin + path)
        assert told.status in {401, 404}, path
        assert "alice" not in told.text()


def test_paths_hosts_and_long_queries_are_refused_in_a_sentence(chromium, doors):
    door = doors["small"]
    visit = come_in(chromium, door)
    ask = visit.context.request.get
    for path in (
        "/pictures/../page.key",
        "/pictures/..%2f..%2fpage.key",
        "/assets/%2e%2e/page.py",
        "/assets/../../ledger.sqlite",
        "/part/nothing",
        "/part/clients?page=x",
        "/part/clients?find=" + "x" * 6_000,
        "/part/client?id=" + "x" * 300,
        "/part/compare?" + "&".join(f"run={k}" for k in range(300)),
    ):
        told = ask(door.origin + path)
        assert 400 <= told.status < 500, (path, told.status)
        assert "Traceback" not in told.text()
    assert ask(door.origin, headers={"Host": "evil.example"}).status == 421
