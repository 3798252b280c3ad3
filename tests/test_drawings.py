"""The drawings of docs/explanation: the files are those of the code, texts lie inside, and pages describe them."""

from __future__ import annotations

import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

from hpcaccel_site.drawing import Drawing, width_of
from hpcaccel_site.explanation_drawings import explanation_drawings
from tests.test_readme import ROOT

DRAWINGS = explanation_drawings()
SVG = "{http://www.w3.org/2000/svg}"


def test_stored_drawings_are_those_of_the_code() -> None:
    stored = {path: path.read_text() for path in (ROOT / "docs" / "explanation").glob("*.svg")}
    assert stored == DRAWINGS, "run: make generated"


@pytest.mark.parametrize("path", sorted(DRAWINGS), ids=lambda path: path.stem)
def test_texts_lie_inside_the_drawing_and_are_legible(path: Path) -> None:
    image = ElementTree.fromstring(DRAWINGS[path])
    assert (image[0].tag, bool(image[0].text)) == (f"{SVG}title", True)
    width, height = float(image.attrib["width"]), float(image.attrib["height"])
    texts = image.findall(f"{SVG}text")
    assert len(texts) > 5
    for text in texts:
        size, x, y = (float(text.attrib[name]) for name in ("font-size", "x", "y"))
        long = width_of(text.text or "", size)
        left = x - {"start": 0.0, "middle": long / 2, "end": long}[text.attrib["text-anchor"]]
        assert size >= 10
        assert 0 < left < left + long < width, text.text
        assert size < y < height, text.text


def test_every_drawing_is_on_a_page_with_a_description() -> None:
    pages = "".join(path.read_text() for path in (ROOT / "docs" / "explanation").glob("*.md"))
    described = {name: " ".join(text.split()) for text, name in re.findall(r"!\[([^\]]*)\]\(([\w-]+\.svg)\)", pages)}
    assert set(described) == {path.name for path in DRAWINGS}
    assert all(len(text) > 60 for text in described.values())


def test_text_that_is_too_long_for_its_box_is_refused() -> None:
    with pytest.raises(AssertionError, match="does not fit"):
        Drawing(100, 100, "a drawing").box(0, 0, 50, 20, "a long text")
