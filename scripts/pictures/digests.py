"""How an engine's weights are found equal to the learner's."""

from scripts.pictures.drawing import Drawing

SHARDS = (0x5E1C, 0x8A07)
SLICES = (0x31B0, 0xB673)
"""Digests of parts; both pairs have the same sum, as shards and slices of one tensor have."""


def shown(value: int) -> str:
    return f"{value % 0x10000:04x}…"


def parts(drawing: Drawing, x: float, y: float, names: tuple[str, str], values: tuple[int, int], kind: str) -> None:
    """Two parts of a tensor with their digests, and the sum below them."""
    for number, (name, value) in enumerate(zip(names, values, strict=True)):
        drawing.bar(x + number * 100, y, 92, 34, kind, name)
        drawing.text(x + number * 100 + 46, y + 54, shown(value), "small mono", "middle")
    drawing.text(x + 96, y + 54, "+", "small", "middle")
    drawing.text(x + 96, y + 76, f"= {shown(sum(values))}", "small bold mono", "middle")


def digests() -> Drawing:
    """Digest, manifest, buckets, first comparison, load, second comparison."""
    drawing = Drawing(
        "How a weight update is proven",
        "Learner ranks digest their shards, and the parts add up to the digest of each tensor in the manifest. A "
        "rollout server compares the bytes that it received, then loads them, and compares the tensors that the "
        "engine decodes with. Only then is the version live.",
        960,
        462,
    )
    drawing.box(24, 52, 232, 190, "learner", "learner ranks", "one tensor, as it is sharded")
    parts(drawing, 44, 118, ("rank 0", "rank 1"), SHARDS, "card")
    drawing.text(140, 226, "before anything is gathered", "small quiet", "middle")
    drawing.box(314, 52, 226, 84, "bus", "manifest", "name, type, shape,", f"digest {shown(sum(SHARDS))}")
    drawing.box(314, 158, 226, 84, "bus", "buckets", "gathered, packed, broadcast", "over NCCL, gloo or UCC")
    drawing.box(598, 52, 338, 190, "rollout", "rollout server: staging", "the engine goes on decoding")
    drawing.bar(650, 118, 234, 34, "card", "the received bytes")
    drawing.text(767, 176, f"{shown(sum(SHARDS))} = {shown(sum(SHARDS))}", "mono bold", "middle")
    drawing.text(767, 203, "equal: ready to be committed", "small good", "middle")
    drawing.text(767, 224, "not equal: that server is sent the version again", "small bad", "middle")
    drawing.arrow("learner", (256, 94), (312, 94))
    drawing.arrow("learner", (256, 200), (312, 200))
    drawing.arrow("bus", (540, 94), (596, 94))
    drawing.arrow("bus thick", (540, 200), (598, 200))

    drawing.box(598, 290, 338, 148, "rollout", "engine: pause and load")
    drawing.lines(767, 332, ("between two forwards",))
    parts(drawing, 671, 342, ("rank 0", "rank 1"), SLICES, "card")
    drawing.arrow("rollout", (767, 242), (767, 288))
    drawing.text(779, 270, "commit", "small quiet")
    drawing.box(314, 290, 226, 148, "rollout", "proof", "digests of the tensors that", "the engine decodes with")
    drawing.text(427, 381, f"{shown(sum(SLICES))} = {shown(sum(SHARDS))} ?", "mono bold", "middle")
    drawing.lines(427, 405, ("fused rows, slices: the sums agree",), "small quiet")
    drawing.arrow("rollout", (598, 356), (542, 356))
    drawing.box(24, 290, 232, 58, "rollout", "equal: live")
    drawing.lines(140, 334, ("decodes and asks for leases",))
    drawing.box(24, 380, 232, 58, "plain", "")
    drawing.text(140, 402, "not equal: quarantined", "bold bad", "middle")
    drawing.lines(140, 424, ("no leases; sent the whole version",))
    drawing.arrow("rollout", (314, 320), (258, 320))
    drawing.arrow("plain", (314, 409), (258, 409))
    drawing.text(24, 32, "Two comparisons of one update", "bold")
    drawing.text(
        290, 32, "digest: sum over the elements of mix(bits, index), so parts add up wherever they lie", "small quiet"
    )
    return drawing
