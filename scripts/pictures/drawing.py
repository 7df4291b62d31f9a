"""A sheet for SVG pictures: boxes, text, arrows and tokens in colours that are legible in light and dark."""

from collections.abc import Sequence
from html import escape

COLOURS = {
    "card": ("#ffffff", "#161b22"),
    "edge": ("#d0d7de", "#3d444d"),
    "ink": ("#24292f", "#e6edf3"),
    "quiet": ("#57606a", "#9da7b3"),
    "rollout": ("#1f7a4d", "#4fc283"),
    "rollout-fill": ("#e8f5ee", "#12291d"),
    "replay": ("#2458a6", "#79aef2"),
    "replay-fill": ("#e9f0fb", "#14243d"),
    "learner": ("#7a3ea0", "#c79be6"),
    "learner-fill": ("#f5ecfa", "#2a1a36"),
    "bus": ("#b4520a", "#f0a35e"),
    "bus-fill": ("#fdf1e6", "#36220f"),
    "plain": ("#8c959f", "#6e7681"),
    "plain-fill": ("#f6f8fa", "#21262d"),
    "v0": ("#c8e6c9", "#2f7d55"),
    "v1": ("#a5c8f2", "#3a6db5"),
    "v2": ("#f6cf9e", "#a8691f"),
    "v3": ("#dcc1ec", "#8452a8"),
    "v4": ("#f4c2c7", "#a8434f"),
    "v5": ("#f0e3a0", "#857320"),
    "good": ("#1a7f37", "#3fb950"),
    "bad": ("#b42318", "#ff7b72"),
}
"""Of each name, the colour on a light and on a dark card."""
VERSIONS = ("v0", "v1", "v2", "v3", "v4", "v5")
ROLES = ("rollout", "replay", "learner", "bus", "plain")


def style() -> str:
    """The sheet's CSS: colours by name, and the reader's wish for a dark page."""
    light, dark = (";".join(f"--{name}:{pair[which]}" for name, pair in COLOURS.items()) for which in (0, 1))
    rules = [
        f":root{{{light}}}",
        f"@media (prefers-color-scheme:dark){{:root{{{dark}}}}}",
        "text{font:14px 'DejaVu Sans',Helvetica,Arial,sans-serif;fill:var(--ink)}",
        ".small{font-size:12px}.bold{font-weight:bold}.quiet{fill:var(--quiet)}",
        ".mono{font-family:'DejaVu Sans Mono',monospace}",
        ".card{fill:var(--card);stroke:var(--edge)}",
        ".line{fill:none;stroke-width:2}.thick{stroke-width:6}.dashed{stroke-dasharray:5 4}",
    ]
    for role in ROLES:
        rules.append(f".{role}{{fill:var(--{role}-fill);stroke:var(--{role})}}")
        rules.append(
            f".line.{role}{{fill:none}}.head.{role}{{fill:var(--{role});stroke:none}}text.{role}{{fill:var(--{role});stroke:none}}"
        )
    rules += [f".{name}{{fill:var(--{name});stroke:var(--card)}}" for name in VERSIONS]
    rules += [f"text.{name}{{fill:var(--{name})}}" for name in ("good", "bad")]
    return "".join(rules)


class Drawing:
    """One picture on a card of its own, so that it is legible on a page of any colour."""

    def __init__(self, title: str, description: str, width: int, height: int) -> None:
        self.head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" role="img" '
            f'aria-labelledby="title desc">\n<title id="title">{escape(title)}</title>\n'
            f'<desc id="desc">{escape(description)}</desc>\n<style>{style()}</style>'
        )
        self.parts = [f'<rect class="card" x="1" y="1" width="{width - 2}" height="{height - 2}" rx="14"/>']

    def text(self, x: float, y: float, text: str, kind: str = "", anchor: str = "start") -> None:
        """A line of text, whose base line is at y."""
        place = "" if anchor == "start" else f' text-anchor="{anchor}"'
        named = f' class="{kind}"' if kind else ""
        self.parts.append(f'<text x="{x:g}" y="{y:g}"{place}{named}>{escape(text)}</text>')

    def lines(self, x: float, y: float, lines: Sequence[str], kind: str = "small", anchor: str = "middle") -> None:
        """Lines of text below each other."""
        for number, line in enumerate(lines):
            self.text(x, y + 17 * number, line, kind, anchor)

    def box(self, x: float, y: float, width: float, height: float, kind: str, title: str = "", *lines: str) -> None:
        """A rounded box with a title and lines below it, centred."""
        self.parts.append(f'<rect class="{kind}" x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="8"/>')
        if title:
            role = kind.split()[0]
            self.text(x + width / 2, y + 22, title, f"bold {role}" if role in ROLES else "bold", "middle")
        self.lines(x + width / 2, y + 42, lines)

    def tokens(self, x: float, y: float, versions: str, size: float = 12) -> None:
        """A row of tokens, each in the colour of the policy version that sampled it."""
        for number, version in enumerate(versions):
            self.parts.append(
                f'<rect class="v{version}" x="{x + number * (size + 1):g}" y="{y:g}" width="{size:g}" '
                f'height="{size:g}" rx="2"/>'
            )

    def bar(self, x: float, y: float, width: float, height: float, kind: str, label: str = "") -> None:
        """A bar of a timeline with its label inside."""
        self.parts.append(f'<rect class="{kind}" x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="3"/>')
        if label:
            self.text(x + width / 2, y + height / 2 + 4.5, label, "small", "middle")

    def arrow(self, kind: str, *points: tuple[float, float], both: bool = False) -> None:
        """A line through the points, with a head at the last one or at both; `thick` and `dashed` may be in kind."""
        if both:
            middle = ((points[0][0] + points[-1][0]) / 2, (points[0][1] + points[-1][1]) / 2)
            inner = points[1:-1] or (middle,)
            self.arrow(kind, inner[0], points[0])
            points = (inner[0], *points[1:])
        (x0, y0), (x1, y1) = points[-2:]
        length = ((x1 - x0) ** 2 + (y1 - y0) ** 2) ** 0.5
        ahead, side = ((x1 - x0) / length, (y1 - y0) / length), (-(y1 - y0) / length, (x1 - x0) / length)
        size = 15 if "thick" in kind else 9
        back = (x1 - size * ahead[0], y1 - size * ahead[1])
        corners = [
            (x1, y1),
            *((back[0] + way * side[0] * size * 0.55, back[1] + way * side[1] * size * 0.55) for way in (1, -1)),
        ]
        path = " L".join(f"{x:g} {y:g}" for x, y in (*points[:-1], back))
        self.parts.append(f'<path class="line {kind}" stroke-linejoin="round" d="M{path}"/>')
        role = kind.split()[0]
        self.parts.append(f'<path class="head {role}" d="M{" L".join(f"{x:.4g} {y:.4g}" for x, y in corners)}Z"/>')

    def rule(self, x0: float, y0: float, x1: float, y1: float, kind: str = "plain dashed") -> None:
        """A straight line without a head."""
        self.parts.append(f'<path class="line {kind}" style="stroke-width:1" d="M{x0:g} {y0:g} L{x1:g} {y1:g}"/>')

    def svg(self) -> str:
        """The picture as a file's text."""
        return "\n".join([self.head, *self.parts, "</svg>", ""])
