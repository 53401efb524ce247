"""The front page is short and true, and no page links to what is not there."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest

import elastic
from docs.fields import insert_tables, table
from elastic import ElasticTrainer
from elastic.doctor.run import CHECKS
from tests.support import ROOT
from trainer.backend import efa_settings

PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
    *sorted((ROOT / "examples").rglob("*.md")),
    ROOT / "tests" / "gpu" / "README.md",
]


def targets(page: Path) -> list[str]:
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    found = re.findall(r"\]\(([^)\s]+)\)", text)
    return [target for target in found if "://" not in target]


def anchors(page: Path) -> set[str]:
    """As GitHub and MyST make them."""
    titles = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_leads_somewhere(page: Path) -> None:
    for target in targets(page):
        file, _, anchor = target.partition("#")
        there = (page.parent / file) if file else page
        assert there.exists(), target
        assert not anchor or anchor in anchors(there), target


def test_the_check_sees_links() -> None:
    assert "docs/quickstart.md" in targets(ROOT / "README.md")


def test_the_front_page_is_one_screen() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 150


def test_the_example_of_the_front_page_constructs_a_trainer() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    (example,) = re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)
    construction, _, rest = example.partition("result = trainer.fit()")
    names: dict[str, object] = {}
    exec(construction, names)
    assert isinstance(names["trainer"], ElasticTrainer) and rest.strip()


CONFIGS = [
    value for name in elastic.__all__ if dataclasses.is_dataclass(value := getattr(elastic, name))
]


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.__name__)
def test_the_reference_has_every_setting(config: type) -> None:
    pages = "".join(p.read_text(encoding="utf-8") for p in sorted((ROOT / "docs").glob("*.md")))
    if config.__name__ == "Fault":  # users write faults as text, see parse_faults
        return
    shown = table(config.__module__, config.__name__)
    assert shown in insert_tables(pages), "no page asks for the table"
    names = re.findall(r"^\| `(\w+)`", shown, flags=re.MULTILINE)
    assert names == [field.name for field in dataclasses.fields(config)]


def test_a_setting_without_a_text_fails_the_build() -> None:
    with pytest.raises(ValueError, match=r"Undocumented\.steps has no text below it"):
        table("tests.unit.docs.undocumented", "Undocumented")
    with pytest.raises(ValueError, match="has no class Missing"):
        table("elastic.config", "Missing")


def test_the_pages_on_efa_and_the_doctor_name_every_variable_and_every_check() -> None:
    page = (ROOT / "docs" / "efa.md").read_text(encoding="utf-8")
    rules = (*efa_settings._RULES, *efa_settings._HARMS)
    left = [name for names in efa_settings.LEFT_ALONE for name in names.split(", ")]
    assert [n for n in (*(rule.name for rule in rules), *left) if f"`{n}" not in page] == []
    doctor = (ROOT / "docs" / "doctor.md").read_text(encoding="utf-8")
    assert [name for name in CHECKS if name != "instance" and f"`{name}`" not in doctor] == []
    assert [name for name in efa_settings.INSTANCES if name not in page] == []


def test_the_index_has_every_decision_once_and_in_order() -> None:
    folder = ROOT / "docs" / "decisions"
    listed = re.findall(r"\]\((\d{3}-[\w-]+\.md)\)", (folder / "index.md").read_text("utf-8"))
    assert listed == sorted(file.name for file in folder.glob("[0-9]*.md"))
