"""What a machine needs before it can score the tasks of a run: a sandbox, a package, or permission to import the owner's code.

Checked once when a role joins, so that it does not fail in the middle of a slot.
"""

from collections.abc import Collection

import pyarrow.compute as pc

from shoal.config import TASK_PART, RewardConfig
from shoal.errors import ShoalError
from shoal.tasks.sandbox.sandbox import require_sandbox
from shoal.tasks.task import TaskSet
from shoal.tasks.verifiers import gym
from shoal.tasks.verifiers.registry import find_verifier, is_own


class OwnVerifierError(ShoalError):
    """A run that needs its owner's own code, which this machine may not import."""

    code = "own_verifier"
    permanent = True


def check_requirements(tasks: TaskSet, reward: RewardConfig, *, own_verifiers: Collection[str] | None = None) -> None:
    """Refuses with a hint. `own_verifiers` are those that may be imported here; None trusts the run's owner."""
    types = verifier_names(tasks, reward)
    for name in sorted(filter(is_own, types)):
        if own_verifiers is not None and name not in own_verifiers:
            raise OwnVerifierError(
                f"The run scores answers with {name}, code of its owner that would be imported here.",
                hint=f"If you trust it and have it installed, join with --verifier {name}.",
            )
    if gym.TASK_TYPE in types:
        gym.require_package()
    if any(find_verifier(name).sandboxed for name in types):
        require_sandbox()


def verifier_names(tasks: TaskSet, reward: RewardConfig) -> set[str]:
    """Every verifier that the run uses, those inside `multi` tasks and other parts of the reward included."""
    types = {*tasks.task_types, *reward.parts} - {TASK_PART}
    if "multi" in types:
        several = TaskSet.of_table(tasks.table.filter(pc.equal(tasks.table.column("task_type"), "multi")))
        types |= {part["task_type"] for task in several for part in task.verification_info["parts"]}
    return types
