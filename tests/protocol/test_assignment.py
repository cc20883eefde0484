from hypothesis import given
from hypothesis import strategies as st

from shoal.protocol.assignment import TaskAssignment, assign, slot_seed
from shoal.protocol.steps import StepId, secret_commitment, step_secret

RUN_SECRET = bytes(range(32))


def test_golden_values_of_the_whole_derivation() -> None:
    # Changing any of these strands every worker of a running swarm: it needs a new protocol version.
    secret = step_secret(RUN_SECRET, StepId(step=3))
    seed = slot_seed(secret, 5)
    assert secret_commitment(RUN_SECRET) == "212902f8706f04a9e0b8924d1372d24fc871a094633d918509239e65527f3ffe"
    assert secret.hex() == "9df0c14ca0536cf3ffb0f30e24fd090f0baf37568dd95c6eac30d2eae506faca"
    assert seed.hex() == "c10a2f403f827938c92f6fc0bfcee456145d9f93eb7bbc2a54794c0a11f419d1"
    assert assign(seed, task_count=1000, tasks_per_slot=3, group_size=2, target_lengths=(8, 16, 32)) == (
        TaskAssignment(0, 788, 16, (1441552646713840480, 4397554532284877050)),
        TaskAssignment(1, 947, 32, (16894175743434262735, 3077665391100019706)),
        TaskAssignment(2, 975, 32, (16900787013068511006, 4719560556315840117)),
    )


@given(
    seed=st.binary(min_size=32, max_size=32),
    task_count=st.integers(1, 50),
    tasks_per_slot=st.integers(1, 12),
    group_size=st.integers(2, 6),
    target_lengths=st.lists(st.integers(1, 500), max_size=4),
)
def test_a_slot_is_complete_in_range_and_repeatable(
    seed: bytes, task_count: int, tasks_per_slot: int, group_size: int, target_lengths: list[int]
) -> None:
    def derive() -> tuple[TaskAssignment, ...]:
        return assign(
            seed,
            task_count=task_count,
            tasks_per_slot=tasks_per_slot,
            group_size=group_size,
            target_lengths=target_lengths,
        )

    groups = derive()
    assert groups == derive()
    assert [group.group for group in groups] == list(range(tasks_per_slot))
    assert len({group.task_index for group in groups}) == min(task_count, tasks_per_slot)
    assert all(0 <= group.task_index < task_count for group in groups)
    assert all(group.target_length in (target_lengths or [0]) for group in groups)
    seeds = [seed for group in groups for seed in group.sampling_seeds]
    assert len(set(seeds)) == tasks_per_slot * group_size
    assert all(0 <= seed < 1 << 64 for seed in seeds)


def test_every_step_and_slot_has_its_own_seed() -> None:
    seeds = {slot_seed(step_secret(RUN_SECRET, StepId(step=step)), slot) for step in range(20) for slot in range(20)}
    assert len(seeds) == 400


def test_tasks_are_drawn_evenly() -> None:
    counts = [0] * 10
    for slot in range(500):
        for group in assign(
            slot_seed(RUN_SECRET, slot), task_count=10, tasks_per_slot=2, group_size=2, target_lengths=()
        ):
            counts[group.task_index] += 1
    assert min(counts) > 60
    assert max(counts) < 140
