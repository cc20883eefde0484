"""Every setting of a run: its type, its default and, below it, its reason.

`docs/reference/settings.md` is generated from this file. Settings marked `FIXED` belong to what workers and validators build on:
a run keeps them from its first start to its last. All others may change between two starts.
"""

from ipaddress import ip_network
from pathlib import Path
from typing import Annotated, Literal
from urllib.parse import urlsplit

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

from shoal.net import WILDCARDS, http_url

Positive = Annotated[int, Field(gt=0)]
Fraction = Annotated[float, Field(ge=0, le=1)]
Url = Annotated[str, Field(pattern=r"^(https?://[^/\s]+(/\S*)?)?$")]
Network = Annotated[str, AfterValidator(lambda text: str(ip_network(text, strict=False)) and text)]
EngineKind = Literal["torch", "vllm"]
FIXED = "fixed"
"""Marks a setting, or all of a section, that a run keeps."""


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


class RunConfig(Section):
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$"), FIXED] = "run"
    """Part of the run id; letters, digits, dot, dash."""
    dir: Path = Path("runs/run")
    """Everything the owner's roles write: keys, store, rollouts, weights, checkpoints, logs."""
    steps: Positive = 1000
    """Training steps until the run is finished."""
    seed: Annotated[int, FIXED] = 0
    """Seeds the trainer's own randomness. The secret that decides slots and audits never depends on it."""
    threads: Annotated[int, Field(ge=0)] = 0
    """Compute threads of each role that `shoal up` starts; 0 shares what the machine has: half for the trainer."""


class LoraConfig(Section):
    rank: Annotated[int, Field(ge=0, le=4096)] = 0
    """Rank of a LoRA adapter that is trained and published instead of the weights; 0 trains all weights."""
    alpha: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 32.0
    """The adapter's part of a layer's output is scaled by alpha / rank."""
    target_modules: tuple[str, ...] = ()
    """Linear layers with an adapter, by the end of their names, such as `q_proj`; none named adapts all but the LM head."""

    @property
    def scale(self) -> float:
        return self.alpha / self.rank


class ModelConfig(Section):
    path: str = "bundled"
    """`bundled`, a local directory, or a Hugging Face id; with `model.lora` also a PEFT directory, whose adapter the run starts
    from."""
    lora: LoraConfig = LoraConfig()
    """A small adapter beside weights that stay as they are."""

    @property
    def adapter(self) -> LoraConfig | None:
        """None where all weights are trained."""
        return self.lora if self.lora.rank else None


class TasksConfig(Section):
    source: str = "builtin:chain-sums"
    """Where tasks come from: `builtin:NAME`, `reasoning-gym:NAME`, `hf:ORG/NAME@REVISION`, or a JSONL, Parquet or Arrow
    file or a directory of them, which new workers fetch from the origin."""
    split: Annotated[str, Field(pattern=r"^([^/]+/)?[^/]+$")] = "train"
    """Split of a dataset, as `train`; where a hub dataset has several configurations, with its name, as `main/train`."""
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
    environment: Annotated[str, Field(max_length=200)] = ""
    """Environment of every task that names none: a built-in one (`calculator`, `guess-number`, `reasoning-gym`) or `module:Class`
    of your own. Empty: a verifier scores single completions."""
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

    @property
    def longest_row(self) -> int:
        """Most tokens of a prompt with its completion."""
        return self.max_prompt_tokens + self.max_new_tokens


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


LOSS_DEFAULTS: dict[str, dict[str, object]] = {
    "dapo": {"clip_epsilon": 0.2, "clip_epsilon_high": 0.28},
    "gspo": {"clip_epsilon": 3e-4, "clip_epsilon_high": 4e-4, "loss_weighting": "sequence"},
}
"""What the papers of these losses use (arXiv 2503.14476, 2507.18071)."""


class TrainingConfig(Section):
    async_level: Annotated[int, Field(ge=0, le=16), FIXED] = 2
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
    schedule: Literal["constant", "cosine", "linear"] = "constant"
    """The step size after warm-up; `cosine` and `linear` bring it to 0 at the end of `run.steps`, which must then stay as it is."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.01
    """Decoupled weight decay."""
    max_grad_norm: Annotated[float, Field(gt=0)] = 0.1
    """Hard gradient clipping delays the entropy collapse seen in long runs."""
    advantage: str = "grpo"
    """`grpo`, `dr_grpo`, `rloo`, `batch_normalised`, or your own as `module:function`."""
    loss: str = "two_sided_grpo"
    """`two_sided_grpo`, `dapo`, `cispo`, `gspo`, or your own as `module:function`."""
    loss_weighting: Literal["token", "sequence"] = "token"
    """`token`: every trained token counts the same; `sequence`: every completion does, as in GSPO, whose default it is."""
    clip_epsilon: Annotated[float, Field(gt=0, lt=1)] = 0.2
    """ε of the trust region 1−ε … 1+ε. Unset, `gspo` takes 0.0003 and 0.0004 above, as in its paper."""
    clip_epsilon_high: Annotated[float, Field(ge=0)] = 0.0
    """Upper ε where it differs; 0 means the same as `clip_epsilon`. `dapo` takes 0.28 if neither is set."""
    clip_delta: Annotated[float, Field(gt=1)] = 4.0
    """δ bounds the ratio where the advantage is negative (two-sided clip), and is the weight cap of CISPO."""
    correction: str = "none"
    """Lag correction where validated behaviour log-probabilities exist: `none`, `truncated_token`, `truncated_sequence`,
    `masked`, `decoupled`, or your own as `module:function`."""
    overlong: Literal["keep", "mask", "penalise"] = "keep"
    """Truncated completions: trained like others, left out of the loss, or all long ones lose reward smoothly (DAPO)."""
    kl_beta: Annotated[float, Field(ge=0)] = 0.001
    """β of the KL term to the base model; 0 does not even load the reference model."""
    kl_form: Literal["loss", "reward"] = "loss"
    """`loss` adds β·k3 to each token's loss (GRPO); `reward` takes β·log(π_old/π_ref) from each token's advantage (PPO), so that
    clip and lag correction apply to it."""
    entropy_eta: Annotated[float, Field(ge=0)] = 1e-4
    """η of the entropy bonus."""
    screening_limit: Annotated[float, Field(gt=0)] = 30.0
    """A group of a proposed batch whose log-probability lies this many standard deviations from what the trainer's policy expects
    is held back and audited; honest groups of every admitted age stay below it."""
    kl_limit: Annotated[float, Field(gt=0)] = 1.0
    """The run stops when a step moves the policy, or the swarm lags behind it, by more than this KL per token."""
    micro_batch_tokens: Positive = 4096
    """Length of one packed bin; bounds activation memory."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where the trainer computes; `auto` takes a GPU if there is one."""
    compute_dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Matrix products; parameters and optimiser are fp32 always. `auto` is bfloat16 on GPU, float32 on CPU."""
    dither_masters: bool = False
    """Start each fp32 master weight at a random place of its bf16 rounding interval instead of the middle, where a bf16 checkpoint
    puts it: published weights then follow small steps at once. Version 0 stays the same bit for bit."""
    activation_checkpointing: bool = False
    """Recomputes layers in the backward pass: about a third more compute for a fraction of the activation memory."""
    checkpoint_every: Positive = 1
    """Steps between two checkpoints."""
    keep_checkpoints: Positive = 2
    """Checkpoints that stay on disk."""
    trackers: tuple[Literal["tensorboard", "wandb"], ...] = ()
    """Where step metrics go besides the JSON lines that are always written."""

    @model_validator(mode="before")
    @classmethod
    def _take_defaults_of_loss(cls, given: object) -> object:
        """A run file that names an ε names the whole region; one that names none gets that of its loss."""
        if not isinstance(given, dict):
            return given
        known = LOSS_DEFAULTS.get(str(given.get("loss")), {})
        names_region = "clip_epsilon" in given or "clip_epsilon_high" in given
        taken = {name: value for name, value in known.items() if not (names_region and name.startswith("clip_"))}
        return taken | given


class ListenConfig(Section):
    """Where a server listens, and how others reach it."""

    host: str
    port: int
    public_url: str

    @property
    def url_here(self) -> str:
        """How processes of this host reach it."""
        return self.url_here_at(self.port)

    def url_here_at(self, port: int) -> str:
        return http_url(WILDCARDS.get(self.host, self.host), port)

    def public_url_at(self, port: int) -> str:
        """How others reach a neighbour of the server that listens on another port."""
        return http_url(urlsplit(self.public_url).hostname or self.host, port)


class BroadcastConfig(ListenConfig):
    host: str = "127.0.0.1"
    """Address the origin listens on; 0.0.0.0 or :: for all of this machine."""
    port: Annotated[int, Field(ge=0, le=65535)] = 7301
    """Port of the origin; the relays of `shoal up` take the ports after it."""
    public_url: Url = ""
    """How others reach the origin; needed if host is 0.0.0.0 or ::, derived from host and port if empty."""
    shard_bytes: Annotated[int, Field(ge=4096, le=64 << 20)] = 2 << 20
    """Small shards pipeline well through relays."""
    keep_versions: Positive = 8
    """Versions that stay downloadable beyond the asynchrony window."""


class CoordinatorConfig(ListenConfig):
    host: str = "127.0.0.1"
    """Address the coordinator listens on; 0.0.0.0 or :: for all of this machine."""
    port: Annotated[int, Field(ge=0, le=65535)] = 7300
    """Port of the coordinator."""
    public_url: Url = ""
    """How others reach it; needed if host is 0.0.0.0 or ::, derived from host and port if empty."""
    store: Annotated[str, Field(pattern=r"^(sqlite|postgres(ql)?://.+)$"), FIXED] = "sqlite"
    """`sqlite` (a file of the run directory), or the `postgresql://` URL that several coordinator processes share."""
    lease_s: Positive = 120
    """A slot that was not submitted by then goes to another key."""
    just_in_time: bool = True
    """Lease work as late as the trainer allows, so that groups are fresh; false leases at once."""
    gone_after_s: Positive = 30
    """Silence after which a worker is forgotten and its slots are given to others; heartbeats come six times as often."""
    max_upload_bytes: Positive = 64 << 20
    """Larger submissions are refused before they are read."""
    bucket: Annotated[str, Field(pattern=r"^(https?://[^/\s]+/\S+)?$")] = ""
    """Endpoint and bucket, as in https://s3.example.org/rollouts, for rollouts outside this host; empty keeps them on disk."""
    requests_per_s_key: Annotated[float, Field(ge=0)] = 20.0
    """Requests that one key may make per second, with three seconds' worth at once; 0 limits nobody. Those of accepted files do not
    count, and the owner's keys are free."""
    requests_per_s_address: Annotated[float, Field(ge=0)] = 500.0
    """The same for one IPv4 address or IPv6 /64, checked before a request is read. Keys with accepted work do not share it. 0 also
    lifts the limits of an address on connections and new keys."""
    trusted_proxies: tuple[Network, ...] = ("127.0.0.1",)
    """Addresses or networks (10.0.0.0/8) of proxies whose X-Forwarded-For is believed; of anybody else it is not looked at."""
    keep_rollouts_s: Positive = 86_400
    """Rollout files stay this long after their verdict, as evidence if somebody objects, and longer while the trainer may need
    them to resume."""

    @property
    def heartbeat_s(self) -> float:
        """How often a role sends a heartbeat."""
        return self.gone_after_s / 6


class TrustConfig(Section):
    probation_audits: Positive = 6
    """Clean audits of whole submissions before a key is active."""
    audit_floor: Fraction = 0.1
    """Share of the groups of a proven key that is still audited, each drawn by itself."""
    stake_tokens: Positive = 50_000
    """Verified tokens whose credit is held back as stake; what exceeds them is released."""
    key_share: Fraction = 0.5
    """Largest share of one step that one key may fill while others work."""
    unaudited_share: Fraction = 0.1
    """Largest share of a batch that groups of one key may fill without an audit; what a key makes beyond it is audited. And of the
    useful groups of every file a share is audited, so that forged ones beyond this share, of any number of keys, all escape with
    a chance of 5 %. `shoal init` says what both cost; small batches cost most. 1 leaves it to the draw."""
    probation_share: Fraction = 0.5
    """Largest share of one step that all keys on probation may fill while proven keys work."""


class ValidationConfig(Section):
    calibration: str = "bundled"
    """`bundled`, or a calibration file made by `shoal calibrate`."""
    numerics_classes: tuple[str, ...] = ()
    """Classes of the calibration that may work here; none named admits those of the finest compute type. A worker takes the
    first that its machine can compute, so the order decides. A coarser one lets more forgeries pass: `shoal init` shows what
    each costs."""
    foreign_calibration: bool = False
    """Accept a calibration that was made for another model: its limits may wrong the honest or let forgeries pass."""
    engine: EngineKind = "torch"
    """What the validators score with; `shoal validate --engine` chooses for one of them."""
    claim_s: Positive = 60
    """A submission that a validator claimed and did not decide by then goes to another one; the time that a large version takes to
    load comes on top."""
    reward_models: dict[str, str] = {}
    """Directories of reward models, such as `{polite = "models/polite"}`, made by `shoal reward-model train`. The validator
    ranks each group with those that `reward.parts` or tasks name, as `reward_model:polite`."""
    max_tries: Positive = 3
    """Crashes over one submission before its file is quarantined; the worker is not penalised."""


class EvaluationConfig(Section):
    every: Positive = 4
    """Policy versions between two held-out evaluations."""
    samples: Positive = 1
    """Completions per held-out task."""


class ShoalConfig(Section):
    """The whole run."""

    run: RunConfig = RunConfig()
    model: Annotated[ModelConfig, FIXED] = ModelConfig()
    tasks: Annotated[TasksConfig, FIXED] = TasksConfig()
    rollouts: Annotated[RolloutConfig, FIXED] = RolloutConfig()
    reward: Annotated[RewardConfig, FIXED] = RewardConfig()
    training: TrainingConfig = TrainingConfig()
    broadcast: BroadcastConfig = BroadcastConfig()
    coordinator: CoordinatorConfig = CoordinatorConfig()
    trust: TrustConfig = TrustConfig()
    validation: ValidationConfig = ValidationConfig()
    evaluation: EvaluationConfig = EvaluationConfig()

    @property
    def coordinator_url(self) -> str:
        """How everybody reaches the coordinator."""
        return self.coordinator.public_url or http_url(self.coordinator.host, self.coordinator.port)

    @property
    def origin_url(self) -> str:
        """How everybody reaches the origin."""
        return self.broadcast.public_url or http_url(self.broadcast.host, self.broadcast.port)
