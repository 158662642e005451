"""Heavy half of the plugin: imported only when the backend was chosen."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.nn.functional import rms_norm as torch_rms_norm

from acme_deepinfer import weights
from acme_deepinfer.runtime import AcmeRuntime
from deepinfer.api.backend import (
    Backend,
    Capabilities,
    Communicator,
    DeviceRuntime,
    Handle,
    Kernel,
    Numerics,
    Placement,
    Shard,
    WeightGroup,
)
from deepinfer.api.errors import CapabilityError
from deepinfer.api.ops import Determinism, accumulate_dtype


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See the contract `rms_norm`: the same parameters, statistics in float32, one rounding at the end."""
    wide = accumulate_dtype(x.dtype)
    return torch_rms_norm(x.to(wide), (x.shape[-1],), weight.to(wide), eps).to(x.dtype)


class AcmeBackend(Backend):
    """A board whose memory happens to be the host's."""

    name = "acme"
    version = "0.1.0"

    def capabilities(self, device: int = 0) -> Capabilities:
        """Only what is true; every field that is left out takes the careful answer."""
        return Capabilities(device_type="cpu", device_name="Acme One", compute_dtypes=("bfloat16", "float32"))

    def runtime(self, device: int = 0) -> DeviceRuntime:
        """Memory, streams and events of a board."""
        return AcmeRuntime()

    def communicator(self, group: Any = None) -> Communicator:
        """Refuse: boards cannot talk to each other."""
        raise CapabilityError("Acme boards have no collectives; use one device")

    def kernels(self, numerics: Numerics) -> Mapping[str, Kernel]:
        """Kernels by op name; DeepInfer runs the plain-PyTorch reference of every other op."""
        return {"rms_norm": Kernel(rms_norm, Determinism.RUN_TO_RUN, note="torch's fused norm")}

    def plan_weights(self, groups: Sequence[WeightGroup], shard: Shard, numerics: Numerics) -> list[Placement]:
        """Say where every group goes before anything is read."""
        return [weights.plan(group, numerics) for group in groups]

    def load(self, placement: Placement, raw: Mapping[str, Tensor]) -> Handle:
        """Bring the checkpoint's tensors into the planned form."""
        return weights.load(placement, raw)

    def unpack(self, placement: Placement, handle: Handle) -> dict[str, Tensor]:
        """Give the checkpoint's bytes back."""
        return weights.unpack(placement, handle)


def create_backend() -> AcmeBackend:
    """Factory that the descriptor names."""
    return AcmeBackend()
