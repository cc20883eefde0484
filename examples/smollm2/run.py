"""A real language model learns on two CPU cores: SmolLM2-135M, trained by a whole swarm, every submission verified.

    python examples/smollm2/run.py [--smoke] [--lora] [--workers 2]

Fetches the model, writes the tasks, runs the swarm of run.toml (coordinator, trainer, two relays, validator, evaluator, workers),
exports the last version and compares it with the model it came from on problems that nothing else has seen. Each part is a command
that is printed before it runs, and each may be killed: the same command goes on. `--smoke` proves the path with a few steps;
`--lora` trains an adapter of rank 16 instead of all weights, which is exported as a PEFT directory.
The last line is one JSON object; the exit code is 1 if a promise was broken.
"""

import argparse
import json
import runpy
import shlex
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shoal.config import ShoalConfig, load_config

ROOT = Path(__file__).resolve().parents[2]
RUN_FILE = "examples/smollm2/run.toml"
GOAL = 0.15
"""By how much held-out accuracy has to rise."""
SMOKE = (
    *("--run.steps", "3", "--training.groups_per_step", "4"),
    *("--training.checkpoint_every", "1", "--tasks.heldout", "32"),
)
LORA = ("--model.lora.rank", "16", "--training.learning_rate", "1.5e-4")
"""Ten times the rate of full training."""
U16 = NDArray[np.uint16]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smoke", action="store_true", help="three small steps instead of the whole run")
    parser.add_argument("--lora", action="store_true", help="train an adapter instead of all weights")
    parser.add_argument("--workers", type=int, default=2)
    options = parser.parse_args()
    name = f"smollm2{'-lora' if options.lora else ''}{'-smoke' if options.smoke else ''}"
    settings = ("--run.dir", f"runs/{name}", "--run.name", name)
    settings = (*settings, *(LORA if options.lora else ()), *(SMOKE if options.smoke else ()))
    config = load_config(ROOT / RUN_FILE, settings)
    tasks, trained, run_dir = Path(config.tasks.source).parent, config.run.dir / "policy", ROOT / config.run.dir
    started = time.monotonic()
    python("examples/smollm2/fetch.py", config.model.path)
    python("examples/smollm2/tasks.py", str(tasks))
    shoal("up", RUN_FILE, "--workers", str(options.workers), *settings)
    shutil.rmtree(ROOT / trained, ignore_errors=True)
    shoal("export", str(trained), RUN_FILE, *settings)
    comparison = compare(config, trained, tasks / "test.jsonl", problems=32 if options.smoke else 400)
    metrics = {
        "run": run_dir.name,
        "policy_version": exported_version(ROOT / trained),
        "seconds": round(time.monotonic() - started),
        **comparison,
        **swarm_metrics(run_dir),
        **({} if options.lora else delta_metrics(run_dir)),
    }
    (run_dir / "figures.json").write_text(json.dumps(metrics, indent=2) + "\n")
    broken = failures(metrics, smoke=options.smoke)
    for sentence in broken:
        print(f"failed: {sentence}", file=sys.stderr)
    print(json.dumps(metrics))
    raise SystemExit(1 if broken else 0)


def python(*arguments: str) -> None:
    _run(sys.executable, *arguments)


def shoal(*arguments: str) -> None:
    _run(sys.executable, "-m", "shoal", *arguments)


def _run(*command: str) -> None:
    print(f"$ {shlex.join(['python', *command[1:]])}", flush=True)
    done = subprocess.run(command, cwd=ROOT, check=False)
    if done.returncode:
        raise SystemExit(done.returncode)


def exported_version(policy: Path) -> int:
    """As the card of the exported policy says."""
    (line,) = [line for line in (policy / "README.md").read_text().splitlines() if line.startswith("policy_version: ")]
    return int(line.removeprefix("policy_version: "))


def compare(config: ShoalConfig, trained: Path, tasks: Path, *, problems: int) -> dict[str, Any]:
    """The trained policy against the model it came from, asked as in the run, by a paired test."""
    out, rollouts = config.run.dir / "comparison.json", config.rollouts
    shoal(
        *("eval", str(trained), "--against", config.model.path, "--tasks", str(tasks), "--limit", str(problems)),
        *(
            "--samples",
            "4",
            "--temperature",
            str(rollouts.temperature),
            "--max-new-tokens",
            str(rollouts.max_new_tokens),
        ),
        *("--no-thinking", "--system-prompt", config.tasks.system_prompt),
        *("--dir", str(config.run.dir / "evaluations"), "--json", str(out)),
    )
    found = json.loads((ROOT / out).read_text())["comparison"]
    overall = found[0]
    return {
        "before": round(overall["first"], 4),
        "after": round(overall["second"], 4),
        "difference": round(overall["difference"], 4),
        "difference_95": [round(overall["low"], 4), round(overall["high"], 4)],
        "p_value": overall["p_value"],
        "problems": overall["problems"],
        "by_category": {row["category"]: [round(row["first"], 3), round(row["second"], 3)] for row in found[1:]},
    }


def swarm_metrics(run_dir: Path) -> dict[str, Any]:
    summary = json.loads((run_dir / "summary.json").read_text())
    entries = [json.loads(line) for line in (run_dir / "ledger.jsonl").read_text().splitlines()]
    verdicts = [json.loads(entry["body"]) for entry in entries if entry.get("kind") == "verdict"]
    return {
        "steps": summary["steps"],
        "steps_planned": summary["steps_planned"],
        "run_seconds": round(summary["evaluations"][-1]["at_s"]),
        "submissions": len(verdicts),
        "submissions_audited": sum(len(verdict["audit_drawn"]) == verdict["groups"] for verdict in verdicts),
        "submissions_rejected": sum(not verdict["accepted"] for verdict in verdicts),
        "ledger_ok": summary["ledger_ok"],
        "max_staleness": summary["max_staleness"],
        "mean_delta_ratio": summary["delta_ratio"],
    }


def delta_metrics(run_dir: Path) -> dict[str, Any]:
    """The versions that the origin still has, fetched as anybody would: what each update changed and what its delta weighs."""
    bound_bytes = runpy.run_path(str(ROOT / "benchmarks" / "delta.py"))["bound_bytes"]
    updates = []
    versions = published(run_dir)
    _, before, _ = next(versions)
    for _, after, size_bytes in versions:
        updates.append((np.mean(before != after), after.nbytes / size_bytes, bound_bytes(before, after) / size_bytes))
        before = after
    changed, ratios, fractions = ([float(value) for value in column] for column in zip(*updates, strict=True))
    return {
        "updates_measured": len(updates),
        "weights_changed": round(statistics.fmean(changed), 5),
        "delta_ratio": round(statistics.fmean(ratios), 1),
        "delta_fraction_of_bound": round(min(fractions), 3),
    }


def published(run_dir: Path) -> Iterator[tuple[int, U16, int]]:
    """Version, weights as bf16 bit patterns, and the bytes of its delta."""
    from shoal.broadcast import OriginServer, WeightClient, WeightClientSettings
    from shoal.broadcast.manifest import open_manifest
    from shoal.broadcast.store import ShardStore
    from shoal.rundir import RunDirectory

    descriptor = RunDirectory(run_dir).descriptor()
    store = ShardStore(run_dir / "origin")
    server = OriginServer(store, "127.0.0.1", 0)
    server.start()
    try:
        client = WeightClient(
            descriptor.run_key,
            lambda: (server.url,),
            run_dir / "delta-check",
            WeightClientSettings(descriptor.run_id),
            clock=lambda: 0.0,  # the head of a run that ended may be old
        )
        for entry in client.head().versions:
            manifest = open_manifest(store.read("manifests", entry.manifest_digest), descriptor.run_key)
            directory = client.fetch_version(entry.version, entry.manifest_digest)
            size_bytes = min(encoding.size_bytes for encoding in manifest.encodings)
            yield entry.version, bits(directory / "model.safetensors"), size_bytes
        client.close()
    finally:
        server.stop()
        shutil.rmtree(run_dir / "delta-check", ignore_errors=True)


def bits(path: Path) -> U16:
    import torch
    from safetensors.torch import load_file

    tensors = load_file(path)
    return np.concatenate([tensors[name].view(torch.uint16).numpy().reshape(-1) for name in sorted(tensors)])


def failures(metrics: dict[str, Any], *, smoke: bool) -> list[str]:
    unaudited = metrics["submissions"] - metrics["submissions_audited"]
    checks = [
        (metrics["steps"] < metrics["steps_planned"], f"only {metrics['steps']} steps were trained."),
        (
            metrics["policy_version"] != metrics["steps_planned"],
            f"version {metrics['policy_version']} was compared, the run ends with {metrics['steps_planned']}.",
        ),
        (unaudited > 0, f"{unaudited} submissions were not audited."),
        (metrics["submissions_rejected"] > 0, f"{metrics['submissions_rejected']} honest submissions were rejected."),
        (not metrics["ledger_ok"], "the ledger does not verify."),
        (
            not smoke and metrics["difference"] < GOAL,
            f"held-out accuracy rose by {metrics['difference']:.3f}, {GOAL} is the goal.",
        ),
    ]
    return [sentence for failed, sentence in checks if failed]


if __name__ == "__main__":
    main()
