"""From the `tasks` section of a run to its task sets, by the name of the source."""

from collections.abc import Callable

from shoal.config import TasksConfig
from shoal.errors import ConfigError
from shoal.tasks import chain_sums
from shoal.tasks.model import TaskSets

GENERATORS: dict[str, Callable[[int, int, int], TaskSets]] = {
    chain_sums.SOURCE: chain_sums.generate,
}


def load_tasks(config: TasksConfig) -> TaskSets:
    """Training and held-out tasks; the same config gives the same sets on every machine."""
    try:
        generate = GENERATORS[config.source]
    except KeyError:
        known = ", ".join(sorted(GENERATORS))
        raise ConfigError(f"There is no task source {config.source!r}.", hint=f"Known: {known}.") from None
    return generate(config.count, config.heldout, config.seed)
