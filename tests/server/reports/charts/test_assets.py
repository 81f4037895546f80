"""What the page brings into a browser: whole, small, readable, and nothing from elsewhere."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import tomllib
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path
from types import ModuleType

import pytest

from fcil_server.reports.charts import assets
from fcil_server.reports.charts.render import template

ROOT = Path(__file__).parents[4]
PAGE = ROOT / "server" / "fcil_server" / "reports" / "charts"
STATIC, TEMPLATES = PAGE / "static", PAGE / "templates"
VENDORED = STATIC / "vendor"
OWN = sorted(path.name for path in STATIC.glob("*.js"))
LARGEST_BYTES = 200_000  # of a page without its data, before compression
TEXT_CONTRAST, GRAPHIC_CONTRAST = 4.5, 3.0  # WCAG 2.2, 1.4.3 and 1.4.11


def vendor() -> ModuleType:
    """Return scripts/vendor as a module."""
    loader = SourceFileLoader("vendor", str(ROOT / "scripts" / "vendor"))
    spec = spec_from_loader(loader.name, loader)
    assert spec is not None
    module = module_from_spec(spec)
    loader.exec_module(module)
    return module


def shell() -> str:
    """Return the page's HTML around no sections at all."""
    return template(
        "page.html",
        title="<b>fed",
        sections={},
        csrf="word",
        read_only=False,
        running=True,
        runs=[
            {"id": "r1", "method": "<i>m", "status": "done"},
            {"id": "r2", "method": "m", "status": "done"},
        ],
        run="r2",
        version="1",
        newest=7,
        trouble="",
        pictures=["accuracy.png"],
    )


def no_comments(script: str) -> str:
    return re.sub(r"/\*.*?\*/|(?<!:)//[^\n]*", "", script, flags=re.DOTALL)


# The libraries of others.


def test_vendored_files_are_those_of_the_list():
    assert vendor().main(["--check"]) == 0


def test_a_changed_a_missing_and_an_extra_vendored_file_are_each_told(tmp_path):
    module = vendor()
    packages = json.loads(module.LIST.read_text(encoding="utf-8"))
    for path in VENDORED.iterdir():
        shutil.copyfile(path, tmp_path / path.name)
    (tmp_path / "uPlot.min.css").write_bytes((tmp_path / "uPlot.min.css").read_bytes() + b" ")
    (tmp_path / "idiomorph.LICENSE").unlink()
    (tmp_path / "more.js").write_text("1")
    told = module.faults(packages, tmp_path, "here")
    assert [sentence.split()[0] for sentence in told] == [
        "uPlot.min.css",
        "idiomorph.LICENSE",
        "more.js",
    ]


def test_every_vendored_package_has_its_version_and_its_licence_beside_it():
    for package in json.loads((VENDORED / "VENDOR.json").read_text(encoding="utf-8")):
        assert re.fullmatch(r"\d+\.\d+\.\d+", package["version"])
        assert package["licence"] in {"MIT", "0BSD"}
        assert any(entry["source"] == "LICENSE" for entry in package["files"])


# Names and addresses.


def test_an_address_carries_the_digest_of_what_is_behind_it():
    content, kind = assets.load("page.css")
    assert kind.startswith("text/css")
    assert (
        assets.url("page.css") == f"/assets/page.css?v={hashlib.sha256(content).hexdigest()[:12]}"
    )


@pytest.mark.parametrize(
    "name", ["", "..", "../app.py", "vendor", "vendor/VENDOR.json", "/etc/passwd", "page.css/"]
)
def test_nothing_but_an_asset_is_ever_read(name):
    with pytest.raises(KeyError):
        assets.load(name)


def test_every_style_and_script_of_the_folder_is_an_asset_and_the_other_way_round():
    found = {
        path.relative_to(STATIC).as_posix()
        for path in STATIC.rglob("*")
        if path.suffix in {".js", ".css", ".svg"}
    }
    assert found == assets.NAMES


def test_every_address_in_a_page_is_that_of_an_asset():
    named = re.findall(
        r'(?:src|href)="(/assets/[^"]+)"', shell() + template("enter.html", version="1")
    )
    assert len(named) > len(assets.SCRIPTS)
    assert set(named) <= {assets.url(name) for name in assets.NAMES}


def test_what_the_page_ships_is_in_the_wheel():
    with (ROOT / "pyproject.toml").open("rb") as file:
        patterns = tomllib.load(file)["tool"]["setuptools"]["package-data"]["fcil_server"]
    shipped = {
        path
        for pattern in patterns
        for path in (ROOT / "server" / "fcil_server").glob(f"{pattern}/*")
    }
    kept = {path for folder in (STATIC, TEMPLATES) for path in folder.rglob("*") if path.is_file()}
    assert kept <= shipped


# What the browser's policy forbids, and what nobody should have to download.


@pytest.mark.parametrize("name", OWN)
def test_a_script_makes_no_code_out_of_text_and_names_no_other_host(name):
    script = no_comments((STATIC / name).read_text(encoding="utf-8"))
    for pattern in (
        r"\beval\s*\(",
        r"\bFunction\s*\(",
        r"\b(inner|outer)HTML\s*\+?=(?!=)",
        r"insertAdjacentHTML|createContextualFragment|document\.write|setHTMLUnsafe|DOMParser",
        r"set(Timeout|Interval)\(\s*[\"'`]",
        r"\bimport\b|\bexport\b",
        r"https?:|wss?:",
        r"setAttribute\(\s*[\"']style",
        r"</script",
    ):
        assert not re.search(pattern, script), pattern
    assert script.count("\n") <= 400


def test_only_one_script_turns_text_of_the_server_into_html():
    users = [name for name in OWN if "Idiomorph" in (STATIC / name).read_text(encoding="utf-8")]
    assert users == ["parts.js"]


@pytest.mark.parametrize(
    "path",
    sorted(TEMPLATES.rglob("*.html")),
    ids=lambda path: path.relative_to(TEMPLATES).as_posix(),
)
def test_a_template_has_no_code_and_no_style_inside_its_tags(path):
    text = path.read_text(encoding="utf-8")
    assert not re.search(r"<[^>]*\s(on\w+|style)\s*=", text)
    assert not re.search(r"\|\s*safe\b|javascript:|https?://", text)
    if path.name not in ("report.html", "file.html"):  # their policies name the hashes of it
        assert "<style" not in text
        scripts = re.findall(r"<script[^>]*>", text)
        assert all("src=" in tag or "application/json" in tag for tag in scripts)


def test_a_page_weighs_little_and_loads_little():
    names = [*assets.STYLES, *assets.SCRIPTS, "icon.svg"]
    weight = len(shell().encode()) + sum(len(assets.load(name)[0]) for name in names)
    assert weight < LARGEST_BYTES


def test_names_in_the_shell_are_escaped():
    html = shell()
    assert "&lt;b&gt;fed" in html
    assert "<b>fed" not in html
    assert "<i>m" not in html


def test_a_read_only_page_has_no_act():
    html = template(
        "page.html", title="f", sections={}, csrf="", read_only=True, running=True,
        runs=[], run="", version="1", newest=0, trouble="", pictures=[],
    )  # fmt: skip
    assert "data-act" not in html
    assert "act-enrol" not in html


# Colours.


def themes() -> dict[str, dict[str, str]]:
    """Return the colours of the style sheet, as seen with a light and a dark system."""
    css = (STATIC / "page.css").read_text(encoding="utf-8")
    light, dark = (
        dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6});", block))
        for block in re.findall(r":root \{([^}]*--text[^}]*)\}", css)
    )
    return {"light": light, "dark": light | dark}


def luminance(colour: str) -> float:
    """Return the relative luminance of ``#rrggbb``, as WCAG defines it."""
    linear = [
        c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4
        for c in (int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5))
    ]
    return sum(part * c for part, c in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def contrast(one: str, other: str) -> float:
    """Return the contrast of two colours, from 1 to 21."""
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


def test_contrast_is_that_of_the_definition():
    assert contrast("#000000", "#ffffff") == pytest.approx(21)
    assert contrast("#767676", "#ffffff") == pytest.approx(4.54, abs=0.01)


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_text_can_be_read_on_every_ground(theme):
    colours = themes()[theme]
    for name in ("text", "faint", "link", "bad", "warn"):
        for ground in ("page", "card"):
            assert contrast(colours[name], colours[ground]) >= TEXT_CONTRAST, (name, ground)
    for button in ("link", "bad"):
        assert contrast(colours["page"], colours[button]) >= TEXT_CONTRAST, button


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_lines_bars_and_edges_can_be_seen(theme):
    colours = themes()[theme]
    for name in ("a", "b", "c", "d", "e", "f", "edge", "good"):
        assert contrast(colours[name], colours["page"]) >= GRAPHIC_CONTRAST, name


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_the_numbers_of_the_heat_map_can_be_read_in_every_band(theme):
    css = (STATIC / "page.css").read_text(encoding="utf-8")
    colours = themes()[theme]
    rules = re.findall(r"\.heat \.h(\d+) \{ background: var\(--h\1\); color: ([^;]+); \}", css)
    assert [int(band) for band, _ in rules] == list(range(11))
    for band, ink in rules:
        shown = ink if ink.startswith("#") else colours[ink[len("var(--") : -1]]
        assert contrast(shown, colours[f"h{band}"]) >= TEXT_CONTRAST, band


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_neighbouring_bands_of_the_heat_map_go_one_way(theme):
    colours = themes()[theme]
    steps = [luminance(colours[f"h{band}"]) for band in range(11)]
    assert steps in (sorted(steps), sorted(steps, reverse=True))
