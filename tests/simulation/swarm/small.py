"""A small swarm as a scenario, for tests that change one thing of it."""

from typing import Any

from shoal.simulation.swarm import SwarmSpec
from shoal.simulation.swarm.spec import build_scenario


def tree(**changes: dict[str, Any]) -> dict[str, Any]:
    """Six laptops and a trainer that they keep busy."""
    found: dict[str, Any] = {
        "run": {"steps": 12},
        "settings": {
            "rollouts": {"group_size": 4, "tasks_per_slot": 2, "max_new_tokens": 512},
            "training": {"groups_per_step": 8},
            "coordinator": {"lease_s": 300},
            "trust": {"stake_tokens": 100_000},
        },
        "work": {"median_tokens": 100, "useful_share": 0.7},
        "weights": {"full_bytes": 1e8, "delta_bytes": 1e6},
        "trainer": {"step_s": 20.0, "stage_s": 1.0},
        "validators": {"count": 2, "file_s": 0.05, "audit_tokens_per_s": 20_000},
        "workers": [{"name": "laptop", "count": 6, "tokens_per_s": 200, "rows": 8}],
    }
    for name, values in changes.items():
        if name == "workers":
            found["workers"] = [one | values for one in found["workers"]]
        elif name == "settings":
            for section, settings in values.items():
                found["settings"][section] = found["settings"].get(section, {}) | settings
        else:
            found[name] = found.get(name, {}) | values
    return found


def spec(**changes: dict[str, Any]) -> SwarmSpec:
    return build_scenario(tree(**changes))
