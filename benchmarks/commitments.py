"""Commitments against the real `toploc` 0.1.6, the selection of the largest entries included.

    python benchmarks/commitments.py [--chunks 16] [--rounds 25]

toploc is built from source against the installed torch into build/ when it is not there (about four minutes) and runs in
a process of its own. The two sides take turns; each figure is the ratio of their medians. Both use one torch thread;
toploc's verifier adds a thread per core of its own. `cpu_` metrics count processor time instead of the clock: they do not
suffer from other work on the machine, and give no credit for those threads.
"""

import argparse
import base64
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import torch

TOPLOC = "toploc==0.1.6"
CHUNK_TOKENS, TOP_K = 32, 128
WIDTHS = (576, 5120)


def toploc_directory() -> Path:
    """Where toploc for this torch and this Python lives; built there first if need be."""
    build = f"{TOPLOC.replace('==', '-')}-torch{torch.__version__}-py{sys.version_info.major}{sys.version_info.minor}"
    directory = Path(__file__).resolve().parent.parent / "build" / build
    if not (directory / "toploc").is_dir():
        options = ["--quiet", "--no-binary", "toploc", "--no-build-isolation", "--no-deps", "--target", str(directory)]
        subprocess.run([sys.executable, "-m", "pip", "install", *options, TOPLOC], check=True, stdout=sys.stderr)
    return directory


class ToplocProcess:
    """The original, in a process of its own: states go in as bf16 bit patterns, one answer per request."""

    def __enter__(self) -> "ToplocProcess":
        environment = {**os.environ, "PYTHONPATH": str(toploc_directory())}
        command = [sys.executable, __file__, "--serve-toploc"]
        self._process = subprocess.Popen(
            command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self._directory = tempfile.TemporaryDirectory()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(timeout=30)
        self._directory.cleanup()

    def build(self, states_ND: torch.Tensor) -> tuple[list[bytes], tuple[float, float]]:
        """Its proofs, and the seconds they took (clock, processor)."""
        answer = self._ask({"states": self._store(states_ND)})
        return [base64.b64decode(proof) for proof in answer["proofs"]], tuple(answer["seconds"])

    def verify(
        self, states_ND: torch.Tensor, proofs: list[bytes]
    ) -> tuple[list[tuple[int, float, float]], tuple[float, float]]:
        """(exponent mismatches, mantissa mean, mantissa median) per proof, and the seconds they took (clock, processor)."""
        encoded = [base64.b64encode(proof).decode() for proof in proofs]
        answer = self._ask({"states": self._store(states_ND), "proofs": encoded})
        return [(row[0], row[1], row[2]) for row in answer["results"]], tuple(answer["seconds"])

    def _store(self, states_ND: torch.Tensor) -> str:
        path = Path(self._directory.name) / "states.npy"
        np.save(path, states_ND.to(torch.bfloat16).contiguous().view(torch.uint16).numpy())
        return str(path)

    def _ask(self, request: dict[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(json.dumps(request), file=self._process.stdin, flush=True)
        answer: dict[str, Any] = json.loads(self._process.stdout.readline())
        return answer


def serve_toploc() -> None:
    import toploc

    for line in sys.stdin:
        request = json.loads(line)
        states_ND = torch.from_numpy(np.load(request["states"])).view(torch.bfloat16)
        rows, proofs = list(states_ND), [base64.b64decode(proof) for proof in request.get("proofs", ())]
        answer: dict[str, Any] = {}
        torch.set_num_threads(1)  # its verifier raises the number behind our back
        if proofs:
            results, answer["seconds"] = timed(
                lambda s, p: toploc.verify_proofs_bytes(s, p, CHUNK_TOKENS, TOP_K, skip_prefill=True), states_ND, proofs
            )
            answer["results"] = [(r.exp_mismatches, r.mant_err_mean, r.mant_err_median) for r in results]
        else:
            built, answer["seconds"] = timed(
                lambda s: toploc.build_proofs_bytes(s, CHUNK_TOKENS, TOP_K, skip_prefill=True), rows
            )
            answer["proofs"] = [base64.b64encode(proof).decode() for proof in built]
        print(json.dumps(answer), flush=True)


def timed(action: Callable[..., Any], *arguments: object) -> tuple[Any, tuple[float, float]]:
    """What the action returns; the seconds its second call took, with warm caches, by the clock and of processor time."""
    action(*arguments)
    clock, processor = time.perf_counter(), time.process_time()
    result = action(*arguments)
    return result, (time.perf_counter() - clock, time.process_time() - processor)


def measure(peer: ToplocProcess, width: int, chunk_count: int, rounds: int) -> dict[str, float]:
    """Medians per chunk in milliseconds, and their ratios."""
    from shoal.proofs import build_proofs, compare_chunks, split_chunks

    generator = torch.Generator().manual_seed(width)
    states_ND = torch.randn(chunk_count * CHUNK_TOKENS, width, generator=generator).to(torch.bfloat16)
    proofs = build_proofs(split_chunks(states_ND))
    compare_chunks(proofs, split_chunks(states_ND))
    samples: dict[str, list[tuple[float, float]]] = {}
    for _ in range(rounds):
        for name, seconds in (
            ("build", timed(lambda: build_proofs(split_chunks(states_ND)))[1]),
            ("toploc_build", peer.build(states_ND)[1]),
            ("verify", timed(lambda: compare_chunks(proofs, split_chunks(states_ND)))[1]),
            ("toploc_verify", peer.verify(states_ND, proofs)[1]),
        ):
            samples.setdefault(name, []).append(seconds)
    metrics: dict[str, float] = {}
    for kind, prefix in enumerate(("", "cpu_")):
        medians = {name: statistics.median(pair[kind] for pair in pairs) for name, pairs in samples.items()}
        for name in ("build", "verify"):
            metrics[f"{prefix}{name}_speedup_{width}"] = medians[f"toploc_{name}"] / medians[name]
        metrics |= {f"{prefix}{name}_ms_per_chunk_{width}": 1e3 * s / chunk_count for name, s in medians.items()}
    return metrics


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--chunks", type=int, default=16, help="chunks of 32 states per call")
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--serve-toploc", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve_toploc:
        serve_toploc()
        return
    torch.set_num_threads(1)
    metrics: dict[str, Any] = {"cpu": platform.processor() or platform.machine(), "cores": os.cpu_count()}
    with ToplocProcess() as peer:
        for width in WIDTHS:
            metrics.update(measure(peer, width, arguments.chunks, arguments.rounds))
    print(json.dumps({name: round(value, 4) if isinstance(value, float) else value for name, value in metrics.items()}))


if __name__ == "__main__":
    main()
