"""Time and memory of `ledger verify` on a long, honest ledger.

    python benchmarks/ledger_verify.py --entries 1000000

Writes an export of one verdict and one credit per slot, 64 slots per step and 50 keys, with real signatures, then checks it in a
process of its own. Prints one JSON object as its last line.
"""

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from shoal.config import TrainingConfig, TrustConfig
from shoal.coordinator import ledger
from shoal.coordinator.ledger.chain import Entry, entry_hash
from shoal.coordinator.ledger.verification import verify_ledger
from shoal.coordinator.rules import credit, trust, unaudited
from shoal.identity import Keypair
from shoal.protocol.signing import submission_message
from shoal.protocol.steps import StepId, group_name, step_commitment, step_secret

RUN_SECRET = bytes(range(32))
KEYS = [Keypair.from_seed(bytes([number]) * 32) for number in range(1, 51)]
COORDINATOR, RUN = Keypair.from_seed(b"c" * 32), Keypair.from_seed(b"r" * 32)
SLOTS, GROUPS, TOKENS = 64, 8, 1000
TERMS = TrustConfig(stake_tokens=100_000)
USEFUL_RATE = unaudited.useful_rate(TrainingConfig(groups_per_step=SLOTS * GROUPS), TERMS)


def facts(entries: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """Kind and body of at least this number of entries, of whole steps."""
    records = {key.public: trust.TrustRecord("probation") for key in KEYS}
    held = dict.fromkeys(records, 0)
    yield "run", {"run_id": "long", "run_key": RUN.public, "secret_commitment": ""}
    chosen = TERMS.model_dump(include={"stake_tokens", "probation_audits", "audit_floor", "unaudited_share"})
    terms = {"async_level": 2, "groups_per_step": SLOTS * GROUPS, "slot_tokens": GROUPS * TOKENS}
    yield "terms", {"trust": chosen, **terms}
    yield from (commitment(StepId(step=step)) for step in range(2))
    yield "version", {"version": 0, "manifest": "", "weights": ""}
    made, step = 5, StepId()
    while made < entries:
        secret, rates = (
            step_secret(RUN_SECRET, step),
            {key: trust.audit_rate(one, TERMS) for key, one in records.items()},
        )
        opened = made
        for slot in range(SLOTS):
            key = KEYS[(step.step + slot) % len(KEYS)]
            rate = rates[key.public]
            body = verdict(key, step, slot, secret, rate, opened)
            yield "verdict", body
            drawn = len(body["audited"])
            event = trust.event_of(True, bool(drawn), [])
            assert event is not None
            records[key.public] = trust.after(records[key.public], event, TERMS, drawn / GROUPS)
            change, released = credit.split_credit(held[key.public], body["tokens"], TERMS.stake_tokens)
            held[key.public] += change
            yield "credit", {"worker": key.public, "held": change, "released": released, "submission": "0" * 32}
        groups = [group_name(step, slot, number) for slot in range(SLOTS) for number in range(GROUPS)]
        yield "recorded", {**step.fields(), "groups": groups, "step_secret": secret.hex()}
        yield commitment(StepId(step=step.step + 2))
        yield "version", {"version": step.step + 1, "manifest": "", "weights": ""}
        made, step = made + 2 * SLOTS + 3, step.next()


def commitment(step: StepId) -> tuple[str, dict[str, Any]]:
    fixed = step_commitment(step, step_secret(RUN_SECRET, step))
    return "commitment", {**step.fields(), "commitment": fixed}


def verdict(key: Keypair, step: StepId, slot: int, secret: bytes, rate: float, position: int) -> dict[str, Any]:
    lease, file = f"{step.step:016x}{slot:016x}", f"{step.step:032x}{slot:032x}"
    drawn, order = list(trust.audited_groups(secret, file, rate, GROUPS)), trust.audit_order(secret, file, GROUPS)
    limits = unaudited.limits_of_file(USEFUL_RATE, GROUPS, trust.rounding(secret, file), SLOTS * GROUPS)
    audited = trust.groups_to_audit(drawn, order, range(GROUPS), limits)
    return {
        "worker": key.public, **step.fields(), "slot": slot, "lease": lease, "version": step.step, "file": file,
        "signature": key.sign(submission_message("long", lease, file)), "issued": 0.0, "received": 0.0,
        "position": position, "use": "counts", "accepted": True, "reasons": [], "tokens": GROUPS * TOKENS,
        "groups": GROUPS, "useful": list(range(GROUPS)), "shares": None, "files": 0, "audited": audited,
        "drift": "honest", "audit_drawn": drawn, "audit_rate": rate, "useful_rate": USEFUL_RATE,
        "audit_step": list(step), "verdict": "0" * 64,
    }  # fmt: skip


def write(path: Path, entries: int) -> int:
    previous, count = ledger.GENESIS, 0
    with path.open("wb") as file:
        for count, (kind, body) in enumerate(facts(entries), 1):
            text = json.dumps(body, separators=(",", ":"))
            digest = entry_hash(count - 1, float(count), kind, text, previous)
            entry = Entry(
                count - 1, float(count), kind, text, previous, digest, COORDINATOR.sign(bytes.fromhex(digest))
            )
            file.write(ledger.line_of(entry))
            previous = digest
        file.write(ledger.seal(COORDINATOR, "long", ledger.Extent(count, previous, count, previous), count + 1.0))
    return count


def check(path: Path) -> dict[str, object]:
    started = time.monotonic()
    with path.open("rb") as file:
        result = verify_ledger(file, COORDINATOR.public, run_key=RUN.public)
    seconds = time.monotonic() - started
    return {
        "ok": result.ok,
        "entries": result.entries,
        "verdicts": result.verdicts,
        "seconds": round(seconds, 1),
        "cpu_s": round(time.process_time(), 1),
        "entries_per_cpu_s": round(result.entries / time.process_time()),
        "peak_memory_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--entries", type=int, default=1_000_000)
    parser.add_argument("--check", type=Path)
    arguments = parser.parse_args()
    if arguments.check is not None:
        print(json.dumps(check(arguments.check)))
        return
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "ledger.jsonl"
        write(path, arguments.entries)
        size_mb = path.stat().st_size >> 20
        command = [sys.executable, __file__, "--check", str(path)]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        print(json.dumps(json.loads(done.stdout) | {"size_mb": size_mb}))


if __name__ == "__main__":
    main()
