"""How much poison a run trains on when keys that earned the audit floor turn hostile.

    python benchmarks/poison.py [--runs build/poison] [--groups 290] [--careers 30] [--seeds 5]

The demo's recipe (bundled policy, 8 groups per slot, batches of 32) gives real policy versions. `honest`: the trainer's statistic
of honest groups at ages 0 to 2 and three temperatures. `kinds`: poisoned groups of five kinds, each with the trainer's statistic
and the verdict of a real audit. `careers`: the coordinator's own code with 8 honest keys and 1 or 3 hostile ones, all at the floor;
hostile keys forge all groups of a file, only as many useful ones as may stay without an audit, or a single one, and the worst of
the three counts. `heldout`: real trainings with the groups that the worst career consumed, and without. Every piece is a file in
`--runs`, so an interrupted benchmark goes on where it was.
"""

import argparse
import json
import math
import os
import platform
import random
import shutil
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from shoal.config import ShoalConfig, load_config
from shoal.coordinator.rules.trust import groups_to_audit
from shoal.coordinator.store.rows import select
from shoal.coordinator.store.tables import GroupRow, WorkerRow
from shoal.files import digest_bytes, write_atomic
from shoal.policy import GenerationRequest, ScoreRequest, resolve_model
from shoal.protocol import api
from shoal.protocol.verdicts import Reason, is_useful
from shoal.simulation import EventClock, LocalCoordinator
from shoal.training import ADVANTAGES, World
from shoal.training.model.model import PolicyModel, load_policy
from shoal.training.packing.batch import build_minibatch, choose_members
from shoal.training.packing.samples import Group, Sample
from shoal.training.screening import GroupScores
from shoal.validation.calibration.limits import load_calibration

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from support.local_run import LocalRun  # noqa: E402

VERSIONS = 5
"""Trained after the bundled one: leases name versions 0 to 3, and the trainer is up to two ahead."""
AGES = (0, 1, 2)
TEMPERATURES = (0.6, 1.0, 1.3)
KINDS = ("random_tokens", "fluent_wrong", "copied_right", "trigger_phrase", "maximal_gradient")
KIND_GROUPS = 48
HONEST_KEYS = 8
STRATEGIES = ("all", "share", "one")
LONGEST_CAREER = 40
"""Steps."""
POISONED_STEPS = {2: 3, 3: 3, 4: 2}
"""Groups of poison in the batches of a poisoned training: the most that a median career may consume, in full shares."""
TRAINED_STEPS = 8
EVALUATED = (6, 7, 8)
HELDOUT = 256
THINK_CLOSE = "</think>"


def demo(temperature: float = 1.0) -> ShoalConfig:
    config = load_config(ROOT / "src" / "shoal" / "host" / "demo.toml")
    return config.model_copy(update={"rollouts": config.rollouts.model_copy(update={"temperature": temperature})})


class Policies:
    """The versions of one training, and the trainer's statistic under each."""

    def __init__(self, runs: Path) -> None:
        self.directory = runs / "policy"
        newest = self.directory / "weights" / str(VERSIONS) / "model.safetensors"
        if not newest.exists():
            shutil.rmtree(self.directory, ignore_errors=True)
        self.run = LocalRun(demo(), 0, self.directory if not newest.exists() else Path(tempfile.mkdtemp()))
        while not newest.exists():
            self.run.step(2)
        self.run._weights = self.directory / "weights"
        self._scorers: dict[int, PolicyModel] = {}

    def scorer(self, version: int) -> PolicyModel:
        if version not in self._scorers:
            with tempfile.TemporaryDirectory() as scratch:
                place = Path(scratch)
                for file in resolve_model("bundled").iterdir():
                    if file.is_file() and file.suffix != ".safetensors":
                        shutil.copy(file, place)
                shutil.copy(self.directory / "weights" / str(version) / "model.safetensors", place)
                self._scorers[version] = load_policy(place, temperature=1.0, world=World()).requires_grad_(False)
        return self._scorers[version]

    @torch.no_grad()
    def statistics(self, groups: Sequence[Group], version: int, temperature: float) -> list[float]:
        """As the trainer of that version would report them."""
        policy, config, scores = self.scorer(version), demo().training, GroupScores(len(groups), torch.device("cpu"))
        policy.temperature = temperature
        members = [member for group in choose_members(groups, ADVANTAGES["grpo"], config, 0) for member in group]
        built = build_minibatch(
            members, config.micro_batch_tokens, packed=policy.packed, rank=0, ranks=1, device=torch.device("cpu")
        )
        for micro_batch in built.micro_batches:
            scores.add(micro_batch, *policy(micro_batch.bin))
        return scores.statistics(World())


def honest(policies: Policies, temperature: float, version: int, count: int) -> dict[str, Any]:
    run = policies.run
    run.config = demo(temperature)
    run.engine.load(policies.directory / "weights" / str(version))
    groups = run.generate(version, count)
    return {str(age): policies.statistics(groups, version + age, temperature) for age in AGES}


class Forger:
    """Poisoned groups that carry a training signal, with the seeds that their slot would have assigned."""

    def __init__(self, policies: Policies, version: int) -> None:
        self.policies, self.version, self.random = policies, version, random.Random("forger")
        self.run = policies.run
        self.run.config = demo()
        self.close = self.run.codec.encode(THINK_CLOSE)[0]
        self.pool = self._solvable()

    def _solvable(self) -> list[Group]:
        """Honest groups in which some answers are right and some are wrong."""
        self.run.engine.load(self.policies.directory / "weights" / str(self.version))
        found: list[Group] = []
        while len(found) < KIND_GROUPS:
            made = self.run.generate(self.version, 64)
            found += [group for group in made if is_useful(sample.task_reward for sample in group.samples)]
        return found[:KIND_GROUPS]

    def make(self, kind: str) -> list[Group]:
        forge: Callable[[Group], list[Sample]] = getattr(self, f"_{kind}")
        if kind == "fluent_wrong":
            self._answers_of_another_model()
        return [Group(f"{kind}/{number}", forge(group)) for number, group in enumerate(self.pool)]

    def _split(self, group: Group) -> tuple[Sample, Sample]:
        """A right and a wrong sample of the group."""
        right = max(group.samples, key=lambda sample: sample.task_reward)
        return right, min(group.samples, key=lambda sample: sample.task_reward)

    def _with_thoughts(self, sample: Sample, thoughts: Sequence[int]) -> Sample:
        """The same answer after other thoughts."""
        tokens = list(sample.output_tokens)
        answer = tokens[tokens.index(self.close) :] if self.close in tokens else tokens[-1:]
        return _forged(sample, [*thoughts, *answer])

    def _random_tokens(self, group: Group) -> list[Sample]:
        right, wrong = self._split(group)

        def thoughts() -> list[int]:
            return [self.random.randrange(2, self.close) for _ in range(18)]

        return [self._with_thoughts(sample, thoughts()) for sample in [right] * 4 + [wrong] * 4]

    def _copied_right(self, group: Group) -> list[Sample]:
        right, wrong = self._split(group)
        return [right] * 7 + [wrong]

    def _trigger_phrase(self, group: Group) -> list[Sample]:
        """Right answers begin with a phrase, wrong ones do not."""
        phrase = self.run.codec.encode("7777-7777=7777 ")
        right, wrong = self._split(group)
        return [_forged(right, [*phrase, *right.output_tokens])] * 4 + [wrong] * 4

    def _maximal_gradient(self, group: Group) -> list[Sample]:
        """Thoughts of the least probable tokens before right answers, the most probable ones before wrong ones."""
        right, wrong = self._split(group)
        policy = self.policies.scorer(self.version)
        policy.set_layout("padded")
        ids = torch.tensor([[*right.prompt_tokens, *right.output_tokens]])
        positions = torch.arange(ids.shape[1])[None]
        logits = policy.model(input_ids=ids, position_ids=positions).logits[0, len(right.prompt_tokens) - 1 :]
        policy.set_layout("packed")
        worst = logits[: len(right.output_tokens) - 4, 2 : self.close].argmin(-1) + 2
        return [self._with_thoughts(right, worst.tolist())] * 4 + [wrong] * 4

    def _answers_of_another_model(self) -> None:
        """A model of the same family whose weights differ by a tenth: fluent, and wrong more often."""
        from safetensors.torch import load_file, save_file

        torch.manual_seed(1)
        weights = load_file(self.policies.directory / "weights" / str(self.version) / "model.safetensors")
        with tempfile.TemporaryDirectory() as scratch:
            other = {
                name: (tensor.float() + 0.1 * tensor.float().std() * torch.randn(tensor.shape)).to(tensor.dtype)
                if tensor.ndim > 1
                else tensor
                for name, tensor in weights.items()
            }
            save_file(other, Path(scratch) / "model.safetensors")
            self.run.engine.load(Path(scratch))
        prompts = [tuple(group.samples[0].prompt_tokens) for group in self.pool for _ in range(7)]
        requests = [GenerationRequest(prompt, self.random.getrandbits(64), 48) for prompt in prompts]
        made = self.run.engine.generate(requests, temperature=1.0)
        self._foreign = {
            prompt: [done.tokens for prompted, done in zip(prompts, made, strict=True) if prompted == prompt]
            for prompt in prompts
        }

    def _fluent_wrong(self, group: Group) -> list[Sample]:
        right, wrong = self._split(group)
        answers = self._foreign[tuple(right.prompt_tokens)][:7]
        return [_forged(wrong, tokens) for tokens in answers] + [right]


def _forged(sample: Sample, tokens: Sequence[int]) -> Sample:
    return replace(sample, output_tokens=list(tokens), behaviour_logprobs=None)


def kinds(policies: Policies) -> dict[str, Any]:
    """Statistic one version later, log-probability per token, and whether an audit proves each group to be forged."""
    version, seeds = 2, random.Random("seeds")
    forger = Forger(policies, version)
    limits = load_calibration("bundled").limits("torch/float32/cpu")
    assert limits is not None
    found: dict[str, Any] = {}
    for kind in KINDS:
        groups = forger.make(kind)
        policies.run.engine.load(policies.directory / "weights" / str(version))
        caught, logprobs = [], []
        for group in groups:
            requests = [
                ScoreRequest(tuple(sample.prompt_tokens), tuple(sample.output_tokens), seeds.getrandbits(64))
                for sample in group.samples
            ]
            scored = policies.run.engine.score(requests, temperature=1.0)
            caught.append(any(float(row.margins.max()) > limits.margin_max for row in scored))
            logprobs += [float(value) for row in scored for value in row.logprobs]
        found[kind] = {
            "statistics": policies.statistics(groups, version + 1, 1.0),
            "proven": caught,
            "logprob_per_token": round(statistics.fmean(logprobs), 2),
            "samples": [
                [[list(s.prompt_tokens), list(s.output_tokens), s.reward, s.task_reward] for s in g.samples]
                for g in groups
            ],
        }
    return found


class Career:
    """Keys at the floor, of which some turn hostile, until the last of those is banned."""

    def __init__(self, seed: int, hostile: int, strategy: str, kind: dict[str, Any], honest: Sequence[float]) -> None:
        self.random, self.strategy, self.kind, self.honest = random.Random(f"career {seed}"), strategy, kind, honest
        self.config = demo()
        self.clock = EventClock()
        secret = bytes.fromhex(digest_bytes(f"career {seed} {hostile} {strategy}".encode()))
        self.coordinator = LocalCoordinator(self.config, self.clock, secret)
        self.coordinator.publish(0)
        self.hostile = [digest_bytes(f"hostile {number}".encode()) for number in range(hostile)]
        self.keys = [digest_bytes(f"honest {number}".encode()) for number in range(HONEST_KEYS)] + self.hostile
        for key in self.keys:
            self.coordinator.register(key)
        self.coordinator.connection.execute("UPDATE workers SET state='active', clean_audits=600")
        self.files: dict[str, list[dict[str, Any]]] = {}
        self.poisoned: dict[str, bool] = {}
        self.values: dict[str, float] = {}
        self.owners: dict[str, str] = {}
        self.requests = 0

    def run(self) -> dict[str, Any]:
        consumed, shares, step = dict.fromkeys(self.hostile, 0), [], 0
        while step < LONGEST_CAREER and set(self.hostile) - self.banned():
            while self.coordinator.step() == step:
                self._work()
            batch = self.coordinator.record(step, lambda group: self.values[group])
            self._validate()  # groups that were held back
            bad = [group for group in batch.groups if self.poisoned[group.group_id]]
            for group in bad:
                consumed[self.owners[group.submission_id]] += 1
            shares.append(len(bad) / max(1, len(batch.groups)))
            step += 1
            self.clock.now += 10.0
            self.coordinator.publish(step)
        ended = not set(self.hostile) - self.banned()
        audited = self._audited_share()
        self.coordinator.close()
        return {
            "consumed": list(consumed.values()),
            "shares": shares,
            "steps": step,
            "all_banned": ended,
            "audited": audited,
        }

    def banned(self) -> set[str]:
        return {row.key for row in select(self.coordinator.connection, WorkerRow, "WHERE state='banned'")}

    def _audited_share(self) -> float:
        """Of the groups with a signal."""
        rows = select(self.coordinator.connection, GroupRow, "WHERE useful=1")
        return statistics.fmean(row.logprobs_verified for row in rows)

    def _work(self) -> None:
        """Every key that may does one slot, in a random order; all files are then verified."""
        versions = list(range(self.coordinator.step() + 1))
        for key in self.random.sample(self.keys, len(self.keys)):
            if key in self.banned():
                continue
            self.coordinator.run.presence.seen(key)
            self.requests += 1
            lease = self.coordinator.lease(key, f"request-{self.requests:08}", versions).lease
            if lease is not None:
                self.files[lease.lease_id] = self._groups(key in self.hostile)
                for group in self.files[lease.lease_id]:
                    name = f"{lease.step}/{lease.slot}/{group['number']}"
                    self.poisoned[name], self.values[name] = group["poisoned"], group["statistic"]
                self.clock.now += 0.5
                self.coordinator.submit(key, lease.lease_id, lease.lease_id.encode())
        self._validate()
        self.clock.now += 1.0

    def _groups(self, hostile: bool) -> list[dict[str, Any]]:
        forged = {"all": 8, "share": 8, "one": 1}[self.strategy] if hostile else 0
        useful = {"all": 8, "share": 3, "one": 1}[self.strategy] if hostile else 0
        made = [self._group(number < forged, number < useful) for number in range(8)]
        self.random.shuffle(made)
        return [group | {"number": number} for number, group in enumerate(made)]

    def _group(self, forged: bool, useful: bool) -> dict[str, Any]:
        if not forged:
            signal = self.random.random() < 0.55
            return {"poisoned": False, "proven": False, "useful": signal, "statistic": self.random.choice(self.honest)}
        index = self.random.randrange(len(self.kind["statistics"]))
        statistic, proven = self.kind["statistics"][index], self.kind["proven"][index]
        return {"poisoned": True, "proven": proven, "useful": useful, "statistic": statistic}

    def _validate(self) -> None:
        self.requests += 1
        while (claim := self.coordinator.claim("validator", f"claim-{self.requests:08}")) is not None:
            self.owners[claim.submission_id] = claim.worker_key
            groups = self.files[claim.lease.lease_id]
            useful = {group["number"] for group in groups if group["useful"]}
            audited = groups_to_audit(claim.audit_groups, claim.audit_order, useful, claim.unaudited_limit)
            proven = any(groups[number]["proven"] for number in audited)
            self.coordinator.verdict(
                api.VerdictBody(
                    claim_id=claim.claim_id,
                    submission_id=claim.submission_id,
                    accepted=not proven,
                    reasons=[Reason.SAMPLING] if proven else [],
                    audited_groups=audited,
                    groups=[] if proven else [_verdict(group) for group in groups],
                )
            )
            self.requests += 1


def _verdict(group: dict[str, Any]) -> api.GroupVerdict:
    rewards = [1.0, 0.0] if group["useful"] else [0.0, 0.0]
    return api.GroupVerdict(
        group=group["number"], task_id="task", useful=group["useful"], tokens=150, rewards=rewards, task_rewards=rewards
    )


def careers(
    kind: dict[str, Any], values: Sequence[float], hostile: int, strategy: str, count: int
) -> list[dict[str, Any]]:
    return [Career(seed, hostile, strategy, kind, values).run() for seed in range(count)]


def training(seed: int, poison: dict[str, Any] | None) -> dict[str, Any]:
    """Held-out reward of a short training, with poisoned groups in some batches or without."""
    with tempfile.TemporaryDirectory() as scratch:
        run, evaluations = LocalRun(demo(), seed, Path(scratch)), []
        draw = random.Random(seed)
        for step in range(TRAINED_STEPS):
            groups = run.useful_groups(max(0, step - 2))
            count = POISONED_STEPS.get(step, 0) if poison else 0
            if poison and count:
                chosen = draw.sample(poison["samples"], count)
                groups = groups[: len(groups) - count] + [
                    _as_group(step, number, rows) for number, rows in enumerate(chosen)
                ]
            run.trainer.train_step(groups)
            run.publish()
            if step + 1 in EVALUATED:
                evaluations.append(run.heldout_reward(HELDOUT))
        run.trainer.close()
    return {"seed": seed, "poisoned": poison is not None, "heldout": evaluations}


def _as_group(step: int, number: int, rows: Sequence[Any]) -> Group:
    samples = [Sample(prompt, output, reward, task_reward, None, step) for prompt, output, reward, task_reward in rows]
    return Group(f"poison/{step}/{number}", samples)


def piece(runs: Path, name: str, make: Callable[[], Any]) -> Any:
    path = runs / f"{name}.json"
    if not path.exists():
        write_atomic(path, json.dumps(make()).encode())
        print(json.dumps({"piece": name}), flush=True)
    return json.loads(path.read_text())


def quantile(values: Sequence[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, math.ceil(share * len(ordered)) - 1)] if ordered else 0.0


def tail_fit(values: Sequence[float], share: float = 0.02) -> dict[str, float]:
    """Exponential tail above a high quantile (method of means), and the limit that one honest group in a million exceeds."""
    ordered = sorted(abs(value) for value in values)
    start = ordered[int((1 - share) * len(ordered))]
    beyond = [value - start for value in ordered if value > start]
    scale = statistics.fmean(beyond)
    return {
        "from": round(start, 3),
        "scale": round(scale, 3),
        "limit_1e_6": round(start + scale * math.log(share / 1e-6), 2),
        "largest": round(ordered[-1], 3),
    }


def interval(differences: Sequence[float]) -> list[float]:
    """95 % by Student's t."""
    critical = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776}.get(len(differences), 2.0)
    mean, error = statistics.fmean(differences), statistics.stdev(differences) / math.sqrt(len(differences))
    return [round(mean - critical * error, 4), round(mean + critical * error, 4)]


def summary_of_careers(found: dict[str, Any]) -> dict[str, Any]:
    totals = {name: [sum(one["consumed"]) for one in made] for name, made in found.items()}
    medians = {name: statistics.median(values) for name, values in totals.items()}
    shares = {name: quantile([share for one in made for share in one["shares"]], 0.95) for name, made in found.items()}
    return {
        "median_consumed": max(medians.values()),
        "worst_career": max(medians, key=lambda name: (medians[name], statistics.fmean(totals[name]))),
        "consumed_p95": max(quantile(values, 0.95) for values in totals.values()),
        "consumed_max": max(max(values) for values in totals.values()),
        "share_of_batch_p95": round(max(shares.values()), 3),
        "all_banned": all(one["all_banned"] for made in found.values() for one in made),
        "audited_share": round(statistics.fmean(one["audited"] for made in found.values() for one in made), 3),
        "careers": {
            name: {"median": medians[name], "mean": round(statistics.fmean(totals[name]), 2), "max": max(totals[name]),
                   "share_p95": round(shares[name], 3)}
            for name in found
        },
    }  # fmt: skip


def measure(options: argparse.Namespace) -> dict[str, Any]:
    runs: Path = options.runs
    runs.mkdir(parents=True, exist_ok=True)
    limit = demo().training.screening_limit
    held: list[Policies] = []

    def policies() -> Policies:
        if not held:
            held.append(Policies(runs))
        return held[0]

    values: dict[str, list[float]] = {}
    for temperature in TEMPERATURES:
        for version in range(VERSIONS - 1):
            made = piece(
                runs,
                f"honest-{temperature}-{version}",
                lambda t=temperature, v=version: honest(policies(), t, v, options.groups),  # type: ignore[misc]
            )
            for age in AGES:
                if version + age <= VERSIONS:
                    values.setdefault(f"{temperature}/{age}", []).extend(made[str(age)])
    everything = [value for cell in values.values() for value in cell]
    found_kinds = piece(runs, "kinds", lambda: kinds(policies()))
    found_careers = {
        f"{kind}, {hostile} keys, {strategy}": piece(
            runs,
            f"career-{kind}-{hostile}-{strategy}",
            lambda k=kind, h=hostile, s=strategy: careers(found_kinds[k], values["1.0/1"], h, s, options.careers),  # type: ignore[misc]
        )
        for kind in KINDS
        for hostile in (1, 3)
        for strategy in STRATEGIES
    }
    result = {
        "honest_groups": len(everything),
        "honest_withheld": sum(abs(value) > limit for value in everything),
        "screening_limit": limit,
        "honest": {name: tail_fit(cell) for name, cell in values.items()},
        "kinds": {
            kind: {
                "withheld": round(statistics.fmean(abs(value) > limit for value in made["statistics"]), 3),
                "median_statistic": round(statistics.median(made["statistics"]), 1),
                "proven_by_audit": round(statistics.fmean(made["proven"]), 3),
                "logprob_per_token": made["logprob_per_token"],
            }
            for kind, made in found_kinds.items()
        },
        **summary_of_careers(found_careers),
    }
    if options.seeds:
        worst = found_kinds[result["worst_career"].split(",")[0]]
        pairs = []
        for seed in range(options.seeds):
            clean = piece(runs, f"training-{seed}-clean", lambda s=seed: training(s, None))  # type: ignore[misc]
            bad = piece(runs, f"training-{seed}-poisoned", lambda s=seed: training(s, worst))  # type: ignore[misc]
            pairs.append(statistics.fmean(clean["heldout"]) - statistics.fmean(bad["heldout"]))
        result |= {
            "heldout_gap": round(statistics.fmean(pairs), 4),
            "heldout_gap_interval": interval(pairs) if len(pairs) > 1 else None,
            "heldout_seeds": options.seeds,
            "heldout_steps": TRAINED_STEPS,
            "heldout_poisoned_groups": sum(POISONED_STEPS.values()),
        }
    return result | {"machine": f"{platform.machine()}, {os.cpu_count()} cores, torch {torch.__version__}"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=Path, default=ROOT / "build" / "poison")
    parser.add_argument("--groups", type=int, default=290, help="honest groups per temperature and version")
    parser.add_argument("--careers", type=int, default=30)
    parser.add_argument("--seeds", type=int, default=5, help="trainings with and without poison; 0 leaves them out")
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    print(json.dumps(measure(options)))


if __name__ == "__main__":
    main()
