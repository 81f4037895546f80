"""Builds the site into a folder; `scripts/site` calls it."""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

from mkdocs.commands.build import build
from mkdocs.config import load_config

from docsite.pages import ROOT, navigation, stage


def main(arguments: list[str]) -> int:
    if len(arguments) > 1 or arguments[:1] == ["--help"]:
        print("Usage: scripts/site [OUT]   (default: site)", file=sys.stderr)
        return 4
    out = Path(arguments[0] if arguments else ROOT / "site").resolve()
    if out.is_dir() and any(out.iterdir()) and not (out / "search" / "search_index.json").exists():
        print(f"{out} holds something else than a site; name an empty folder.", file=sys.stderr)
        return 4
    with tempfile.TemporaryDirectory(prefix="fcil-site-") as place:
        stage(Path(place), os.environ.get("FCIL_SITE_SOURCE", ""))
        config = load_config(
            str(Path(__file__).with_name("mkdocs.yml")),
            docs_dir=place,
            site_dir=str(out),
            nav=navigation(),
            strict=True,
        )
        config.plugins.on_startup(command="build", dirty=False)
        try:
            build(config)
        finally:
            config.plugins.on_shutdown()
    print(out / "index.html")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
