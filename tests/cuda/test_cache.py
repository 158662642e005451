"""Cache kernels with arguments as the engine gives them."""

from __future__ import annotations

import torch

import tests.cuda.interpreted  # noqa: F401 - skips without Triton

from deepinfer_cuda.kernels.cache import copy_blocks  # isort: skip


def test_pairs_of_a_copy_may_be_columns_of_one_tensor():
    blocks = torch.arange(6, dtype=torch.uint8)[:, None].repeat(1, 40)
    pairs = torch.tensor([[1, 4], [2, 5], [3, 0]])
    copy_blocks(blocks, pairs[:, 0], pairs[:, 1])
    assert blocks[:, 0].tolist() == [3, 1, 2, 3, 1, 2]
