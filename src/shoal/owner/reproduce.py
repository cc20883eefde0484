"""`shoal reproduce`: finds what a run or an export left behind, repeats it, and writes the page."""

import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from shoal.errors import ConfigError
from shoal.files import write_atomic
from shoal.metrics import Report
from shoal.owner.control import find_run
from shoal.rundir import load_run

PAGE = "reproduction.md"


def reproduce_run(
    where: str,
    out: Path | None,
    report: Report,
    *,
    steps: Sequence[int] | None,
    sample: int,
    model: Path | None,
    run_key: str | None,
    threads: int,
    use_threads: Callable[[int], None],
) -> bool:
    """Whether everything came out as recorded. The page is written either way."""
    from shoal.reproduction import headline, read_evidence, render_page, reproduce
    from shoal.reproduction.evidence import evidence_directory
    from shoal.training.machine import TrainingMachine

    root = load_run(where).run.dir if where.endswith(".toml") else Path(where)
    directory = evidence_directory(root)
    recorded = TrainingMachine.load(directory.trainer)
    use_threads(threads or (recorded.threads if recorded else 0))
    ledger = None if directory.ledger_file.is_file() else find_run(where).ledger().splitlines()
    evidence = read_evidence(root, ledger=ledger, run_key=run_key)
    report(f"ledger: {evidence.ledger_entries} entries hold, head {evidence.ledger_head}")
    for finding in evidence.findings:
        report(finding)
    with tempfile.TemporaryDirectory(prefix="shoal-reproduce-") as scratch:
        result = reproduce(evidence, Path(scratch), steps=steps, sample=sample, model=model, report=report)
    target = out or root / PAGE
    write_atomic(target, render_page(result).encode())
    report(headline(result))
    report(f"wrote {target}")
    return result.ok


def parse_steps(text: str) -> list[int] | None:
    """`all`, or numbers and ranges such as 0-3,7."""
    if text == "all":
        return None
    try:
        found = [
            step
            for part in text.split(",")
            for first, _, last in [part.partition("-")]
            for step in range(int(first), int(last or first) + 1)
        ]
    except ValueError:
        found = []
    if not found or min(found) < 0:
        raise ConfigError(f"--steps {text} names no steps.", hint="Such as 3, 0-4, or all.")
    return found
