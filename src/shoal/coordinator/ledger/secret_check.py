"""What a published secret must satisfy: committed before its step began, and every audit draw follows from it.

Takes the entries of a ledger one by one and yields a sentence about each one that does not hold. It keeps commitments that are not
published, published secrets, and the draws that wait for their secret.
"""

from collections.abc import Iterator

from shoal.coordinator.ledger.findings import Body, Finding
from shoal.coordinator.rules.trust import audited_groups, rounding
from shoal.coordinator.rules.unaudited import limit_of_file
from shoal.protocol.steps import StepId, step_commitment, step_of


class SecretCheck:
    def __init__(self) -> None:
        self.repeated = 0
        """Draws that were repeated."""
        self._commitments: dict[StepId, tuple[int, str]] = {}
        self._opened: dict[StepId, int] = {}
        self._secrets: dict[StepId, bytes] = {}
        self._step_of: dict[bytes, StepId] = {}
        self._published: dict[StepId, int] = {}
        self._recalled: set[int] = set()
        """Steps whose batch may be recorded again, with the same secret."""
        self._waiting: dict[StepId, list[tuple[int, Body]]] = {}

    @property
    def waiting(self) -> int:
        """Draws whose secret is not public."""
        return sum(len(bodies) for bodies in self._waiting.values())

    def take(self, seq: int, kind: str, body: Body) -> Iterator[Finding]:
        if kind == "commitment":
            yield from self._commit(seq, body)
        elif kind == "proposed":
            self._opened.setdefault(step_of(body).next(), seq)
        elif kind == "rewound":
            yield from self._rewind(seq, body)
        elif kind == "recalled":
            self._recalled.add(body["step"])
        elif kind == "recorded":
            yield from self._publish(seq, step_of(body), bytes.fromhex(body["step_secret"]))
        elif kind == "verdict":
            yield from self._draw(seq, body)

    def _commit(self, seq: int, body: Body) -> Iterator[Finding]:
        step = step_of(body)
        if step in self._commitments or step in self._secrets:
            yield Finding(seq, f"step {step} is committed to a second time")
        self._commitments[step] = (seq, body["commitment"])

    def _rewind(self, seq: int, body: Body) -> Iterator[Finding]:
        """The secrets of voided steps are published, those of the new epoch begin."""
        first = step_of(body)
        for *numbers, secret in body["step_secrets"]:
            yield from self._publish(seq, StepId(*numbers), bytes.fromhex(secret))
        open_steps = sorted(step for step in self._commitments if step.epoch < first.epoch)
        for step in open_steps:
            yield Finding(seq, f"the rewind voids step {step} without publishing its secret")
        self._opened = {step: at for step, at in self._opened.items() if step.epoch >= first.epoch}
        self._recalled.clear()
        self._opened.setdefault(first, seq)

    def _publish(self, seq: int, step: StepId, secret: bytes) -> Iterator[Finding]:
        if self._secrets.get(step) == secret and step.step in self._recalled:
            return
        if step in self._secrets:
            yield Finding(seq, f"the secret of step {step} is published a second time")
        elif (other := self._step_of.setdefault(secret, step)) != step:
            yield Finding(seq, f"the secret of step {step} is that of step {other}, which was public")
        committed_at, commitment = self._commitments.pop(step, (seq, ""))
        opened_at = self._opened.pop(step, seq)
        if not commitment:
            yield Finding(seq, f"the secret of step {step} was never committed to")
        elif commitment != step_commitment(step, secret):
            yield Finding(seq, f"the secret of step {step} is not the one that entry {committed_at} commits to")
        elif committed_at >= opened_at:
            yield Finding(
                seq, f"the secret of step {step} was committed to in entry {committed_at}, after the step began"
            )
        self._secrets[step], self._published[step] = secret, seq
        self._opened.setdefault(step.next(), seq)
        for number, waiting in self._waiting.pop(step, []):
            yield from self._repeat(secret, number, waiting)

    def _draw(self, seq: int, body: Body) -> Iterator[Finding]:
        step = StepId(*body["audit_step"])
        if step in self._secrets:
            if body["position"] > self._published[step]:
                yield Finding(seq, f"the file arrived when the secret of step {step}, which drew its audit, was public")
            yield from self._repeat(self._secrets[step], seq, body)
            return
        if step not in self._commitments:
            yield Finding(seq, f"the audit was drawn under the secret of step {step}, which nothing commits to")
        self._waiting.setdefault(step, []).append((seq, body))

    def _repeat(self, secret: bytes, seq: int, body: Body) -> Iterator[Finding]:
        self.repeated += 1
        drawn = body["audit_drawn"]
        repeated = list(audited_groups(secret, body["file"], body["audit_rate"], body["groups"]))
        if repeated != drawn:
            step = StepId(*body["audit_step"])
            yield Finding(
                seq, f"groups {drawn} are recorded as drawn for an audit, the draw of step {step} says {repeated}"
            )
        useful, coin = body["useful"], rounding(secret, body["file"])
        unaudited, limit = set(useful) - set(body["audited"]), limit_of_file(body["useful_rate"], len(useful), coin)
        if len(unaudited) > limit:
            yield Finding(
                seq, f"{len(unaudited)} of {len(useful)} useful groups were not audited, the draw allows {limit}"
            )
