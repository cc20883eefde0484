"""The generated pages and tables of docs/ say what the code and the stored results say."""

from pathlib import Path

import pytest

from shoal.errors import ShoalError
from tools.reference import codes, commands, pages


def test_no_generated_page_or_table_is_out_of_date() -> None:
    assert pages.out_of_date() == [], "run `make docs`"


def test_every_table_that_can_be_generated_is_shown_somewhere() -> None:
    assert pages.used_blocks() == set(pages.BLOCKS)


def test_a_changed_table_is_noticed_and_written_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = tmp_path / "docs" / "page.md"
    page.parent.mkdir()
    page.write_text("before\n<!-- generated: rates -->\nold\n<!-- /generated -->\nafter\n")
    monkeypatch.setattr(pages, "DOCS", page.parent)
    monkeypatch.setattr(pages, "PAGES", {"reference/new.md": lambda: "# New\n"})
    monkeypatch.setattr(pages, "BLOCKS", {"rates": lambda: "new"})
    assert pages.out_of_date() == ["docs/reference/new.md", "docs/page.md"]
    assert pages.write() == ["docs/reference/new.md", "docs/page.md"]
    assert page.read_text() == "before\n<!-- generated: rates -->\nnew\n<!-- /generated -->\nafter\n"
    assert pages.out_of_date() == []


def test_the_command_page_shows_nested_commands_with_their_options() -> None:
    names = [name for name, _ in commands.commands()]
    page = commands.page()
    assert "shoal run ban" in names
    assert all(f"\n## {name}\n" in page for name in names)
    assert "- **`--run-key`**" in page


def test_an_error_of_an_optional_package_that_is_imported_does_not_change_the_page() -> None:
    before = codes.page()
    body = {"__module__": "shoal.policy.vllm.engine", "__doc__": "Late.", "code": "late", "permanent": True}
    late = type("LateError", (ShoalError,), body)
    assert late in ShoalError.__subclasses__()
    assert codes.page() == before


def test_every_error_has_a_sentence() -> None:
    described = {error.__name__: (error.__doc__ or "").strip() for error in codes.errors()}
    assert len(described) > 20
    assert [name for name, words in described.items() if not words.endswith(".")] == []
