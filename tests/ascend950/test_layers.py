"""Release numerics layer by layer: each starts from the state of the CPU backend, so that errors do not pile up."""

from __future__ import annotations

from typing import Any

import torch
from support.driver import Driver
from torch import Tensor

from deepinfer.conformance.trees import map_leaves
from deepinfer.engine.loader import load_model
from deepinfer.models.deepseek_v41.graph import Graph
from deepinfer.settings import load_settings

LEAST_COSINE = 0.999
PROMPT, DECODED = list(range(3, 60)), 3


def copied(value: Any, device: str) -> Any:
    return map_leaves(lambda _, leaf: leaf.to(device, copy=True) if isinstance(leaf, Tensor) else leaf, value)


class Observed(Graph):
    """Keeps what the sub-layers give."""

    def __init__(self, accelerator: str) -> None:
        model = load_model("tiny", load_settings(accelerator=accelerator, page_size=16)).model
        super().__init__(model.config, model.weights, model.table)
        self.model = model
        self.outputs: list[Tensor] = []
        self._attention_output, self._moe = self._kept(self._attention_output), self._kept(self._moe)

    def _kept(self, function: Any) -> Any:
        def call(*args: Any) -> Tensor:
            self.outputs.append(function(*args))
            return self.outputs[-1]

        return call


class Teacher(Observed):
    """Keeps the step and the state before each layer."""

    def forward(self, step: Any, storage: Any) -> Any:
        self.steps, self.states = [step], []
        return super().forward(step, storage)

    def _layer(self, layer: Any, rows: Any, storage: Any, stack: Any, features: Any) -> Any:
        fields = {name: getattr(stack, name) for name in stack.__slots__}
        self.states.append(copied((fields, storage.pages, storage.slots), "cpu"))
        return super()._layer(layer, rows, storage, stack, features)


class Pupil(Observed):
    """Takes the teacher's state before each layer."""

    states: list[Any]

    def _layer(self, layer: Any, rows: Any, storage: Any, stack: Any, features: Any) -> Any:
        fields, pages, slots = copied(self.states.pop(0), "npu")
        for name, value in fields.items():
            setattr(stack, name, value)
        storage.pages.copy_(pages)
        storage.slots.copy_(slots)
        return super()._layer(layer, rows, storage, stack, features)


def cosines(actual: Tensor, expected: Tensor) -> Tensor:
    return torch.nn.functional.cosine_similarity(actual.cpu().double(), expected.double(), dim=-1)


@torch.inference_mode()
def test_every_sub_layer_is_that_of_the_cpu(record_property: Any) -> None:
    teacher, pupil = Teacher("cpu"), Pupil("ascend")
    driver = Driver(teacher.model, slots=1, pages=8, graph=teacher)
    driver.admit(1)
    storage = pupil.model.allocate_caches(9, 2)
    worst = 1.0
    for step in range(1 + DECODED):
        teacher.outputs, pupil.outputs = [], []
        driver.decode(1) if step else driver.prefill(1, PROMPT)
        pupil.states = teacher.states
        pupil.forward(copied(teacher.steps[0], "npu"), storage)
        assert len(teacher.outputs) == len(pupil.outputs) == 2 * teacher.config.num_hidden_layers
        for place, (ours, theirs) in enumerate(zip(pupil.outputs, teacher.outputs, strict=True)):
            found = cosines(ours, theirs)
            worst = min(worst, float(found.min()))
            what = f"step {step}, layer {place // 2}, {('attention', 'experts')[place % 2]}"
            assert bool((found >= LEAST_COSINE).all()), f"{what}: {found.tolist()}"
    record_property("smallest cosine", worst)
