"""HTML taken apart: which elements it has, and what people read in it."""

from __future__ import annotations

from html.parser import HTMLParser


class Page(HTMLParser):
    """Collects tags, attributes and text, and checks that elements close in order.

    Attributes:
        open: elements that were not closed.
        tags: (name, attributes) in order.
        text: all of it, also that of scripts.
    """

    VOID = {"meta", "br", "link", "input"}

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data

    def all(self, tag: str) -> list[dict[str, str | None]]:
        """Return the attributes of all elements of a kind."""
        return [attrs for name, attrs in self.tags if name == tag]

    @property
    def ids(self) -> list[str]:
        """Return all ids, in order."""
        return [attrs["id"] for _, attrs in self.tags if attrs.get("id")]
