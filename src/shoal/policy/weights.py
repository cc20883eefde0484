"""Weights of a policy at rest and on the wire: every tensor once, checked before it is copied.

Weights exist once: `load_weights` checks every name, shape and kind of number first and then copies into the live tensors, so a
refused file changes nothing. On the wire a policy is bf16, each tensor once, tied ones under the name that comes first. Integers
and truth values keep their own type, bit for bit, and come last, so that all others lie on their own boundaries.
"""

from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shoal.broadcast import WireTensor
from shoal.broadcast.manifest import SAFETENSORS_DTYPES
from shoal.errors import first_line
from shoal.policy.architecture import meta_model
from shoal.policy.directory import ArchitectureError, ModelError, read_config, some_names, weight_files

EXACT_DTYPES = {
    torch.int64: "int64",
    torch.uint64: "uint64",
    torch.int32: "int32",
    torch.uint32: "uint32",
    torch.int16: "int16",
    torch.uint16: "uint16",
    torch.int8: "int8",
    torch.uint8: "uint8",
    torch.bool: "bool",
}
"""Types that are not rounded."""
EXACT_STORED = {SAFETENSORS_DTYPES[name] for name in EXACT_DTYPES.values()}


class WireCopy:
    """One bf16 copy of a policy in host memory, each tensor once, in the order of the module; every `take` overwrites it.

    Memory is allocated once. On a GPU it is page-locked, so that all copies are queued and waited for together.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._memory: Tensor | None = None

    @torch.no_grad()
    def take(self, *, here: bool = True) -> list[WireTensor]:
        """The tensors as they are now. Sharded ones are gathered one at a time: every rank calls this, one with `here`."""
        tensors = unique_tensors(self._model)
        numbers = {name: tensor for name, tensor in tensors.items() if tensor.is_floating_point()}
        free = self._allocated_for(numbers) if here else None
        taken = []
        for name, tensor in numbers.items():
            whole = _gathered(tensor.detach())
            if free is not None:
                copy, free = free[: whole.numel()], free[whole.numel() :]
                copy.view(whole.shape).copy_(whole, non_blocking=True)
                data = copy.view(torch.uint8).numpy().data
                taken.append(WireTensor(name=name, dtype="bfloat16", shape=tuple(tensor.shape), data=data))
        exact = [_exact_copy(name, tensor) for name, tensor in tensors.items() if name not in numbers]
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return taken + exact if here else []

    def _allocated_for(self, tensors: dict[str, Tensor]) -> Tensor:
        if self._memory is None:
            on_gpu = any(tensor.is_cuda for tensor in tensors.values())
            count = sum(tensor.numel() for tensor in tensors.values())
            self._memory = torch.empty(count, dtype=torch.bfloat16, pin_memory=on_gpu)
        return self._memory


def _gathered(tensor: Tensor) -> Tensor:
    if not isinstance(tensor, DTensor):
        return tensor
    bf16 = tensor.to(torch.bfloat16)  # halves what travels between ranks
    assert isinstance(bf16, DTensor)
    return bf16.full_tensor()


def _exact_copy(name: str, tensor: Tensor) -> WireTensor:
    if tensor.dtype not in EXACT_DTYPES:
        raise ModelError(
            f"{name} has dtype {tensor.dtype}, which cannot be published.",
            hint=f"Besides floating point these can: {', '.join(EXACT_DTYPES.values())}.",
        )
    whole = tensor.detach()
    whole = whole.full_tensor() if isinstance(whole, DTensor) else whole
    copy = whole.to("cpu", copy=True).contiguous().view(-1)
    data = copy.view(torch.uint8).numpy().data
    return WireTensor(name=name, dtype=EXACT_DTYPES[tensor.dtype], shape=tuple(tensor.shape), data=data)


def load_weights(model: nn.Module, directory: Path) -> None:
    """Copy the safetensors of `directory` into the live tensors; all names and shapes are checked before the first copy."""
    files = weight_files(directory)
    live = model.state_dict(keep_vars=True)
    wanted = unique_tensors(model)
    try:
        _check_headers(files, live, set(wanted), directory)
        with torch.no_grad():
            for file in files:
                with safe_open(file, framework="pt", device="cpu") as reader:
                    for name in reader.keys():  # noqa: SIM118 - not a mapping
                        if name in wanted:
                            wanted[name].copy_(reader.get_tensor(name))
    except (SafetensorError, OSError) as error:
        raise ModelError(f"The weights in {directory} cannot be read: {first_line(error)}.") from error


def check_fit(model_files: Path, directory: Path) -> None:
    """Refuse weights in `directory` that are not exactly those of the model that `model_files` describes."""
    model = meta_model(read_config(model_files))
    try:
        _check_headers(weight_files(directory), model.state_dict(keep_vars=True), set(unique_tensors(model)), directory)
    except (SafetensorError, OSError) as error:
        raise ModelError(f"The weights in {directory} cannot be read: {first_line(error)}.") from error


def unique_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and persistent buffers by name; of tied ones the first name only."""
    tensors = model.state_dict(keep_vars=True)
    first_names = {id(tensor): name for name, tensor in reversed(tensors.items())}
    return {name: tensor for name, tensor in tensors.items() if first_names[id(tensor)] == name}


def tensor_bytes(model: nn.Module) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in unique_tensors(model).values())


def _check_headers(files: list[Path], live: dict[str, Tensor], wanted: set[str], directory: Path) -> None:
    found: set[str] = set()
    for file in files:
        with safe_open(file, framework="pt", device="cpu") as reader:
            for name in reader.keys():  # noqa: SIM118 - not a mapping
                entry = reader.get_slice(name)
                _check_shape(name, tuple(entry.get_shape()), live, directory)
                _check_kind(name, entry.get_dtype(), live[name].dtype, directory)
                found.add(name)
    if missing := sorted(wanted - found):
        raise ArchitectureError(f"The weights in {directory} lack {some_names(missing)}.")


def _check_shape(name: str, shape: tuple[int, ...], live: dict[str, Tensor], directory: Path) -> None:
    if name not in live:
        raise ArchitectureError(f"The weights in {directory} have {name}, which this model does not have.")
    if shape != tuple(live[name].shape):
        raise ArchitectureError(f"{name} in {directory} has shape {shape}; the model needs {tuple(live[name].shape)}.")


def _check_kind(name: str, stored: str, live: torch.dtype, directory: Path) -> None:
    """Numbers may be rounded to another floating-point type; what is not floating point must be stored as it is used."""
    wanted = SAFETENSORS_DTYPES[EXACT_DTYPES[live]] if live in EXACT_DTYPES else ""
    if wanted != (stored if stored in EXACT_STORED else ""):
        raise ArchitectureError(f"{name} in {directory} is stored as {stored}; the model needs {wanted or live}.")
