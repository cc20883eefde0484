"""Each mismatch of GPU, driver and torch build has its sentence with the line to type."""

from pathlib import Path

import pytest

from shoal.cli import accelerator
from shoal.cli.accelerator import Hardware, advise, look


@pytest.mark.parametrize(
    ("found", "good", "words"),
    [
        (Hardware(torch="2.13.0"), True, "no GPU: models run on the CPU"),
        (Hardware(), True, "before you install Shoal with its worker, type `pip install --force-reinstall torch"),
        (Hardware(torch="2.13.0", torch_cuda="13.0"), True, "whl/cpu` saves gigabytes"),
        (Hardware("NVIDIA", 580, "2.13.0", "13.0", ("H100",)), True, "1 × H100, which torch 2.13.0 can use"),
        (Hardware("NVIDIA", 0, "2.13.0"), False, "without a driver: install driver 525 or newer, reboot"),
        (Hardware("NVIDIA", 470, "2.13.0"), False, "NVIDIA driver 470 is too old"),
        (Hardware("NVIDIA", 550, "2.13.0"), False, "is a CPU build: type `pip install --force-reinstall torch"),
        (Hardware("NVIDIA", 550, "2.13.0"), False, "whl/cu126`"),
        (Hardware("NVIDIA", 580, ""), False, "no torch: type"),
        (Hardware("NVIDIA", 580, ""), False, "whl/cu130`"),
        (Hardware("NVIDIA", 550, "2.13.0", "13.0"), False, "needs NVIDIA driver 580 or newer; this is 550: update it"),
        (Hardware("NVIDIA", 580, "2.13.0", "13.0"), False, "look at `nvidia-smi`, CUDA_VISIBLE_DEVICES"),
        (Hardware("AMD", 0, "2.13.0"), False, "an AMD GPU that torch cannot use"),
    ],
)
def test_what_to_type_follows_from_what_is_here(found: Hardware, good: bool, words: str) -> None:
    is_good, sentence = advise(found)
    assert (is_good, words in sentence) == (good, True), sentence


def device(root: Path, name: str, kind: str, vendor: str) -> None:
    (root / name).mkdir()
    (root / name / "class").write_text(f"{kind}\n")
    (root / name / "vendor").write_text(f"{vendor}\n")


def test_a_gpu_is_found_on_the_bus_without_any_driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    device(tmp_path, "network", "0x020000", "0x10de")
    device(tmp_path, "processor-graphics", "0x030000", "0x1002")
    device(tmp_path, "card", "0x030200", "0x10de")
    (tmp_path / "torn").mkdir()
    monkeypatch.setattr(accelerator, "PCI_DEVICES", tmp_path)
    assert look().vendor == "NVIDIA"


@pytest.mark.parametrize("said", ["echo 580.95.05", "echo no devices were found", "exit 9"])
def test_a_driver_that_answers_nonsense_is_no_driver(
    said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text(f"#!/bin/sh\n{said}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    assert look().driver == (580 if "580" in said else 0)
