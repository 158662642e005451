"""What the engine must know of a model, free of any one family's names."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["ModelTraits"]


@dataclass(frozen=True)
class ModelTraits:
    """Sizes and ids.

    Attributes:
        vocab_size: logits per row; prompt ids must be below it.
        context: longest sequence in tokens.
        eos_token_ids: ids that end a text.
        image_token_id: id that stands for an image, which is refused in text; None: an ordinary id.
        ngram_size: longest n-gram whose ids a row needs, its own included; at least 1.
        max_drafts: drafts that the model can propose per step; 0 for none.
        page_size: tokens of one page.
        page_bytes, slot_bytes: one page, one state slot.
        ring_length: window entries of a slot.
        weight_bytes: prepared weights on the device.
        layout_id: name of the byte formats of pages and slots.
    """

    vocab_size: int
    context: int
    eos_token_ids: frozenset[int]
    image_token_id: int | None
    ngram_size: int
    max_drafts: int
    page_size: int
    page_bytes: int
    slot_bytes: int
    ring_length: int
    weight_bytes: int
    layout_id: str = ""
