"""docs/verification.md says what the code does; `python tests/validation/test_documentation.py` rewrites its tables."""

from pathlib import Path

import pytest

from shoal.protocol.verdicts import REASONS
from shoal.validation import load_calibration

PAGE = Path(__file__).parents[2] / "docs" / "verification.md"


def reason_table() -> str:
    rows = [f"| `{reason}` | {weight} | {meaning} |" for reason, (weight, meaning) in REASONS.items()]
    return "\n".join(["| reason | weight | meaning |", "|---|---|---|", *rows])


def residual_table() -> str:
    rows = [
        f"| `{name}` | {known.limits.lost_per_1000:.2f} | {known.limits.lost_mean:.4f}"
        f" | {known.evidence.residual_bits_per_1000_tokens:.2f} |"
        for name, known in load_calibration("bundled").classes.items()
    ]
    return "\n".join(["| numerics class | λ per 1,000 | μ | bits per 1,000 tokens |", "|---|---|---|---|", *rows])


TABLES = {"reasons": reason_table, "residual": residual_table}


def section(text: str, name: str) -> tuple[str, str, str]:
    before, _, rest = text.partition(f"<!-- {name} -->\n")
    inside, mark, after = rest.partition(f"<!-- /{name} -->")
    assert mark, f"docs/verification.md has no table {name}"
    return before, inside, after


@pytest.mark.parametrize("name", TABLES)
def test_the_page_shows_the_tables_of_the_code(name: str) -> None:
    inside = section(PAGE.read_text(), name)[1]
    assert inside.strip() == TABLES[name](), f"run `python {Path(__file__).name}` to bring the page up to date"


def rewrite() -> None:
    for name, table in TABLES.items():
        before, _, after = section(PAGE.read_text(), name)
        PAGE.write_text(f"{before}<!-- {name} -->\n{table()}\n<!-- /{name} -->{after}")


if __name__ == "__main__":
    rewrite()
