"""Tables of docs/ that are made from the stored results of benchmarks and from the bundled calibration."""

import json
from pathlib import Path
from typing import Any

from shoal.validation import load_calibration
from tools.reference.text import table

RESULTS = Path(__file__).resolve().parents[2] / "docs" / "results"


def stored(name: str) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text())
    return loaded


def residual() -> str:
    classes = load_calibration("bundled").classes
    rows = [
        [
            f"`{name}`",
            f"{known.limits.flips_per_1000:.2f}",
            f"{known.limits.flip_scale:.4f}",
            f"{known.evidence.residual_bits_per_1000_tokens:.2f}",
        ]
        for name, known in classes.items()
    ]
    return table(["numerics class", "flips per 1,000", "scale", "bits per 1,000 tokens"], rows)


def detection() -> str:
    """One row per kind of worker, from the run whose results are kept."""
    results = stored("detection")
    honest = [
        "honest, float32 and bfloat16",
        str(results["honest_submissions"]),
        f"{results['honest_rejected']} rejected",
        *[""] * 4,
    ]
    cheats = results["cheats"] | results["slow_cheats"]
    rows = [_detection_row(name, cheat, slow=name in results["slow_cheats"]) for name, cheat in cheats.items()]
    titles = ["worker", "trials", "missed", "found by", "groups found", "until the ban", "95 % within"]
    return table(titles, [honest, *rows])


def _detection_row(name: str, cheat: dict[str, Any], *, slow: bool) -> list[str]:
    ban = cheat["submissions_until_ban_at_floor"]
    until = f"{ban:g}" if ban else f"unused after {cheat['submissions_until_unused_at_floor']:g}"
    worst = str(cheat["submissions_until_ban_at_floor_worst95"] or "")
    kind = f"{name} (slow)" if slow else name
    alone = "" if cheat["groups_found"] is None else f"{cheat['groups_found']:.0%}"
    return [kind, str(cheat["trials"]), str(cheat["missed"]), f"`{cheat['stage']}`", alone, until, worst]


def audit_costs() -> str:
    audit, build = stored("audit_cost"), stored("commitments")
    hot, together = audit["hot"], audit["together"]
    rows = [
        ["full audit, CPU seconds of the validator ÷ worker", str(audit["full_audit"])],
        ["at the audit floor of 10 %", str(audit["at_floor"])],
        ["the same two at temperature 2, with few duplicates", f"{hot['full_audit']}, {hot['at_floor']}"],
        [
            f"the same two, {together['files']} files read together, groups really drawn",
            f"{together['full_audit']}, {together['at_floor']}",
        ],
        ["re-scoring of rewards alone", str(audit["rescoring"])],
        *(
            [f"{what}, {width} wide, speed ÷ `toploc` 0.1.6", f"{build[f'cpu_{name}_speedup_{width}']:.1f}"]
            for name, what in (("build", "building commitments"), ("verify", "verifying them"))
            for width in (576, 5120)
        ),
    ]
    return table(["what", "measured"], rows)


def narrow_products() -> str:
    found = stored("narrow_products")
    rows = [[rows, f"{ratio:g}", f"{found['over_float32'][rows]:g}"] for rows, ratio in found["speedup"].items()]
    return table(["rows", "speed ÷ torch's bf16 product", "time ÷ float32 product"], rows)


BFLOAT16_WORKERS = {
    "honest": "honest",
    "int4": "int4 weights",
    "fp8": "fp8 weights",
    "int8": "int8 weights",
    "int8_in_float32": "int8 weights, float32 compute",
    "cache_fp8": "fp8 cache",
    "cache_int8": "int8 cache",
    "stale": "stale by one version",
    "stale_layer": "one stale layer",
    "temperature_x0.95": "temperature × 0.95",
    "temperature_x1.05": "temperature × 1.05",
}


def detection_bf16(model: str) -> str:
    """One row per kind of worker that computes in bfloat16."""
    cheats = stored(f"detection_bf16_{model}")["cheats"]
    rows = [
        [
            title,
            f"{cheats[name]['pair_error_median']:.3f}",
            f"{cheats[name]['flips_per_1000']:g}",
            "" if name == "honest" else f"{cheats[name]['auc_at_1000_tokens']:g}",
            _tokens_to_ban(cheats[name]["tokens_to_ban"]["true_proofs"]),
            _tokens_to_ban(cheats[name]["tokens_to_ban"]["own_proofs"]),
        ]
        for name, title in BFLOAT16_WORKERS.items()
    ]
    titles = ["worker", "error", "flips per 1,000", "AUC", "ban, true proofs", "ban, own proofs"]
    return table(titles, rows)


def detection_bf16_vllm(model: str) -> str:
    """One row per cheat that really generated on vLLM."""
    found = stored(f"detection_bf16_{model}_vllm")
    rows = [
        [
            BFLOAT16_WORKERS[name],
            f"{cheat['tokens']:,}",
            f"{cheat['flips_per_1000']:g}",
            f"{cheat['auc_at_1000_tokens']:g}",
            _tokens_to_ban(cheat["tokens_to_ban"]["true_proofs"]),
            _tokens_to_ban(cheat["tokens_to_ban"]["own_proofs"]),
        ]
        for name in BFLOAT16_WORKERS
        if (cheat := found["cheats"].get(name))
    ]
    return table(["worker", "tokens", "flips per 1,000", "AUC", "ban, true proofs", "ban, own proofs"], rows)


def _tokens_to_ban(found: dict[str, Any]) -> str:
    if found["median"] is None:
        return f"{found['banned']} of {found['of']} in {found['within']:,}" if found["banned"] else "never"
    return f"{found['median']:,} ({found['worst95']:,})"
