"""From a prompt to the weights and back: the way of one group."""

from scripts.pictures.drawing import Drawing

ANSWERS = (("0000000111", "1.0"), ("00000", "0.0"), ("00000001", "1.0"), ("000000011111", "0.0"))
"""Tokens by the version that sampled them, and the reward of each answer."""


def group(drawing: Drawing, x: float, y: float, size: float, rewards: bool) -> None:
    """The answers of a prompt, below each other."""
    for row, (versions, reward) in enumerate(ANSWERS):
        drawing.tokens(x, y + row * (size + 6), versions, size)
        if rewards:
            drawing.text(x + 12 * (size + 1) + 8, y + row * (size + 6) + size - 1, reward, "small mono")


def sampling(drawing: Drawing) -> None:
    """The upper row: what replay and a rollout server do."""
    drawing.box(24, 52, 150, 150, "replay", "1 prompt", "a row of the data,", "leased with a seed", "and a deadline")
    drawing.bar(52, 144, 94, 34, "card", "")
    drawing.text(99, 166, "3,8?", "mono", "middle")
    drawing.box(226, 52, 220, 150, "rollout", "2 trajectories")
    group(drawing, 258, 84, 12, rewards=False)
    drawing.lines(336, 173, ("ids, logprob and policy", "version of every token"))
    drawing.box(498, 52, 150, 150, "rollout", "3 rewards")
    for row, (_, reward) in enumerate(ANSWERS):
        drawing.text(573, 95 + row * 18, reward, "mono", "middle")
    drawing.lines(573, 173, ("in processes that", "may be killed"))
    drawing.box(700, 52, 236, 150, "replay", "4 group")
    group(drawing, 724, 84, 12, rewards=True)
    drawing.lines(818, 173, ("whole in the journal,", "then acknowledged"))


def training(drawing: Drawing) -> None:
    """The lower row, from right to left: batch, update, broadcast."""
    drawing.box(700, 290, 236, 150, "replay", "5 batch")
    for column in range(2):
        for line in range(2):
            left, top = 726 + column * 98, 318 + line * 38
            drawing.bar(left, top, 86, 34, "card")
            drawing.tokens(left + 6, top + 6, ("0000111", "001", "00011", "1111111")[2 * line + column], 9)
            drawing.tokens(left + 6, top + 18, ("000", "00001", "111", "0011")[2 * line + column], 9)
    drawing.lines(818, 411, ("the oldest groups_per_step", "groups, not the quickest"))
    drawing.box(404, 290, 244, 150, "learner", "6 update")
    drawing.lines(526, 334, ("advantages within each group", "ratio π / μ of every token", "loss, backward, AdamW"))
    drawing.tokens(468, 384, "1", 22)
    drawing.arrow("learner", (498, 395), (548, 395))
    drawing.tokens(556, 384, "2", 22)
    drawing.lines(526, 427, ("version 1 → version 2",))
    drawing.box(24, 290, 328, 150, "bus", "7 broadcast")
    drawing.lines(188, 334, ("digests of the learner's shards, buckets,", "digests of what each engine holds"))
    for number in range(3):
        drawing.bar(60 + number * 90, 380, 76, 28, "rollout", f"engine {number}")
    drawing.lines(188, 427, ("only an engine with equal digests serves version 2",))


def path() -> Drawing:
    """Prompt, trajectories, rewards, group, batch, update, broadcast."""
    drawing = Drawing(
        "From a prompt to an update and back",
        "Replay leases a prompt. A rollout server samples a group of answers and scores them. Replay journals the "
        "group, acknowledges it, and forms a batch of the oldest groups. The learner makes one update of it. The "
        "weight bus sends the new version to the engines.",
        960,
        476,
    )
    sampling(drawing)
    training(drawing)
    drawing.arrow("replay", (174, 127), (224, 127))
    drawing.arrow("rollout", (446, 127), (496, 127))
    drawing.arrow("rollout", (648, 127), (698, 127))
    drawing.arrow("replay", (818, 202), (818, 288))
    drawing.arrow("learner", (700, 365), (650, 365))
    drawing.arrow("bus thick", (404, 365), (354, 365))
    drawing.arrow("bus thick", (336, 290), (336, 206))
    for x, y, label in ((199, 118, "lease"), (673, 118, "group"), (676, 356, "take")):
        drawing.text(x, y, label, "small quiet", "middle")
    drawing.text(806, 250, "when every group of the step is there", "small quiet", "end")
    drawing.text(322, 250, "engines go on decoding", "small quiet", "end")
    drawing.text(24, 32, "One group", "bold")
    drawing.text(112, 32, "colour of a token: the version that sampled it", "small quiet")
    for number, x in ((0, 420), (1, 492), (2, 564)):
        drawing.tokens(x, 22, str(number), 12)
        drawing.text(x + 18, 32, f"v{number}", "small quiet")
    return drawing
