"""Every byte that an engine will take, known before any of it is allocated (design 7)."""

from __future__ import annotations

from dataclasses import dataclass

from deepinfer.errors import CapacityError

__all__ = ["MemoryPlan", "MemoryRequest"]

MIB = 1 << 20


@dataclass(frozen=True)
class MemoryRequest:
    """Sizes from which a plan is made; all in bytes unless they are counts.

    Attributes:
        weights: prepared weights on the device.
        workspaces: the largest step's temporaries.
        logits: logits and sampling temporaries of the largest step.
        drafts: logits of the drafts that a step proposes.
        records: the device records of all slots.
        tables: the sampler's tables of all slots, allocated when requests first need them.
        slot_bytes, page_bytes: one state slot, one page.
        num_slots: slots, slot 0 included.
        min_pages: pages of one longest request; fewer cannot serve anything.
        full_pages: pages with which all sequences can have their longest length; more is never useful.
    """

    weights: int
    workspaces: int
    logits: int
    records: int
    slot_bytes: int
    page_bytes: int
    num_slots: int
    min_pages: int
    full_pages: int
    tables: int = 0
    drafts: int = 0

    @property
    def fixed(self) -> int:
        """Bytes of everything but the pages, page 0 included."""
        return (
            self.weights
            + self.workspaces
            + self.logits
            + self.drafts
            + self.records
            + self.tables
            + self.num_slots * self.slot_bytes
            + self.page_bytes
        )


@dataclass(frozen=True)
class MemoryPlan:
    """A request for memory and the number of pages that it leads to.

    Attributes:
        request: the sizes.
        num_pages: pages of the pool, page 0 included.
        budget: bytes that may be used; None if the number of pages was given.
    """

    request: MemoryRequest
    num_pages: int
    budget: int | None = None

    @classmethod
    def build(
        cls,
        request: MemoryRequest,
        *,
        budget: int | None = None,
        cache_bytes: int | None = None,
        num_pages: int | None = None,
    ) -> MemoryPlan:
        """Choose the number of pages.

        Args:
            request: the sizes.
            budget: bytes of device memory that the engine may take in all; None: not limited.
            cache_bytes: bytes of pages and state slots together; None: what the budget leaves.
            num_pages: pages to hand out (page 0 comes on top); overrides `cache_bytes`, not the budget.

        Raises:
            CapacityError: the budget does not hold even the asked (or one request's) pages; prints the plan.
        """
        usable = request.full_pages if num_pages is None else num_pages
        if num_pages is None and cache_bytes is not None:
            slots = request.num_slots * request.slot_bytes
            usable = min(usable, (cache_bytes - slots) // request.page_bytes - 1)
        if budget is not None:
            room = (budget - request.fixed) // request.page_bytes
            if num_pages is not None and room < num_pages:
                raise cls(request, num_pages + 1, budget).error(f"{num_pages} pages were asked for, {max(room, 0)} fit")
            usable = min(usable, room)
        if num_pages is None and usable < request.min_pages:
            raise cls(request, max(usable, 0) + 1, budget).error(
                f"one request of the longest length needs {request.min_pages} pages, {max(usable, 0)} fit; lower "
                "max_model_len or max_num_seqs, or allow more memory"
            )
        if usable < 1:
            raise cls(request, 1, budget).error("no page is left to hand out")
        return cls(request, usable + 1, budget)

    def error(self, message: str) -> CapacityError:
        """A CapacityError with the plan under the message."""
        return CapacityError(f"{message}\n{self.describe()}")

    @property
    def rows(self) -> list[tuple[str, int]]:
        """(what, bytes) in the order of allocation."""
        request = self.request
        return [
            ("weights", request.weights),
            ("workspaces", request.workspaces),
            ("logits and sampling", request.logits),
            ("draft logits", request.drafts),
            ("slot records", request.records),
            ("sampling tables (on first use)", request.tables),
            (f"state slots: {request.num_slots} x {request.slot_bytes:,} B", request.num_slots * request.slot_bytes),
            (f"pages: {self.num_pages:,} x {request.page_bytes:,} B", self.num_pages * request.page_bytes),
        ]

    @property
    def total(self) -> int:
        """Bytes in all."""
        return sum(size for _, size in self.rows)

    def describe(self) -> str:
        """The plan as a small table."""
        lines = [f"  {name:<44}{size / MIB:>12,.1f} MiB" for name, size in self.rows]
        lines.append(f"  {'total':<44}{self.total / MIB:>12,.1f} MiB")
        if self.budget is not None:
            lines.append(f"  {'allowed':<44}{self.budget / MIB:>12,.1f} MiB")
        return "\n".join(lines)
