"""Which pages and tables of docs/ are generated, and by what.

A page of docs/reference/ is generated whole. A table inside a page that somebody wrote stands between
`<!-- generated: NAME -->` and `<!-- /generated -->`.
"""

import re
from collections.abc import Callable, Iterator
from pathlib import Path

from tools.reference import api, codes, commands, metrics, results, settings, states

DOCS = Path(__file__).resolve().parents[2] / "docs"
PAGES: dict[str, Callable[[], str]] = {
    "reference/settings.md": settings.page,
    "reference/cli.md": commands.page,
    "reference/api.md": api.page,
    "reference/codes.md": codes.page,
    "reference/metrics.md": metrics.page,
}
BLOCKS: dict[str, Callable[[], str]] = {
    "residual": results.residual,
    "detection": results.detection,
    "detection in bfloat16 bundled": lambda: results.detection_bf16("bundled"),
    "detection in bfloat16 smollm2": lambda: results.detection_bf16("smollm2"),
    "detection in bfloat16 smollm2 vllm": lambda: results.detection_bf16_vllm("smollm2"),
    "detection in bfloat16 bundled vllm": lambda: results.detection_bf16_vllm("bundled"),
    "audit costs": results.audit_costs,
    "narrow products": results.narrow_products,
    "states": states.diagrams,
    "trust": states.trust_diagram,
}
MARKED = re.compile(r"(<!-- generated: ([\w -]+) -->\n).*?(<!-- /generated -->)", re.DOTALL)


def generated() -> Iterator[tuple[Path, str]]:
    """Every file with generated text, and what it should say."""
    for name, page in PAGES.items():
        yield DOCS / name, page()
    for path in sorted(DOCS.rglob("*.md")):
        if MARKED.search(text := path.read_text()):
            yield path, MARKED.sub(_filled, text)


def _filled(match: re.Match[str]) -> str:
    return f"{match.group(1)}{BLOCKS[match.group(2)]()}\n{match.group(3)}"


def out_of_date() -> list[str]:
    return [_name(path) for path, text in generated() if not path.exists() or path.read_text() != text]


def write() -> list[str]:
    """Writes what changed; returns the names of those files."""
    changed = [(path, text) for path, text in generated() if not path.exists() or path.read_text() != text]
    for path, text in changed:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return [_name(path) for path, _ in changed]


def used_blocks() -> set[str]:
    return {name for path in DOCS.rglob("*.md") for _, name, _ in MARKED.findall(path.read_text())}


def _name(path: Path) -> str:
    return str(path.relative_to(DOCS.parent))
