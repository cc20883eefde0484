from pathlib import Path

import pytest

from shoal.cli.main import main
from shoal.config import load_config
from shoal.owner.records import show_memory_plan

CONFIGS = Path(__file__).parents[2] / "configs"


@pytest.mark.parametrize("run_file", sorted(CONFIGS.glob("*.toml")), ids=lambda path: path.stem)
def test_every_shipped_run_file_can_be_resolved_and_planned(run_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["train", str(run_file), "--dry-run"])
    assert ended.value.code == 0
    assert f'name = "{load_config(run_file).run.name}"' in capsys.readouterr().out
    lines: list[str] = []
    show_memory_plan(load_config(run_file), 8, lines.append, shapes=CONFIGS / "shapes")
    assert "on 8 ranks" in lines[0]
    assert "total per rank" in lines[1]
