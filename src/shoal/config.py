"""One tree describes one run: TOML in, dotted flags override, `--dry-run` prints the result.

Every field has its reason beside it; `docs/reference/settings.md` is generated from this file. A wrong key or value is
refused with the nearest right one. Nothing else in the package reads run files or environment variables for settings.
"""

import difflib
import json
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from shoal.errors import ConfigError

Positive = Annotated[int, Field(gt=0)]
Fraction = Annotated[float, Field(ge=0, le=1)]


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


class RunConfig(Section):
    name: str = Field(default="run", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")
    """Part of the run id; letters, digits, dot, dash."""
    dir: Path = Path("runs/run")
    """Everything the owner's roles write: keys, store, rollouts, weights, checkpoints, logs."""
    steps: Positive = 1000
    """Training steps until the run is finished."""
    seed: int = 0
    """Seeds the run secret of a new run, and so every task draw and every sample."""


class ModelConfig(Section):
    path: str = "bundled"
    """`bundled`, a local directory, or a Hugging Face id."""


class TasksConfig(Section):
    source: str = "builtin:chain-sums"
    """Where tasks come from: `builtin:NAME`, `reasoning-gym:NAME`, `hf:ORG/NAME@REVISION`, or a JSONL, Parquet or Arrow
    file or a directory of them, which whoever joins fetches from the origin."""
    subset: str = ""
    """Configuration of a hub dataset, where it has several."""
    split: str = "train"
    """Split of a dataset."""
    count: Annotated[int, Field(ge=0)] = 0
    """How many tasks training draws from; 0 takes all of a dataset and 20,000 of a generator."""
    heldout: Positive = 512
    """How many tasks evaluation uses, at most a tenth of a dataset; training never draws them."""
    solve_rates: tuple[Fraction, Fraction] = (0.0, 1.0)
    """Band of solve rates that is kept; tasks whose rate nobody measured stay."""
    seed: int = 0
    """Seed of a generated task set, and of which tasks of a dataset are held out."""
    system_prompt: str = ""
    """System turn of the chat, left out if empty."""
    length_instruction: str = "Think for {target} tokens before giving a response."
    """Appended to the user turn when target lengths are set."""
    thinking: bool = True
    """Whether prompts end with an opened think tag and answers follow its end; without it the completion is the answer."""


class RolloutConfig(Section):
    group_size: Annotated[int, Field(ge=2)] = 8
    """G: samples per task, compared with each other."""
    tasks_per_slot: Positive = 4
    """Tasks in one submission; larger slots mean fewer requests, smaller ones finer sharing of work."""
    temperature: Annotated[float, Field(gt=0)] = 1.0
    """Sampling temperature; there is no top-k or top-p, whose cuts flip between honest machines."""
    max_prompt_tokens: Positive = 512
    """Longer prompts are refused when the task set is loaded."""
    max_new_tokens: Positive = 64
    """Hard limit of a completion."""


TASK_PART = "task"
"""The part of the reward that the task's own verifier gives."""


class RewardConfig(Section):
    parts: dict[str, Annotated[float, Field(gt=0)]] = {}
    """Weights of a reward of several parts, such as `{task = 0.9, format = 0.1}`; empty means the task's verifier alone.
    `"reward_model:NAME"` is a part that the validator's reward model of that name gives."""
    target_lengths: tuple[Positive, ...] = ()
    """Thinking budgets, one drawn per task from the slot seed; empty switches the length term off."""
    length_alpha: Annotated[float, Field(ge=0)] = 0.0003
    """α of reward = task reward − α·|target − length|."""


class TrainingConfig(Section):
    async_level: Annotated[int, Field(ge=0, le=16)] = 2
    """k: the batch of step s holds groups of versions s−k … s; 0 is synchronous."""
    groups_per_step: Positive = 32
    """P: useful groups that make a batch."""
    oversampling: Annotated[float, Field(ge=1)] = 4.0
    """At most this many times P groups are generated for one step; then it trains on what there is."""
    minibatches: Positive = 2
    """Disjoint parts of a batch, one optimiser step each."""
    epochs: Positive = 1
    """Passes over a batch; more than one leans on the clip, since the policy moves away from the data."""
    learning_rate: Annotated[float, Field(gt=0)] = 3e-7
    """AdamW step size after warm-up."""
    warmup_steps: Annotated[int, Field(ge=0)] = 25
    """Optimiser steps of linear warm-up."""
    betas: tuple[float, float] = (0.9, 0.99)
    """AdamW moments; 0.99 follows the drifting objective faster than 0.999."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.01
    """Decoupled weight decay."""
    max_grad_norm: Annotated[float, Field(gt=0)] = 0.1
    """Hard gradient clipping delays the entropy collapse seen in long runs."""
    advantage: str = "grpo"
    """`grpo`, `dr_grpo`, `rloo`, `batch_normalised`, or your own as `module:function`."""
    loss: str = "two_sided_grpo"
    """`two_sided_grpo`, `dapo`, `cispo`, `gspo`, or your own as `module:function`."""
    loss_weighting: Literal["token", "sequence"] = "token"
    """`token`: every trained token counts the same; `sequence`: every completion does (what GSPO wants)."""
    clip_epsilon: Annotated[float, Field(gt=0, lt=1)] = 0.2
    """ε of the trust region 1−ε … 1+ε."""
    clip_epsilon_high: Annotated[float, Field(ge=0)] = 0.0
    """Upper ε where it differs (0.28 in DAPO); 0 means the same as `clip_epsilon`."""
    clip_delta: Annotated[float, Field(gt=1)] = 4.0
    """δ bounds the ratio where the advantage is negative (two-sided clip), and is the weight cap of CISPO."""
    correction: str = "none"
    """Lag correction where validated behaviour log-probabilities exist: `none`, `truncated_token`, `truncated_sequence`,
    `masked`, `decoupled`, or your own as `module:function`."""
    correction_cap: Annotated[float, Field(ge=1)] = 5.0
    """Cap of the lag correction; 2 to 5 are usual."""
    overlong: Literal["keep", "mask", "penalise"] = "keep"
    """Truncated completions: trained like others, left out of the loss, or all long ones lose reward smoothly (DAPO)."""
    overlong_buffer: Positive = 1024
    """Tokens before the limit over which `penalise` takes the reward down from 0 to −1."""
    kl_beta: Annotated[float, Field(ge=0)] = 0.001
    """β of the KL term to the base model; 0 does not even load the reference model."""
    entropy_eta: Annotated[float, Field(ge=0)] = 1e-4
    """η of the entropy bonus."""
    kl_limit: Annotated[float, Field(gt=0)] = 1.0
    """The run stops when a step moves the policy, or the swarm lags behind it, by more than this KL per token."""
    micro_batch_tokens: Positive = 4096
    """Length of one packed bin; bounds activation memory."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where the trainer computes; `auto` takes a GPU if there is one."""
    compute_dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Matrix products; parameters and optimiser are fp32 always. `auto` is bfloat16 on GPU, float32 on CPU."""
    spread_masters: bool = False
    """Start each fp32 master at a random place of its bf16 cell instead of the middle, where a bf16 checkpoint puts it: published
    weights then follow steps that are small against the cell from the first one on. Version 0 stays the same bit for bit."""
    activation_checkpointing: bool = False
    """Recomputes layers in the backward pass: about a third more compute for a fraction of the activation memory."""
    checkpoint_every: Positive = 1
    """Steps between two checkpoints."""
    keep_checkpoints: Positive = 2
    """Checkpoints that stay on disk."""
    trackers: tuple[Literal["tensorboard", "wandb"], ...] = ()
    """Where step metrics go besides the JSON lines that are always written."""


class BroadcastConfig(Section):
    host: str = "127.0.0.1"
    """Address the origin listens on."""
    port: Annotated[int, Field(ge=0, le=65535)] = 7301
    """Port of the origin."""
    public_url: str = ""
    """How others reach the origin; derived from host and port if empty."""
    shard_bytes: Annotated[int, Field(ge=4096, le=64 << 20)] = 2 << 20
    """Small shards pipeline well through relays."""
    keep_versions: Positive = 8
    """Versions that stay downloadable beyond the asynchrony window."""
    anchor_every: Positive = 8
    """Every this many versions the weights are published in full too, so that late joiners need no long chain of deltas."""
    delta_from_bytes: Annotated[int, Field(ge=0)] = 16 << 20
    """Smaller models are always published in full: their deltas would save less than they cost."""
    head_ttl_s: Positive = 3600
    """A head older than this is refused, so that nobody can freeze the swarm on an old policy."""


class CoordinatorConfig(Section):
    host: str = "127.0.0.1"
    """Address the coordinator listens on."""
    port: Annotated[int, Field(ge=0, le=65535)] = 7300
    """Port of the coordinator."""
    public_url: str = ""
    """How others reach it; derived from host and port if empty."""
    store: Annotated[str, Field(pattern=r"^(sqlite|postgres(ql)?://.+)$")] = "sqlite"
    """`sqlite` (a file of the run directory), or the `postgresql://` URL that several coordinator processes share."""
    lease_s: Positive = 120
    """A slot that was not submitted by then goes to another key."""
    heartbeat_s: Positive = 5
    """How often a role shows that it lives."""
    gone_after_s: Positive = 30
    """Silence after which a worker is forgotten and its slots are given to others."""
    clock_window_s: Positive = 300
    """Signed requests older or newer than this are refused; nonces are kept that long."""
    max_upload_bytes: Positive = 64 << 20
    """Larger submissions are refused before they are read."""
    bucket: Annotated[str, Field(pattern=r"^(https?://[^/\s]+/\S+)?$")] = ""
    """Endpoint and bucket, as in https://s3.example.org/rollouts, for rollouts outside this host; empty keeps them on disk."""
    bucket_region: str = "us-east-1"
    """Region that requests to the bucket are signed for; most servers other than Amazon's take any."""
    requests_per_s_key: Annotated[float, Field(ge=0)] = 20.0
    """Requests that one key may make per second, with three seconds' worth at once; 0 limits nobody. The owner's keys are free."""
    requests_per_s_address: Annotated[float, Field(ge=0)] = 500.0
    """The same for one address, checked before a request is read: a household or a data centre may hold many workers."""
    trusted_proxies: tuple[str, ...] = ("127.0.0.1",)
    """Addresses of proxies whose X-Forwarded-For is believed; of anybody else it is not looked at."""
    keep_rollouts_steps: Positive = 64
    """Rollout files stay this many steps after their batch was formed, and longer while the trainer may need them to resume."""
    dispute_s: Positive = 86_400
    """No rollout file is removed earlier after its verdict: it is the evidence if somebody objects."""
    min_free_bytes: Annotated[int, Field(ge=0)] = 256 << 20
    """With less free disk space no work is given out or taken in, so that store and ledger can still be written."""


class TrustConfig(Section):
    probation_audits: Positive = 6
    """Clean audited submissions before a key is active."""
    audit_floor: Fraction = 0.1
    """Share of submissions of a proven key that is still audited."""
    stake_tokens: Positive = 50_000
    """Verified tokens whose credit is held back as stake; what exceeds them is released."""
    detection_power: Fraction = 0.99
    """Share of cheated submissions that an audit finds; measured by calibration, used by the expected-loss rule."""
    key_share: Fraction = 0.5
    """Largest share of one step that one key may fill while others work."""
    probation_share: Fraction = 0.5
    """Largest share of one step that all keys on probation may fill while proven keys work."""


class ValidationConfig(Section):
    calibration: str = "bundled"
    """`bundled`, or a calibration file made by `shoal calibrate`."""
    numerics_classes: tuple[str, ...] = ()
    """Classes of the calibration that may work here; none named admits all. Each is as strict as its arithmetic is fine."""
    foreign_calibration: bool = False
    """Accept a calibration that was made for another model: its limits may wrong the honest or let forgeries pass."""
    engine: Literal["torch", "vllm"] = "torch"
    """What the validators score with; `shoal validate --engine` chooses for one of them."""
    claim_s: Positive = 60
    """A submission that a validator took and did not judge by then goes to another one."""
    reward_models: dict[str, str] = {}
    """Directories of learned judges, such as `{polite = "judges/polite"}`, made by `shoal reward-model train`. The validator
    ranks each group with those that `reward.parts` or tasks name, as `reward_model:polite`."""
    max_tries: Positive = 3
    """Crashes over one submission before it is set aside without penalty."""


class EvaluationConfig(Section):
    every: Positive = 4
    """Policy versions between two held-out evaluations."""
    samples: Positive = 1
    """Completions per held-out task."""


class ShoalConfig(Section):
    """The whole run."""

    run: RunConfig = RunConfig()
    model: ModelConfig = ModelConfig()
    tasks: TasksConfig = TasksConfig()
    rollouts: RolloutConfig = RolloutConfig()
    reward: RewardConfig = RewardConfig()
    training: TrainingConfig = TrainingConfig()
    broadcast: BroadcastConfig = BroadcastConfig()
    coordinator: CoordinatorConfig = CoordinatorConfig()
    trust: TrustConfig = TrustConfig()
    validation: ValidationConfig = ValidationConfig()
    evaluation: EvaluationConfig = EvaluationConfig()

    @property
    def coordinator_url(self) -> str:
        return self.coordinator.public_url or f"http://{self.coordinator.host}:{self.coordinator.port}"

    @property
    def origin_url(self) -> str:
        return self.broadcast.public_url or f"http://{self.broadcast.host}:{self.broadcast.port}"


def load_config(path: Path | None, overrides: Sequence[str] = ()) -> ShoalConfig:
    """The run described by a TOML file and flags such as `--training.learning_rate 1e-4`."""
    tree: dict[str, Any] = {}
    if path is not None:
        tree = _read_toml(path)
    for key, text in _parse_flags(overrides):
        _assign(tree, key, text)
    return build_config(tree)


def build_config(tree: Mapping[str, Any]) -> ShoalConfig:
    try:
        return ShoalConfig.model_validate(tree)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(part) for part in first["loc"])
        if first["type"] == "extra_forbidden":
            raise ConfigError(f"Unknown setting {key}.", hint=_nearest_hint(key)) from None
        hint = "See `shoal config` for every setting and its meaning."
        raise ConfigError(f"Setting {key} = {first['input']!r} is wrong: {first['msg'].lower()}.", hint=hint) from None


def all_keys() -> list[str]:
    """Every dotted setting."""
    return [f"{section}.{name}" for section, model in _sections() for name in model.model_fields]


def describe() -> Iterable[tuple[str, str, str]]:
    """Every setting with its default and its reason."""
    for section, model in _sections():
        for name, field in model.model_fields.items():
            yield f"{section}.{name}", json.dumps(field.default, default=str), field.description or ""


def to_toml(config: ShoalConfig) -> str:
    lines: list[str] = []
    for section, values in config.model_dump(mode="json").items():
        lines.append(f"[{section}]")
        lines += [f"{name} = {_toml_value(value)}" for name, value in values.items()]
        lines.append("")
    return "\n".join(lines)


def _toml_value(value: object) -> str:
    """JSON is TOML for these types, but for tables, pairs of surrogates and the delete character."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_toml_value(key)} = {_toml_value(inner)}" for key, inner in value.items()) + "}"
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def _sections() -> Iterable[tuple[str, type[Section]]]:
    for name, field in ShoalConfig.model_fields.items():
        annotation = field.annotation
        assert isinstance(annotation, type)
        assert issubclass(annotation, Section)
        yield name, annotation


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text())
    except FileNotFoundError:
        raise ConfigError(f"There is no run file {path}.", hint="`configs/` has examples.") from None
    except OSError as error:
        raise ConfigError(f"The run file {path} cannot be read: {error.strerror}.") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not valid TOML: {error}.") from None


def _parse_flags(arguments: Sequence[str]) -> Iterable[tuple[str, str]]:
    rest = list(arguments)
    while rest:
        flag = rest.pop(0)
        name, equals, value = flag.partition("=")
        if not name.startswith("--"):
            raise ConfigError(f"Unexpected argument {flag!r}.", hint="Settings are given as --section.name VALUE.")
        if name[2:] not in all_keys():
            raise ConfigError(f"Unknown setting {name}.", hint=_nearest_hint(name[2:], prefix="--"))
        if not equals:
            if not rest:
                raise ConfigError(f"{name} needs a value.")
            value = rest.pop(0)
        yield name[2:], value


def _assign(tree: dict[str, Any], key: str, text: str) -> None:
    section, name = key.split(".", 1)
    try:
        value: Any = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        value = text
    branch = tree.setdefault(section, {})
    if not isinstance(branch, dict):
        raise ConfigError(f"[{section}] must be a table of settings.")
    branch[name] = value


def _nearest_hint(key: str, prefix: str = "") -> str:
    keys = all_keys()
    by_name = {name.split(".")[-1]: name for name in keys}
    matches = difflib.get_close_matches(key, [*keys, *dict(_sections())], n=1, cutoff=0.6)
    if not matches:
        matches = [by_name[name] for name in difflib.get_close_matches(key.split(".")[-1], by_name, n=1, cutoff=0.6)]
    return f"Did you mean {prefix}{matches[0]}?" if matches else "See `shoal config` for every setting."
