"""The ledger as sentences: who did what, by name, and what everybody has earned."""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from shoal.coordinator import balances
from shoal.coordinator.ledger import Entry
from shoal.observe.words import plural, printable
from shoal.protocol.steps import step_of

Body = Mapping[str, Any]
KEY_LETTERS = 12
SENTENCES: dict[str, Callable[[Body], str]] = {
    "run": lambda body: f"run {body['run_id']} begins",
    "registered": lambda body: f"joins with {body['numerics_class']}",
    "verdict": lambda body: f"step {body['step']} slot {body['slot']} is {_decision(body)}",
    "credit": lambda body: f"earns credit for {body['held'] + body['released']} tokens ({_shares(body)})",
    "slash": lambda body: f"loses its stake of {body['slashed']} tokens",
    "ban": lambda body: f"is banned: {body['reason']}",
    "unban": lambda body: f"may work again: {body['reason']}",
    "commitment": lambda body: f"the secret of step {step_of(body)} is fixed: {body['commitment'][:KEY_LETTERS]}…",
    "recorded": lambda body: f"step {body['step']} has its batch: {plural(len(body['groups']), 'group')}",
    "recalled": lambda body: (
        f"the batch of step {body['step']} is recalled, {plural(len(body['groups']), 'group')}: {body['reason']}"
    ),
    "version": lambda body: f"version {body['version']} is published, weights {body['weights'][:KEY_LETTERS]}…",
    "terms": lambda body: (
        f"a stake is {body['trust']['stake_tokens']} tokens, a slot has at most {body['slot_tokens']}"
    ),
    "restored": lambda body: f"the run is restored from a backup of {body['entries']} entries",
    "rewound": lambda body: (
        f"the owner returns the run to version {body['version']}, epoch {body['epoch']} begins: {body['reason']}"
    ),
    "run_state": lambda body: f"the owner sets the run to {body['state']}",
    "quarantine": lambda body: f"submission {body['submission'][:KEY_LETTERS]} is quarantined: {body['why']}",
}


def ledger_lines(entries: Sequence[Entry]) -> Iterator[str]:
    names = worker_names(entries)
    for entry in entries:
        at = datetime.fromtimestamp(entry.at, UTC).isoformat(sep=" ", timespec="seconds").removesuffix("+00:00")
        yield f"{entry.seq:6d}  {at}  {sentence(entry, names)}"
    yield "balances, in tokens:"
    for worker, account in balances(entries).items():
        yield "  " + printable(
            f"{_who(worker, names)}: " + ", ".join(f"{count} {kind}" for kind, count in account.items())
        )


def worker_names(entries: Iterable[Entry]) -> dict[str, str]:
    """The name under which each key first registered."""
    registered = (json.loads(entry.body) for entry in entries if entry.kind == "registered")
    return {body["worker"]: str(body.get("name", "")) for body in registered}


def sentence(entry: Entry, names: Mapping[str, str]) -> str:
    body = json.loads(entry.body)
    who = f"{_who(body['worker'], names)} " if "worker" in body else ""
    try:
        text = SENTENCES[entry.kind](body)
    except (KeyError, TypeError):  # a kind of entry, or a form of one, that this program does not know
        text = f"{entry.kind}: " + ", ".join(f"{name} {value}" for name, value in body.items() if name != "worker")
    return printable(f"{who}{text}")


def _who(key: str, names: Mapping[str, str]) -> str:
    name = names.get(key, "")
    return f"{name} ({key[:KEY_LETTERS]}…)" if name else f"{key[:KEY_LETTERS]}…"


def _decision(body: Body) -> str:
    decision = (
        "accepted" if body["accepted"] else f"rejected ({', '.join(body.get('reasons', [])) or 'see its verdict'})"
    )
    drawn, groups = len(body["audit_drawn"]), body["groups"]
    return f"{decision}, {f'{drawn} of {groups} groups audited' if drawn else 'not audited'}"


def _shares(body: Body) -> str:
    return f"{body['held']} held as stake, {body['released']} released"
