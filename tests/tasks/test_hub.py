"""Datasets of the hub by id: a branch becomes a commit, rows become tasks without code, and a second load needs no network."""

import io
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from shoal.config import TasksConfig
from shoal.tasks import load_tasks
from tasks.fake_hub import COMMIT, fake_hub
from tasks.rows import DEEPSCALER, INTELLECT_2, NUMINA_1_5, SYNTHETIC_1

LOAD = """
import json, sys
from pathlib import Path
from shoal.config import TasksConfig
from shoal.errors import ShoalError
from shoal.tasks import load_tasks
from shoal.tasks.sources import pin_source
for source in sys.argv[2:]:
    try:
        config = pin_source(TasksConfig(source=source))
        sets = load_tasks(config, cache=Path(sys.argv[1]))
        rows = sorted((task.task_type, task.prompt) for tasks in (sets.train, sets.heldout) for task in tasks)
        print(json.dumps({"source": config.source, "digest": sets.train.digest, "rows": rows}))
    except ShoalError as error:
        print(json.dumps({"code": error.code, "message": str(error)}))
"""


def parquet(rows: list[dict[str, Any]]) -> bytes:
    sink = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(rows), sink)
    return sink.getvalue()


def load(tmp_path: Path, *sources: str, **environment: str) -> list[dict[str, Any]]:
    """In a process of its own: the client of the hub reads its settings when it is imported."""
    command = [sys.executable, "-c", LOAD, str(tmp_path / "tasks"), *sources]
    settings = {**os.environ, "HF_HOME": str(tmp_path / "hub"), "HF_HUB_DISABLE_TELEMETRY": "1", **environment}
    done = subprocess.run(command, env=settings, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_public_datasets_load_by_id(tmp_path: Path) -> None:
    files = {
        "PrimeIntellect/INTELLECT-2-RL-Dataset": {"data/train-00000-of-00001.parquet": parquet(INTELLECT_2)},
        "AI-MO/NuminaMath-1.5": {"data/train-00000-of-00001.parquet": parquet(NUMINA_1_5)},
        "agentica-org/DeepScaleR-Preview-Dataset": {"deepscaler.json": json.dumps(DEEPSCALER).encode()},
        "PrimeIntellect/SYNTHETIC-1": {"data/train-00000-of-00001.parquet": parquet(SYNTHETIC_1)},
    }
    sources = [f"hf:{name}" for name in files]
    with fake_hub(files) as hub:
        online = {"HF_ENDPOINT": hub.url, "HF_HUB_OFFLINE": "0"}
        found = load(tmp_path, *sources, "hf:nobody/nothing", **online)
    intellect, numina, deepscaler, synthetic, absent = found
    assert [one["source"] for one in found[:4]] == [f"{source}@{COMMIT}" for source in sources]
    assert [kind for kind, _ in intellect["rows"]] == ["prime_rl_code", "prime_rl_code", "verifiable_math"]
    assert [kind for kind, _ in numina["rows"]] == ["multiple_choice", "verifiable_math", "verifiable_math"]
    assert [kind for kind, _ in deepscaler["rows"]] == ["verifiable_math", "verifiable_math"]
    assert [kind for kind, _ in synthetic["rows"]] == ["code_output_prediction", "verifiable_code"]
    assert absent["message"].startswith("The hub has no dataset nobody/nothing, or does not show it to you.")
    local = tmp_path / "set.parquet"
    local.write_bytes(parquet(INTELLECT_2))
    sets = load_tasks(TasksConfig(source=str(local)), cache=tmp_path / "tasks")
    rows = [[task.task_type, task.prompt] for tasks in (sets.train, sets.heldout) for task in tasks]
    assert sorted(rows) == intellect["rows"], "a file of the same rows gives the same tasks"
    again = load(tmp_path, intellect["source"], HF_HUB_OFFLINE="1")
    assert again == [intellect], "a pinned dataset that was loaded once needs no hub"
