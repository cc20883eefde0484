"""Records for a terminal: prompt and completion as they are, and one line each for reward, place and verdict.

All text comes from untrusted machines: control characters are replaced, and nothing is read as markup.
"""

from collections import Counter
from collections.abc import Sequence
from statistics import fmean

from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from shoal.inspection.records import Record, tool_calls
from shoal.observe.words import REPLACEMENT, plural
from shoal.protocol.segments import turn_count

STATE_STYLES = {"consumed": "green", "accepted": "green", "rejected": "red", "withdrawn": "red"}
ROUNDING = 1e-9


def render_record(record: Record, *, max_characters: int = 2000) -> RenderableType:
    title = Text(f"{record.group_id} sample {record.rollout.sample}  ·  {_clean(record.rollout.task_id)}")
    facts = Table.grid(padding=(0, 2))
    facts.add_column(style="dim", justify="right")
    facts.add_column(overflow="fold")
    for name, value in _facts(record):
        facts.add_row(name, value)
    body = Group(
        Text(_clean(_shortened(record.prompt, max_characters)), style="dim"),
        *_conversation(record, max_characters),
        Text(),
        facts,
    )
    return Panel(
        body,
        title=title,
        title_align="left",
        border_style=STATE_STYLES.get(record.state, "bright_black"),
        padding=(0, 1),
    )


def _conversation(record: Record, max_characters: int) -> list[Text]:
    """The completion; an episode turn by turn, with the names of the tools that a turn calls."""
    if len(record.segments) <= 1:
        return [Text(_clean(_shortened(record.text, max_characters)))]
    lines = []
    for number, (text, calls) in enumerate(zip(record.segments, tool_calls(record), strict=True)):
        is_given = number % 2 == 1
        called = f", calls {', '.join(map(_clean, calls))}" if calls else ""
        speaker = "environment" if is_given else f"turn {number // 2 + 1}{called}"
        lines.append(Text(f"── {speaker}", style="cyan" if is_given else "bold"))
        lines.append(Text(_clean(_shortened(text, max_characters)), style="cyan" if is_given else ""))
    return lines


def _facts(record: Record) -> list[tuple[str, Text]]:
    header = record.header
    name = f" ({_clean(record.worker_name)})" if record.worker_name else ""
    batch = f", in the batch of step {record.batch_step}" if record.batch_step is not None else ""
    return [
        ("reward", _reward(record)),
        ("length", Text(_length(record))),
        ("version", Text(f"{header.policy_version}, age {record.age}")),
        ("state", Text(f"{record.state}{batch}", style=STATE_STYLES.get(record.state, ""))),
        ("worker", Text(f"{header.worker_key[:12]}…{name}, {_clean(header.numerics_class)}")),
        *([("verdict", _verdict(record))] if record.verdict is not None else []),
        *([("margins", Text(_margins(record)))] if _margins(record) else []),
    ]


def _reward(record: Record) -> Text:
    penalty = record.rollout.length_penalty
    learned = record.reward - record.task_reward + penalty if record.verified else 0.0
    terms = f" − {penalty:.4g} for its length" if penalty else ""
    terms += f" + {learned:.4g} from reward models" if abs(learned) > ROUNDING else ""
    terms = f" = {record.task_reward:g}{terms}" if terms else ""
    source = "" if record.verified else "  (the worker's claim)"
    text = Text(f"{record.reward:.4g}{terms}{source}", style="green" if record.task_reward > 0 else "yellow")
    return text.append(f"  {_clean(record.why)}", style="default") if record.why else text


def _length(record: Record) -> str:
    target = f", asked for {record.rollout.target_length}" if record.rollout.target_length else ""
    turns = f" in {plural(turn_count(record.rollout.segment_lengths), 'turn')}" if len(record.segments) > 1 else ""
    return f"{plural(record.length, 'token')}{turns}{target}{', cut at the limit' if record.truncated else ''}"


def _verdict(record: Record) -> Text:
    verdict = record.verdict
    assert verdict is not None
    reasons = ", ".join(str(reason) for reason in verdict.reasons)
    parts = [
        "accepted" if verdict.accepted else f"rejected: {reasons}",
        "audited" if record.rollout.group in verdict.audited_groups else "not audited",
    ]
    parts += [_clean(verdict.detail)] if verdict.detail else []
    return Text(", ".join(parts), style="" if verdict.accepted else "red")


def _margins(record: Record) -> str:
    parts = []
    if record.margins is not None:
        margins = record.margins
        parts.append(f"{margins.differing} of {margins.tokens} tokens differ here, worst {margins.worst:.3g}")
    if record.verdict is not None and record.verdict.audited_groups:
        metrics = record.verdict.metrics
        parts.append(
            f"{metrics.rounding_flips} of {metrics.tokens} flipped in its submission's audit, worst {metrics.margin_max:.3g}"
        )
    return "; ".join(parts)


def render_summary(shown: Sequence[Record], matching: Sequence[Record], total: int) -> RenderableType:
    """How many there are, and what the matching ones have in common."""
    lines = [f"{len(shown)} shown of {len(matching)} that match, {plural(total, 'rollout')} in all"]
    if matching:
        ages = ", ".join(f"{age}: {count}" for age, count in sorted(Counter(record.age for record in matching).items()))
        lines.append(
            f"task reward {fmean(record.task_reward for record in matching):.3f}, "
            f"length {fmean(record.length for record in matching):.1f} tokens, "
            f"{fmean(record.truncated for record in matching):.1%} cut; by age {{{ages}}}"
        )
    return Text("\n".join(lines), style="bold")


def _shortened(text: str, limit: int) -> str:
    if not limit or len(text) <= limit:
        return text
    half = limit // 2
    return f"{text[:half]} … {len(text) - 2 * half} characters … {text[-half:]}"


def _clean(text: str) -> str:
    """Keeps lines, replaces every other control character."""
    return "".join(letter if letter.isprintable() or letter == "\n" else REPLACEMENT for letter in text)
