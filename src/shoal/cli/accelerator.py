"""Which GPU, driver and torch build are here, whether they fit each other, and what to type if they do not.

`look` reads the system; `advise` is pure. A driver serves every CUDA of its own major version and of older ones, so the choice of a
build needs its number only. Nothing here imports torch unless it is installed.
"""

import importlib.util
import platform
import subprocess
from dataclasses import dataclass
from pathlib import Path

CUDA_DRIVERS = {13: 580, 12: 525, 11: 450}
"""Major version of CUDA → oldest driver, by its major number."""
CUDA_INDEXES = {13: "cu130", 12: "cu126"}
"""Major version of CUDA → name of the directory that PyTorch serves its builds from."""
INDEX = "https://download.pytorch.org/whl"
PCI_DEVICES = Path("/sys/bus/pci/devices")
DISPLAY_CLASS = "0x03"
VENDORS = {"0x10de": "NVIDIA", "0x1002": "AMD"}
PROBE_DEADLINE_S = 10.0


@dataclass(frozen=True)
class Hardware:
    """What was found; empty or 0 where there is nothing."""

    vendor: str = ""
    driver: int = 0
    """Major number of the NVIDIA driver."""
    torch: str = ""
    """Version of the installed torch."""
    torch_cuda: str = ""
    """Version of CUDA that it was built for."""
    names: tuple[str, ...] = ()
    """GPUs that torch can use."""


def advise(found: Hardware) -> tuple[bool, str]:
    """Whether this is as good as it gets, and one sentence with what to type."""
    if found.names:
        return True, f"{len(found.names)} × {found.names[0]}, which torch {found.torch} can use"
    if found.vendor == "AMD":
        return False, f"an AMD GPU that torch cannot use: type `{_install('rocm6.4')}` if ROCm knows this GPU"
    if found.vendor == "NVIDIA":
        return False, _advise_nvidia(found)
    if found.torch_cuda:
        return True, (
            f"no GPU: models run on the CPU. torch {found.torch} brings CUDA, which is not needed here;"
            f" `{_install('cpu')}` saves gigabytes"
        )
    cpu = "" if found.torch else f"; before you install Shoal with its worker, type `{_install('cpu')}`"
    return True, f"no GPU: models run on the CPU{cpu}"


def _advise_nvidia(found: Hardware) -> str:
    newest = next((cuda for cuda, driver in CUDA_DRIVERS.items() if found.driver >= driver), 0)
    if not found.driver:
        return f"an NVIDIA GPU without a driver: install driver {CUDA_DRIVERS[12]} or newer, reboot, and ask again"
    if newest not in CUDA_INDEXES:
        return f"NVIDIA driver {found.driver} is too old: install {CUDA_DRIVERS[12]} or newer, reboot, and ask again"
    fitting = f"type `{_install(CUDA_INDEXES[newest])}`"
    if not found.torch:
        return f"an NVIDIA GPU with driver {found.driver} and no torch: {fitting}"
    if not found.torch_cuda:
        return f"an NVIDIA GPU with driver {found.driver}, but torch {found.torch} is a CPU build: {fitting}"
    built_for = int(found.torch_cuda.partition(".")[0])
    if found.driver < CUDA_DRIVERS.get(built_for, 0):
        return (
            f"torch {found.torch} is built for CUDA {found.torch_cuda}, which needs NVIDIA driver"
            f" {CUDA_DRIVERS[built_for]} or newer; this is {found.driver}: update it, or {fitting}"
        )
    return (
        f"NVIDIA driver {found.driver} and torch {found.torch} fit each other, but torch finds no GPU:"
        " look at `nvidia-smi`, CUDA_VISIBLE_DEVICES and the rights on /dev/nvidia*"
    )


def _install(build: str) -> str:
    return f"pip install --force-reinstall torch --index-url {INDEX}/{build}"


def look() -> Hardware:
    torch, cuda, names = _torch()
    return Hardware(vendor=_vendor(PCI_DEVICES), driver=_driver(), torch=torch, torch_cuda=cuda, names=names)


def _torch() -> tuple[str, str, tuple[str, ...]]:
    if importlib.util.find_spec("torch") is None:
        return "", "", ()
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return str(torch.__version__), torch.version.cuda or "", tuple(map(torch.cuda.get_device_name, range(count)))


def _vendor(devices: Path) -> str:
    """Of the first GPU on the bus; NVIDIA before others, because a processor may bring a GPU of its own."""
    found = set()
    for device in devices.glob("*"):
        try:
            if (device / "class").read_text().startswith(DISPLAY_CLASS):
                found.add((device / "vendor").read_text().strip())
        except OSError:
            continue
    return next((name for vendor, name in VENDORS.items() if vendor in found), "")


def _driver() -> int:
    if platform.system() not in ("Linux", "Windows"):
        return 0
    try:
        answer = subprocess.run(
            ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"],
            capture_output=True,
            text=True,
            timeout=PROBE_DEADLINE_S,
            check=True,
        )
        return int(answer.stdout.split(".")[0])
    except (OSError, subprocess.SubprocessError, ValueError):
        return 0
