import pytest
import torch

from shoal.policy.vllm import recorder
from shoal.policy.vllm.recorder import Recorder
from shoal.proofs.commitments import build_proofs, split_chunks


def test_requests_of_different_lengths_get_their_own_commitments() -> None:
    torch.manual_seed(0)
    lengths = {7: 1, 3: 32, 9: 70}
    states = {request: torch.randn(length, 16).to(torch.bfloat16) for request, length in lengths.items()}
    record = Recorder()
    for position in range(70):
        rows = [request for request, length in lengths.items() if position < length]
        logprobs = torch.tensor([-float(position)] * len(rows))
        record.record(rows, [position] * len(rows), torch.stack([states[row][position] for row in rows]), logprobs)
    collected = record.collect(list(lengths))
    assert {request: len(entry.logprobs) for request, entry in collected.items()} == lengths
    for request, entry in collected.items():
        assert entry.proofs == build_proofs(split_chunks(states[request]))
        assert entry.logprobs == [-float(position) for position in range(lengths[request])]


def test_the_last_record_of_a_position_counts() -> None:
    states = torch.randn(34, 16).to(torch.bfloat16)
    record = Recorder()
    for position in range(34):
        for noise in (1.0, 0.0):  # the first one is a prefill that was repeated
            record.record([0], [position], states[position : position + 1] + noise, torch.tensor([-1.0 - noise]))
    entry = record.collect([0])[0]
    assert entry.proofs == build_proofs(split_chunks(states))
    assert entry.logprobs == [-1.0] * 34


def test_each_request_is_collected_once_while_others_go_on() -> None:
    record = Recorder()
    record.record([0], [0], torch.randn(1, 16), torch.tensor([-1.0]))
    record.record([1], [0], torch.randn(1, 16), torch.tensor([-1.0]))
    assert list(record.collect([0])) == [0]
    assert list(record.collect([0, 1])) == [1]
    assert record.collect([0, 1]) == {}


def test_a_failure_in_the_background_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(chunks: object) -> list[bytes]:
        raise ZeroDivisionError

    record = Recorder()
    record.record([0], [0], torch.randn(1, 16), torch.tensor([-1.0]))
    monkeypatch.setattr(recorder, "build_proofs", fail)
    with pytest.raises(ZeroDivisionError):
        record.collect([0])


def test_a_later_turn_goes_on_with_the_chunk_of_the_one_before() -> None:
    torch.manual_seed(0)
    states = torch.randn(75, 16).to(torch.bfloat16)
    record, proofs, logprobs, tail, first = Recorder(), list[bytes](), list[float](), b"", 0
    for number, end in enumerate((20, 32, 33, 75)):
        if first:
            record.begin(number, first, tail)
            record.begin(number, first, tail)  # as after a preemption
        for position in range(first, end):
            record.record([number], [position], states[position : position + 1], torch.tensor([-float(position)]))
        entry = record.collect([number])[number]
        proofs = (proofs[:-1] if first % 32 else proofs) + entry.proofs
        logprobs += entry.logprobs
        tail, first = entry.tail, end
        assert len(tail) == end % 32 * 16 * 2
    assert proofs == build_proofs(split_chunks(states))
    assert logprobs == [-float(position) for position in range(75)]
