"""One rank of the communicator's tests: `hccl_worker.py RANK RANKS FOLDER CASE`."""

from __future__ import annotations

import os
import sys

from ascend_sim import plugin  # noqa: F401 - starts the simulated device, so it comes first

# isort: split

import torch
import torch.distributed as dist
import torch_npu

from deepinfer.api.errors import CapabilityError
from deepinfer_ascend.communicator import GROUP_BACKEND, HcclCommunicator


def collectives(comm: HcclCommunicator) -> dict[str, torch.Tensor | str]:
    rank, size = comm.rank, comm.size
    out: dict[str, torch.Tensor | str] = {}
    wide = torch.zeros(3, 4, device="npu")
    total = wide[:, ::2]  # a view with strides
    total.copy_(torch.tensor([[rank + 1.0, 10.0 * (rank + 1)]]).expand(3, 2))
    comm.all_reduce(total)
    out["sum"] = total.cpu()
    gathered = torch.empty(size, 4, device="npu", dtype=torch.bfloat16)
    comm.all_gather(gathered, torch.full((4,), rank + 0.5, device="npu", dtype=torch.bfloat16))
    out["gather"] = gathered.cpu()
    sends = [(rank + peer) % 3 for peer in range(size)]
    rows = torch.tensor([10 * rank + peer for peer in range(size) for _ in range(sends[peer])], dtype=torch.int64)
    received = torch.full((sum(sends), 2), -1, dtype=torch.int64, device="npu")  # the table is symmetric
    comm.all_to_all_v(received, rows[:, None].expand(-1, 2).to("npu"), sends, sends)
    out["exchange"] = received.cpu()
    column = torch.full((5,), float(rank), device="npu")
    comm.broadcast(column, size - 1)
    out["broadcast"] = column.cpu()
    ring = torch.empty(3, device="npu")
    comm.send_recv(torch.full((3,), float(rank), device="npu"), (rank + 1) % size, ring, (rank - 1) % size)
    out["ring"] = ring.cpu()
    comm.barrier()
    torch_npu.npu.synchronize()
    try:
        with torch_npu.npu.graph(torch_npu.npu.NPUGraph()):
            comm.all_reduce(column)
    except CapabilityError as error:
        out["capture"] = str(error)
    return out


def main(rank: int, ranks: int, folder: str, case: str) -> None:
    torch_npu.npu.set_device(rank)
    dist.init_process_group(GROUP_BACKEND, init_method=f"file://{folder}/rendezvous", rank=rank, world_size=ranks)
    comm = HcclCommunicator(dist.group.WORLD)
    if case == "collectives":
        torch.save(collectives(comm), f"{folder}/{rank}.pt")
        comm.barrier()
        dist.destroy_process_group()
        return
    x = torch.ones(4, device="npu")
    comm.all_reduce(x)
    torch_npu.npu.synchronize()
    if rank == 0:
        comm.all_reduce(x)  # the other rank has left
        torch_npu.npu.synchronize()


if __name__ == "__main__":
    try:
        main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4])
        status = 0
    except RuntimeError as error:
        print(error, file=sys.stderr)
        status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    # The watchdog of a failed group would abort the process on its way out.
    os._exit(status)
