"""Collectives of the CPU backend between two processes over gloo."""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from deepinfer.cpu.communicator import GlooCommunicator


def test_group_of_one():
    comm = GlooCommunicator()
    assert (comm.rank, comm.size) == (0, 1)
    x = torch.arange(6.0).reshape(3, 2)
    comm.all_reduce(x)
    comm.broadcast(x, 0)
    comm.barrier()
    gathered = torch.empty(1, 3, 2)
    comm.all_gather(gathered, x)
    assert torch.equal(gathered[0], x)
    out = torch.empty(3, 2)
    comm.all_to_all_v(out, x, [3], [3])
    assert torch.equal(out, x)


def test_uneven_counts_are_checked():
    comm = GlooCommunicator()
    try:
        comm.all_to_all_v(torch.empty(2, 1), torch.empty(3, 1), [2], [4])
    except ValueError as error:
        message = str(error)
    assert message == "input: [4] do not cut 3 rows for 1 ranks"


def two_ranks(rank: int, port_file: str, results: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{port_file}", rank=rank, world_size=2)
    comm = GlooCommunicator(dist.group.WORLD)
    out = {}
    # A sum whose bits depend on the order unless it is fixed: rank order gives (1e8 + r0) + r1 everywhere.
    x = torch.tensor([1e8, 0.1 + rank, 3.0], dtype=torch.float32)
    comm.all_reduce(x)
    out["sum"] = x
    half = torch.full((2, 3), float(rank)).to(torch.bfloat16)
    gathered = torch.empty((2, 2, 3), dtype=torch.bfloat16)
    comm.all_gather(gathered, half)
    out["gather"] = gathered
    # Rank 0 sends 1 row to itself and 3 to rank 1; rank 1 sends 0 to rank 0 and 2 to itself.
    sends = [[1, 3], [0, 2]][rank]
    receives = [[1, 0], [3, 2]][rank]
    rows = torch.arange(sum(sends) * 2, dtype=torch.int64).reshape(-1, 2) + 100 * rank
    target = torch.full((sum(receives), 2), -1, dtype=torch.int64)
    comm.all_to_all_v(target, rows, receives, sends)
    out["exchange"] = target
    wide = torch.zeros(4, 4, dtype=torch.uint8)
    column = wide[:, 1] if rank else torch.tensor([1, 2, 3, 4], dtype=torch.uint8)
    comm.broadcast(column, 0)
    out["broadcast"] = column.clone()
    received = torch.empty(3)
    comm.send_recv(torch.full((3,), float(rank)), 1 - rank, received, 1 - rank)
    out["swap"] = received.clone()
    comm.send_recv(*((torch.ones(2), 1, None, None) if rank == 0 else (None, None, received[:2], 0)))
    out["one way"] = received.clone()
    comm.barrier()
    torch.save(out, f"{results}/{rank}.pt")
    dist.destroy_process_group()


def test_two_ranks(tmp_path):
    mp.spawn(two_ranks, (str(tmp_path / "rendezvous"), str(tmp_path)), nprocs=2)
    first, second = (torch.load(tmp_path / f"{rank}.pt") for rank in range(2))
    expected = torch.tensor([1e8, 0.1, 3.0]) + torch.tensor([1e8, 1.1, 3.0])
    assert torch.equal(first["sum"], expected)
    assert torch.equal(second["sum"], expected)
    assert torch.equal(first["gather"], torch.tensor([0.0, 1.0]).to(torch.bfloat16)[:, None, None].expand(2, 2, 3))
    assert torch.equal(first["gather"], second["gather"])
    assert first["exchange"].tolist() == [[0, 1]]
    assert second["exchange"].tolist() == [[2, 3], [4, 5], [6, 7], [100, 101], [102, 103]]
    assert second["broadcast"].tolist() == [1, 2, 3, 4]
    assert first["swap"].tolist() == [1.0] * 3
    assert second["swap"].tolist() == [0.0] * 3
    assert second["one way"].tolist() == [1.0, 1.0, 0.0]
