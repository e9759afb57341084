"""This node's own row: numbered, signed and issued only when it says something new.

The shell publishes what it knows as often as it likes. A row is issued when the publication differs in more than ages and
noise, when a link changed materially, when this node was declared dead, and every ``row_refresh`` in any case (more
rarely in meshes over 64 nodes, so that refreshing costs each node the same). Rows for links are spaced, so that many links
settling one after the other make few rows.
"""

from protocol.codec import encode_row
from protocol.ids import NodeId
from protocol.membership.signing import Sign, refutation_bytes
from protocol.rows import Coordinate, DeviceFact, LinkFact, NodeRow, Refutation, SignedRow, StageFact

DECODE_BAND = 10
"""Decode timings count as changed when they move by more than a tenth of what was issued."""
DECODE_SAMPLES = 8
REFUTE_SPACING_US = 1_000_000
"""A burst of accusations raises the incarnation once."""


class OwnRow:
    """The latest issued row and what the shell wants it to say."""

    def __init__(self, node_id: NodeId, public_key: bytes, sign: Sign, boot_counter: int, instance: str) -> None:
        self._node_id = node_id
        self._public_key = public_key
        self._sign = sign
        self._boot_counter = boot_counter
        self._instance = instance
        self._wish: NodeRow | None = None
        self._wished_us = 0
        self._seq = 0
        self._raised_us = -REFUTE_SPACING_US
        self.incarnation = 0
        self.refutation: Refutation | None = None
        self.row: NodeRow | None = None
        self.signed: SignedRow | None = None
        self.issued_us = 0
        self.started_us = 0

    @property
    def version(self) -> tuple[int, int]:
        """Of the latest issued row; ``seq`` 0 before the first."""
        return (self._boot_counter, self._seq)

    @property
    def boot_counter(self) -> int:
        """Of this process."""
        return self._boot_counter

    @property
    def instance(self) -> str:
        """Of this process."""
        return self._instance

    def wish(self, row: NodeRow, now_us: int) -> bool:
        """Remember what to say; ``True`` if that is news."""
        assert row.node_id == self._node_id, row.node_id
        news = self._wish is None or not same_news(self._wish, row)
        if news or self._wish is None:
            self._wish = row
        else:
            # Keep the figures that were compared against, or small steps would add up unseen.
            self._wish = row.model_copy(update={"stages": _anchored(self._wish.stages, row.stages)})
        self._wished_us = now_us
        return news

    def issue(
        self,
        links: tuple[LinkFact, ...],
        coordinate: Coordinate | None,
        labels: tuple[str, ...],
        now_us: int,
        *,
        status: str | None = None,
    ) -> SignedRow | None:
        """The next row, signed; ``None`` before the first ``wish``."""
        wish = self._wish
        if wish is None:
            return None
        self._seq += 1
        elapsed_us = now_us - self._wished_us
        self.row = wish.model_copy(
            update={
                "public_key": self._public_key,
                "boot_counter": self._boot_counter,
                "seq": self._seq,
                "instance": self._instance,
                "incarnation": self.incarnation,
                "links": links,
                "coordinate": coordinate,
                "degraded": tuple(dict.fromkeys((*wish.degraded, *labels)))[:16],
                "devices": tuple(_older_device(device, elapsed_us) for device in wish.devices),
                "stages": tuple(_older_stage(stage, elapsed_us) for stage in wish.stages),
                "orders": tuple(
                    order.model_copy(update={"age_us": order.age_us + elapsed_us}) for order in wish.orders
                ),
                "status": status or wish.status,
            }
        )
        payload = encode_row(self.row)
        self.signed = SignedRow(payload=payload, signature=self._sign(payload))
        self.issued_us = now_us
        return self.signed

    def outrank(self, boot_counter: int) -> None:
        """Rows are numbered by this boot counter from now on; a lower one changes nothing."""
        self._boot_counter = max(self._boot_counter, boot_counter)
        self.refutation = None

    def raise_incarnation(self, now_us: int) -> Refutation | None:
        """Answer an accusation of the present incarnation; ``None`` if it was raised a moment ago."""
        if now_us - self._raised_us < REFUTE_SPACING_US:
            return None
        self._raised_us = now_us
        self.incarnation += 1
        return self.sign_refutation()

    def sign_refutation(self) -> Refutation:
        """Alive in the present incarnation."""
        payload = refutation_bytes(self._node_id, self._boot_counter, self.incarnation, self._seq)
        self.refutation = Refutation(
            node_id=self._node_id,
            boot_counter=self._boot_counter,
            incarnation=self.incarnation,
            seq=self._seq,
            signature=self._sign(payload),
        )
        return self.refutation


def same_news(issued: NodeRow, present: NodeRow) -> bool:
    """Equal but for numbering, links, ages and noise."""
    if not all(_same_timing(a, b) for a, b in zip(issued.stages, present.stages, strict=False)):
        return False
    return _bare(issued) == _bare(present)


def _bare(row: NodeRow) -> NodeRow:
    return row.model_copy(
        update={
            "boot_counter": 0,
            "seq": 0,
            "incarnation": 0,
            "links": (),
            "coordinate": None,
            "orders": tuple(order.model_copy(update={"age_us": 0}) for order in row.orders),
            "devices": tuple(device.model_copy(update={"measured_age_us": None}) for device in row.devices),
            "stages": tuple(
                stage.model_copy(
                    update={
                        "decode_us_per_layer": None,
                        "decode_age_us": None,
                        "decode_samples": min(stage.decode_samples, DECODE_SAMPLES),
                    }
                )
                for stage in row.stages
            ),
        }
    )


def _same_timing(issued: StageFact, present: StageFact) -> bool:
    a, b = issued.decode_us_per_layer, present.decode_us_per_layer
    if a is None or b is None:
        return a is b
    return abs(a - b) * DECODE_BAND <= a


def _anchored(issued: tuple[StageFact, ...], present: tuple[StageFact, ...]) -> tuple[StageFact, ...]:
    return tuple(
        new.model_copy(update={"decode_us_per_layer": old.decode_us_per_layer})
        for old, new in zip(issued, present, strict=True)
    )


def _older_device(device: DeviceFact, elapsed_us: int) -> DeviceFact:
    if device.measured_age_us is None or elapsed_us == 0:
        return device
    return device.model_copy(update={"measured_age_us": device.measured_age_us + elapsed_us})


def _older_stage(stage: StageFact, elapsed_us: int) -> StageFact:
    if stage.decode_age_us is None or elapsed_us == 0:
        return stage
    return stage.model_copy(update={"decode_age_us": stage.decode_age_us + elapsed_us})
