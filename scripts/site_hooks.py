"""A hook of mkdocs: pages are written for a forge's Markdown, which differs from the site's in two points."""

import re
from typing import Any

NUMBERED = re.compile(r"\d+\. ")


def on_page_markdown(markdown: str, **_: Any) -> str:
    """What belongs to an item of a numbered list is indented by four, and code in a table needs no escape."""
    lines, in_list, in_fence = [], False, False
    for line in markdown.split("\n"):
        if line.startswith("```"):
            in_fence = not in_fence
        if not in_fence:
            if line and not line.startswith(" "):
                in_list = NUMBERED.match(line) is not None
            elif in_list and line:
                line = f" {line}"
            if line.startswith("|"):
                line = re.sub(r"`[^`]*`", lambda code: code[0].replace("\\|", "|"), line)
        lines.append(line)
    return "\n".join(lines)
