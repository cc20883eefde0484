"""How the threads of a machine are shared."""

from pathlib import Path

import pytest

from shoal.errors import ConfigError
from shoal.host.threads import ROLES, Threads, parse_threads, usable_cores


@pytest.mark.parametrize(("cores", "trainer", "other"), [(1, 1, 1), (2, 1, 1), (4, 2, 1), (16, 8, 4), (64, 32, 16)])
def test_the_trainer_has_half_of_the_machine_and_the_others_share_the_rest(
    cores: int, trainer: int, other: int
) -> None:
    assert Threads().of("trainer", others=2, cores=cores) == trainer
    assert Threads().of("validator", others=2, cores=cores) == other


def test_the_trainer_computes_alike_however_many_workers_there_are() -> None:
    assert {Threads().of("trainer", others=others, cores=24) for others in range(40)} == {12}


def test_every_role_has_a_thread_however_many_there_are() -> None:
    assert {Threads().of(role, others=100, cores=1) for role in ROLES} == {1}


def test_flags_name_all_roles_or_one() -> None:
    assert parse_threads([]) == Threads()
    assert parse_threads([], each=2) == Threads(2)
    assert parse_threads(["4"], each=2) == Threads(4)
    assert parse_threads(["trainer=8", "workers=2"], each=1) == Threads(1, {"trainer": 8, "workers": 2})


@pytest.mark.parametrize("word", ["", "0", "-1", "many", "trainer=", "trainer=0", "relay=2", "=3", "trainer=1.5"])
def test_what_is_no_number_of_threads_is_refused_with_an_example(word: str) -> None:
    with pytest.raises(ConfigError, match="trainer=8; roles are trainer, validator, evaluator, workers"):
        parse_threads([word])


def test_the_quota_of_a_container_counts(tmp_path: Path) -> None:
    quota = tmp_path / "cpu.max"
    everything = usable_cores(tmp_path / "nowhere")
    quota.write_text("max 100000\n")
    assert usable_cores(quota) == everything >= 1
    quota.write_text("50000 100000\n")
    assert usable_cores(quota) == 1
    quota.write_text("100000 100000\n")
    assert usable_cores(quota) == 1
