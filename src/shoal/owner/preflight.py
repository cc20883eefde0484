"""What cannot work about a run, said before it is made: `--dry-run` prints these sentences.

Everything is found out on this machine in a moment: nothing is downloaded, loaded or asked.
"""

import importlib.util
import netrc
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import urlsplit

from shoal.config import ShoalConfig
from shoal.coordinator.rules.trust import LossRule
from shoal.coordinator.store.bucket import Credentials
from shoal.errors import ConfigError
from shoal.owner.addresses import check_addresses
from shoal.tasks.sources import is_local

BYTES_PER_TOKEN = 16
"""Of a rollout file: token, log-probability, and its share of the commitments."""
PLACEHOLDERS = ("example.org", "example.com", "example.net", "example", "invalid", "test")
Check = Callable[[ShoalConfig], Iterator[str]]


def foreseen_problems(config: ShoalConfig) -> list[str]:
    return [problem for check in CHECKS for problem in check(config)]


def _refusals(config: ShoalConfig) -> Iterator[str]:
    """What `shoal init` and the coordinator refuse."""
    checks: list[Callable[[], object]] = [lambda: check_addresses(config), LossRule.of(config).require]
    if config.coordinator.bucket:
        checks.append(Credentials.from_environment)
    for check in checks:
        try:
            check()
        except ConfigError as error:
            yield str(error)


def _placeholders(config: ShoalConfig) -> Iterator[str]:
    for name, url in (("coordinator", config.coordinator_url), ("broadcast", config.origin_url)):
        host = urlsplit(url).hostname or ""
        if any(host == word or host.endswith(f".{word}") for word in PLACEHOLDERS):
            yield f"{name}.public_url = {url} is an example; name your own machine."


def _files(config: ShoalConfig) -> Iterator[str]:
    calibration = config.validation.calibration
    if calibration != "bundled" and not Path(calibration).is_file():
        yield f"There is no calibration {calibration}; make it with `shoal calibrate {calibration} RUN_FILE`."
    if calibration == "bundled" and config.model.path != "bundled" and not config.validation.foreign_calibration:
        yield (
            f"The bundled calibration was not measured on {config.model.path};"
            " make one with `shoal calibrate OUT RUN_FILE` and name it in validation.calibration."
        )
    if is_local(config.tasks) and not Path(config.tasks.source).exists():
        yield f"There are no tasks at {config.tasks.source} (tasks.source)."
    for name, path in config.validation.reward_models.items():
        if not Path(path).is_dir():
            yield f"There is no reward model {name} at {path}."


def _recipe(config: ShoalConfig) -> Iterator[str]:
    rollouts, training = config.rollouts, config.training
    if config.model.path != "bundled" and config.tasks.source == "builtin:chain-sums":
        yield "tasks.source is builtin:chain-sums, the demo's sums; name the tasks that the model should learn."
    longest = rollouts.max_prompt_tokens + rollouts.max_new_tokens
    if training.micro_batch_tokens < longest:
        yield f"training.micro_batch_tokens = {training.micro_batch_tokens} cannot hold a sample of {longest} tokens."
    largest = rollouts.tasks_per_slot * rollouts.group_size * rollouts.max_new_tokens * BYTES_PER_TOKEN
    if config.coordinator.max_upload_bytes < largest:
        yield f"coordinator.max_upload_bytes may refuse the largest submissions; {largest} holds any."


def _machine(config: ShoalConfig) -> Iterator[str]:
    if config.validation.engine == "vllm" and importlib.util.find_spec("vllm") is None:
        yield "validation.engine is vllm, which is not installed on this machine."
    if "wandb" in config.training.trackers and not _has_wandb_login():
        yield "training.trackers names wandb, and nobody is logged in here: `wandb login`, or set WANDB_MODE=offline."
    if "tensorboard" in config.training.trackers and importlib.util.find_spec("tensorboard") is None:
        yield "training.trackers names tensorboard, which is not installed on this machine."


def _has_wandb_login() -> bool:
    if os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_MODE") in ("offline", "disabled", "dryrun"):
        return True
    try:
        return netrc.netrc(os.environ.get("NETRC") or Path.home() / ".netrc").authenticators("api.wandb.ai") is not None
    except (OSError, netrc.NetrcParseError):
        return False


CHECKS: tuple[Check, ...] = (_refusals, _placeholders, _files, _recipe, _machine)
