"""What the engine must know of a model, free of any one family's names."""

from __future__ import annotations

from dataclasses import dataclass

from deepinfer.errors import ConfigError

__all__ = ["ModelTraits", "number_of_drafts"]


def number_of_drafts(asked: int | None, most: int) -> int:
    """Drafts per sequence and step.

    Args:
        asked: `use_nextn_decode`; None: as many as the model was trained to propose.
        most: that number; 0 for a model without draft stages.

    Raises:
        ConfigError: more were asked for; acceptance would fall without a word.
    """
    if asked is None or asked <= most:
        return most if asked is None else asked
    knows = f"drafts blocks of {most}; use a value from 0 to {most}" if most else "has no draft stages; use 0"
    raise ConfigError(
        f"{asked} drafts per step were asked for, the checkpoint {knows}",
        field="use_nextn_decode",
    )


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
        resume_slack: rows that may have been written past a place of the text into a slot from which it is resumed
            there.
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
    resume_slack: int = 0
