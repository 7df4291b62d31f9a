"""Lag 0 and lag 1 on the same clock, and the lag of one answer's tokens."""

from scripts.pictures.drawing import Drawing

ROLLOUT, TRAIN, PUBLISH = 132, 96, 12
"""Pixels that a batch, an update and a broadcast take."""
LEFT, RIGHT = 150, 930


def synchronous(drawing: Drawing, top: float) -> None:
    """Each side waits for the other one."""
    at = LEFT
    for step in range(1, 5):
        width = min(ROLLOUT, RIGHT - at)
        drawing.bar(at, top, width, 30, f"v{step - 1}", f"batch {step}" if width == ROLLOUT else "")
        if width < ROLLOUT:
            return
        drawing.bar(at + ROLLOUT, top + 44, TRAIN, 30, "learner", f"step {step}")
        drawing.bar(at + ROLLOUT + TRAIN, top, PUBLISH, 74, "bus")
        if step < 4:
            drawing.text(at + ROLLOUT + TRAIN / 2, top + 20, "idle", "small quiet", "middle")
        drawing.text(at + ROLLOUT / 2, top + 64, "idle", "small quiet", "middle")
        at += ROLLOUT + TRAIN + PUBLISH


def one_step_off(drawing: Drawing, top: float) -> None:
    """Batch s is sampled while step s−1 is trained; its last tokens are already of that step's version."""
    live = TRAIN + PUBLISH
    for step in range(1, 7):
        at = LEFT + ROLLOUT * (step - 1)
        width = min(ROLLOUT, RIGHT - at)
        if step == 1:
            drawing.bar(at, top, width, 30, "v0", "batch 1")
        else:
            drawing.bar(at, top, width, 30, f"v{step - 1}")
            drawing.bar(at, top, min(live, width), 30, f"v{step - 2}", f"batch {step}")
        if step > 1 and at + live <= RIGHT:
            drawing.bar(at, top + 44, TRAIN, 30, "learner", f"step {step - 1}")
            drawing.bar(at + TRAIN, top, PUBLISH, 74, "bus")
            drawing.text(at + live - 2, top + 92, f"v{step - 1} live", "small quiet", "middle")
    drawing.text(LEFT + ROLLOUT / 2, top + 64, "idle", "small quiet", "middle")


def overlap() -> Drawing:
    """Two timelines, and an answer that has tokens of two versions."""
    drawing = Drawing(
        "Synchronous and one step off",
        "With lag 0 sampling and training take turns, and each side idles while the other works. With lag 1 batch s is "
        "sampled while step s minus 1 is trained, and its tokens are at most one version older than the weights that "
        "they train.",
        960,
        476,
    )
    drawing.text(24, 36, "replay.async_lag: 0", "bold")
    drawing.text(
        210,
        36,
        "sampling and training take turns; no token is older than the weights that it trains",
        "small quiet",
    )
    synchronous(drawing, 56)
    drawing.text(24, 174, "replay.async_lag: 1", "bold")
    drawing.text(
        210,
        174,
        "batch s is sampled while step s − 1 is trained; new weights arrive in the middle of answers",
        "small quiet",
    )
    one_step_off(drawing, 194)
    for top in (56, 194):
        drawing.text(24, top + 20, "rollout servers", "small")
        drawing.text(24, top + 64, "learner", "small")
    drawing.rule(24, 306, 936, 306)
    drawing.text(24, 334, "One answer of batch 3", "bold")
    drawing.text(210, 334, "step 3 trains version 2 and makes version 3", "small quiet")
    drawing.tokens(150, 352, "1" * 22 + "2" * 8, 20)
    for x0, x1, line, lag in (
        (150, 611, "sampled by v1", "lag 2 − 1 = 1"),
        (612, 779, "by v2", "lag 2 − 2 = 0"),
    ):
        drawing.rule(x0, 380, x1, 380, "plain")
        drawing.text((x0 + x1) / 2, 398, f"{line}: {lag}", "small", "middle")
    drawing.text(24, 367, "tokens", "small")
    drawing.text(24, 432, "colour: sampled by", "small quiet")
    for number in range(6):
        drawing.tokens(150 + number * 56, 421, str(number), 14)
        drawing.text(170 + number * 56, 432, f"v{number}", "small quiet")
    drawing.bar(500, 421, 14, 14, "learner")
    drawing.text(520, 432, "update", "small quiet")
    drawing.bar(590, 421, 14, 14, "bus")
    drawing.text(610, 432, "broadcast", "small quiet")
    drawing.text(
        24,
        458,
        "No token is sampled that would be more than replay.async_lag versions old when it is trained.",
        "small quiet",
    )
    return drawing
