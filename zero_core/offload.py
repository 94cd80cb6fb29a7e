"""Where this rank's shards live: on the device, in host memory, or in files."""

from __future__ import annotations

import mmap
import os
import tempfile
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from zero_core.config import Offload


class Placement(Protocol):
    """A kind of memory for shards.

    Attributes:
        name: "device", "host" or "disk".
        scarce: whether it may be full on one rank alone, so that room is taken before training, for optimizer state too.
    """

    name: str
    scarce: bool

    def empty(self, numel: int, dtype: torch.dtype) -> Tensor:
        """A 1-D tensor of its memory, contents undefined."""

    def evict(self, tensor: Tensor) -> None:
        """Lets go of main memory that `tensor` does not need until its next use."""


class DevicePlacement:
    """The memory of the model's device.

    Args:
        device: where the model lives.
    """

    name = "device"
    scarce = False

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def empty(self, numel: int, dtype: torch.dtype) -> Tensor:
        """A tensor on the device."""
        return torch.empty(numel, dtype=dtype, device=self._device)

    def evict(self, tensor: Tensor) -> None:
        """Nothing: a shard has no other place."""


class HostPlacement:
    """Host memory, pinned where the model is on CUDA so that copies run beside compute.

    Args:
        pinned: whether to pin.
    """

    name = "host"
    scarce = False

    def __init__(self, pinned: bool) -> None:
        self._pinned = pinned

    def empty(self, numel: int, dtype: torch.dtype) -> Tensor:
        """A tensor in host memory."""
        return torch.empty(numel, dtype=dtype, device="cpu", pin_memory=self._pinned)

    def evict(self, tensor: Tensor) -> None:
        """Nothing: host memory is where it lives."""


class DiskPlacement:
    """Memory-mapped files, for states that exceed main memory (ZeRO-Infinity, Rajbhandari et al., SC 2021).

    A file has no name once it is open, so nothing is left behind however the process ends.

    Args:
        directory: where the files go; on a real disk, since a RAM disk would save nothing.

    Raises:
        ValueError: the directory does not exist, or nothing can be written there.
    """

    name = "disk"
    scarce = True

    def __init__(self, directory: str) -> None:
        self._directory = directory
        self._maps: dict[int, mmap.mmap] = {}
        if not os.path.isdir(directory):
            raise ValueError(
                f"Offload.directory is not a directory: {directory!r}. Make it first, on a disk with room."
            )
        try:
            tempfile.TemporaryFile(dir=directory).close()
        except OSError as error:
            raise ValueError(f"Offload.directory cannot be written to: {directory!r} ({error}).") from error

    def empty(self, numel: int, dtype: torch.dtype) -> Tensor:
        """A tensor in a file of its own.

        Raises:
            RuntimeError: the disk has no room for it.
        """
        nbytes = max(numel * dtype.itemsize, 1)
        with tempfile.TemporaryFile(dir=self._directory, prefix="zero-") as file:
            try:
                # Written pages of a sparse file on a full disk would kill the process; this fails here, with a reason.
                os.posix_fallocate(file.fileno(), 0, nbytes)
            except OSError as error:
                free = os.statvfs(self._directory)
                raise RuntimeError(
                    f"no room for {nbytes:,} bytes in Offload.directory {self._directory!r} "
                    f"({free.f_bavail * free.f_frsize:,} free): {error}. Free some, or name another directory."
                ) from error
            memory = mmap.mmap(file.fileno(), nbytes)
        tensor = torch.frombuffer(memory, dtype=dtype, count=numel)
        self._maps[tensor.untyped_storage().data_ptr()] = memory
        return tensor

    def evict(self, tensor: Tensor) -> None:
        """Drops the file's pages from this process; the system writes them out when it needs their memory."""
        memory = self._maps.get(tensor.untyped_storage().data_ptr())
        if memory is not None and hasattr(memory, "madvise"):
            memory.madvise(mmap.MADV_DONTNEED)


class CopyStream:
    """Copies between device and host beside compute: a stream of its own on CUDA, plain copies elsewhere.

    Args:
        device: where the model lives.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def copying(self) -> AbstractContextManager[object]:
        """A context whose copies (and collectives) wait for what was enqueued before, and hold up nothing after."""
        if self._stream is None:
            return nullcontext()
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        return torch.cuda.stream(self._stream)

    def to_host(self, source: Tensor, target: Tensor) -> None:
        """Starts copying device memory to the host; `synchronize` before the target is read."""
        with self.copying():
            target.copy_(source, non_blocking=True)
            if self._stream is not None:
                source.record_stream(self._stream)

    def join(self) -> None:
        """Makes what is enqueued from now on wait for the copies."""
        if self._stream is not None:
            torch.cuda.current_stream(self._stream.device).wait_stream(self._stream)

    def synchronize(self) -> None:
        """Waits, on the host, for the copies."""
        if self._stream is not None:
            self._stream.synchronize()


@dataclass(frozen=True)
class ShardMemory:
    """Where shards live under a policy.

    Attributes:
        masters: memory of masters, and of optimizer state where that is on disk.
        keeps_shards: whether stage 3 keeps the weights' shards on the device beside masters elsewhere.
        copies: how memory gets there and back.
    """

    masters: Placement
    keeps_shards: bool
    copies: CopyStream

    @classmethod
    def of(cls, policy: Offload, device: torch.device) -> ShardMemory:
        """The memory that a policy means.

        Raises:
            ValueError: the policy's directory is missing or cannot be written to.
        """
        placements: dict[str, Callable[[], Placement]] = {
            "device": lambda: DevicePlacement(device),
            "cpu": lambda: HostPlacement(pinned=device.type == "cuda"),
            "disk": lambda: DiskPlacement(str(policy.directory)),
        }
        keeps_shards = policy.optimizer != "device" and policy.params == "device"
        return cls(placements[policy.optimizer](), keeps_shards, CopyStream(device))
