"""One page about a reproduction, in Markdown: what was repeated, with which digests, what differs and where first."""

from collections.abc import Iterator

from shoal import __version__
from shoal.observe.words import plural, printable
from shoal.reproduction.repeat import Reproduction, StepOutcome

SHORT = 16


def headline(result: Reproduction) -> str:
    """The one sentence."""
    first = result.first_difference
    if first is not None:
        what = "the weights that training begins with" if first.step < result.began_at else f"step {first.step}"
        return f"not reproduced: {what}: {first.reason or first.state}"
    if result.evidence.findings:
        return f"not reproduced: {result.evidence.findings[0]}"
    against = [verdict for verdict in result.verdicts if not verdict.agrees]
    if against:
        return f"not reproduced: {plural(len(against), 'verdict')} came out otherwise, first {against[0]}"
    if not result.is_settled:
        last = result.steps[-1] if result.steps else result.start
        return f"not reproduced: step {last.step} cannot be compared: {last.reason or 'nothing was repeated'}"
    exact = all(outcome.state == "identical" for outcome in result.steps)
    how = "bit-identical" if exact else "within the tolerance for another class of machine"
    checked = f", {plural(len(result.verdicts), 'verdict')} repeated" if result.verdicts else ""
    return f"reproduced: {plural(len(result.steps), 'training step')} {how}{checked}"


def render_page(result: Reproduction) -> str:
    evidence = result.evidence
    lines = [
        f"# Reproduction of {printable(evidence.descriptor.run_id)}",
        "",
        f"**{printable(headline(result), 400)}**",
        "",
    ]
    lines += ["| | |", "|---|---|", *_facts(result), ""]
    lines += _section("What does not hold about the inputs", evidence.findings)
    lines += ["## Training steps", "", *_steps(result), ""]
    lines += _section("Verdicts repeated by a full audit", [_line(verdict) for verdict in result.verdicts])
    lines += ["## Not repeated", "", *_left_out(result), ""]
    return "\n".join(lines)


def _facts(result: Reproduction) -> Iterator[str]:
    evidence = result.evidence
    facts = {
        "Run key": evidence.descriptor.run_key,
        "Ledger": f"{evidence.ledger_entries} entries, chain, signatures and books hold",
        "Ledger head": evidence.ledger_head,
        "Task set digest": evidence.descriptor.task_set_digest,
        "Began with": "the base model" if result.began_at == 0 else f"the checkpoint of version {result.began_at}",
        "Trained on": str(evidence.machine or "unknown"),
        "Repeated on": str(result.machine),
        "Class of machine": "the same, so bits must agree" if result.same_class else "another, so bits may differ",
        "Shoal": __version__,
    }
    for name, value in facts.items():
        yield f"| {name} | `{printable(value)}` |"


def _steps(result: Reproduction) -> Iterator[str]:
    yield "| step | groups | version | recorded weights | repeated weights | |"
    yield "|---|---|---|---|---|---|"
    for outcome in [result.start, *result.steps]:
        is_start = outcome is result.start
        yield (
            f"| {'begin' if is_start else outcome.step} | {'' if is_start else outcome.groups} | {outcome.step + 1}"
            f" | `{outcome.recorded[:SHORT]}` | `{outcome.repeated[:SHORT]}` | {_word(outcome)} |"
        )


def _word(outcome: StepOutcome) -> str:
    words = {
        "identical": "bit-identical",
        "close": "within tolerance",
        "differs": "**differs**",
        "unmeasured": "other bits, not measured",
    }
    word = words.get(outcome.state, "**cannot be repeated**")
    return f"{word}: {printable(outcome.reason)}" if outcome.reason else word


def _line(verdict: object) -> str:
    agrees = getattr(verdict, "agrees", False)
    return f"{'agrees' if agrees else '**differs**'}: {verdict}"


def _section(title: str, lines: list[str]) -> list[str]:
    return [f"## {title}", "", *(f"- {printable(line, 400)}" for line in lines), ""] if lines else []


def _left_out(result: Reproduction) -> Iterator[str]:
    """What a reader must not take for repeated."""
    done = {outcome.step for outcome in result.steps}
    rest = [step for step in sorted(result.evidence.history.steps) if step not in done]
    if rest:
        yield f"- {plural(len(rest), 'training step')}, from step {rest[0]} to {rest[-1]}."
    if result.began_at:
        yield "- The optimiser's state in the checkpoint: the ledger vouches for its weights only."
    yield from (f"- {printable(note, 400)}" for note in result.notes)
    repeated, known = len(result.verdicts), len(result.evidence.history.files)
    yield f"- {plural(known - repeated, 'verdict')} of {known}."
    yield "- Who ran the workers, and when: the ledger's times are the coordinator's."
