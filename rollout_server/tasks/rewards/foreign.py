r"""Rewards of other frameworks by their own rules; `slipstream translate` names them, as `reward.function` may.

| `rollout_server.tasks.rewards.foreign:` | the rule of                                                           |
|-----------------------------------------|-----------------------------------------------------------------------|
| `verl`                                  | verl's `default_compute_score`, by the `data_source` of each row      |
| `slime_deepscaler`, `slime_math`, `slime_dapo` | slime's `--rm-type`; `rm_type` in a row's `metadata` counts more |
| `areal_gsm8k`                           | AReaL's `gsm8k_reward_fn`                                             |

Read at verl b178a3cd (2026-01-29), slime 624b824a (2026-08-21) and AReaL v1.0.4 (2026-05-21). Answers are compared as
text, or by sympy and math-verify (extra `math`) in a process that is killed after a while and then scores 0.
"""

import functools
import re
from collections.abc import Callable, Mapping
from itertools import accumulate
from typing import Any

from rollout_server.tasks.rewards import Sample
from rollout_server.tasks.rewards.built_in.mathematics import SAME, judged_apart, library

Scores = float | dict[str, float]
TAIL = 300
"""Last characters of an answer that verl's rules look at."""
SECONDS = 5.0
"""For a comparison by sympy or math-verify."""
MATH = {"lighteval/MATH", "DigitalLearningGmbH/MATH-lighteval", "HuggingFaceH4/MATH-500"}
DAPO = {"math_dapo", "math", "math_dapo_reasoning"}


def verl(data_source: str, solution_str: str, ground_truth: Any, extra_info: Any = None) -> Scores:
    """GSM8K: the number after the last `#### `; MATH: the last box; DAPO and AIME: the line `Answer:`, as 1 or -1.

    Raises NotImplementedError: a data source without a rule here.
    """
    if data_source == "openai/gsm8k":
        found = re.findall(r"#### (-?[0-9.,]+)", solution_str[-TAIL:])
        return float(bool(found) and found[-1].replace(",", "") == str(ground_truth))
    if data_source in MATH:
        blank = solution_str.rpartition("\\boxed ")
        answer = blank[2].partition("$")[0] if blank[1] else _boxed(solution_str)
        return float(answer is not None and _is_same_in_math(answer, str(ground_truth)))
    if data_source in DAPO or data_source.startswith("aime"):
        return _of_dapo(solution_str, _minerva(str(ground_truth)))
    raise NotImplementedError(
        f"verl has its rule for data_source {data_source!r} not here: rows as verl prepares them name theirs in the"
        f" column `data_source` (openai/gsm8k, {', '.join(sorted(MATH | DAPO))}, aime...); for others write"
        " compute_score(data_source, solution_str, ground_truth) to a file and set reward.function=FILE:compute_score"
    )


def slime_deepscaler(sample: Sample) -> Scores:
    """1 for the last box after `</think>` or `###Response` that equals the label."""
    return _of_slime(sample, "deepscaler")


def slime_math(sample: Sample) -> Scores:
    """1 for the last box that equals the label."""
    return _of_slime(sample, "math")


def slime_dapo(sample: Sample) -> Scores:
    """1 for the line `Answer:` with the whole number of the label, else -1."""
    return _of_slime(sample, "dapo")


def areal_gsm8k(sample: Sample) -> float:
    """1 where math-verify finds the same in the answer and the ground truth, boxed or not.

    Raises RewardError: math-verify is not installed.
    """
    parse, verify, targets = _math_verify()
    answer, truth = sample["completion"], str(sample["ground_truth"])

    def is_equal() -> bool:
        parsed = [parse(text, targets, parsing_timeout=None) for text in (truth, answer)]
        return all(parsed) and bool(verify(*parsed, float_rounding=6, timeout_seconds=None))

    return float(judged_apart(is_equal, SECONDS) == SAME)


# ---- DAPO --------------------------------------------------------------------------------------------------

SHORTER = (
    *(("an ", ""), ("a ", ""), (".$", "$"), ("\\$", ""), ("\\ ", ""), (" ", ""), ("mbox", "text")),
    *((",\\text{and}", ","), ("\\text{and}", ","), ("\\text{m}", "\\text{}")),
)
DROPPED = (
    *("square", "ways", "integers", "dollars", "mph", "inches", "hours", "km", "units", "\\ldots", "sue", "points"),
    *("feet", "minutes", "digits", "cents", "degrees", "cm", "gm", "pounds", "meters", "meals", "edges", "students"),
    *("childrentickets", "multiples", "\\text{s}", "\\text{.}", "\\text{\ns}", "\\text{}^2", "\\text{}^3"),
    *("\\text{\n}", "\\text{}", "\\mathrm{th}", "^\\circ", "^{\\circ}", "\\;", ",\\!", "{,}", '"', "\\dots"),
    *("<|im_end|>", "<|endoftext|>"),
)
REWRITTEN = (
    *((r"(.*?)(\$)(.*?)(\$)(.*)", r"$\3$"), (r"(\\text\{)(.*?)(\})", r"\2"), (r"(\\textbf\{)(.*?)(\})", r"\2")),
    *((r"(\\overline\{)(.*?)(\})", r"\2"), (r"(\\boxed\{)(.*)(\})", r"\2")),
    *((r"(frac)([^{])(.)", r"frac{\2}{\3}"), (r"(sqrt)([^{])", r"sqrt{\2}")),
)


def _of_dapo(answer: str, wanted: str) -> dict[str, float]:
    found = re.findall(r"(?i)Answer\s*:\s*([^\n]+)", answer[-TAIL:])
    is_right = _minerva(found[-1] if found else "[INVALID]") == wanted
    return {"score": 1.0 if is_right else -1.0, "acc": float(is_right)}


def _minerva(text: str) -> str:
    """A final answer without units, articles and signs of LaTeX."""
    text = text.rpartition("=")[2]
    for old, new in SHORTER:
        text = text.replace(old, new)
    for word in DROPPED:
        text = text.replace(word, "")
    for pattern, new in REWRITTEN:
        text = re.sub(pattern, new, text)
    text = text.replace("$", "")
    return (text.replace(",", "") if text.replace(",", "").isdigit() else text).strip()


# ---- MATH --------------------------------------------------------------------------------------------------

BARE = (
    *(("\n", ""), ("\\!", ""), ("\\\\", "\\"), ("tfrac", "frac"), ("dfrac", "frac"), ("\\left", ""), ("\\right", "")),
    *(("^{\\circ}", ""), ("^\\circ", ""), ("\\$", "")),
)


def _boxed(text: str) -> str | None:
    r"""What the last `\boxed{}` holds; None: there is none, or it stays open."""
    at = text.rfind("\\boxed")
    rest = text[at + len("\\boxed") :] if at >= 0 else ""
    depths = accumulate((sign == "{") - (sign == "}") for sign in rest)
    end = next((position for position, depth in enumerate(depths) if depth == 0), 0) if rest[:1] == "{" else 0
    return rest[1:end] if end else None


def _is_same_in_math(answer: str, truth: str) -> bool:
    try:
        return _bare(answer) == _bare(truth)
    except (ValueError, IndexError):
        return answer == truth


def _bare(text: str) -> str:
    """LaTeX without spacing, units and signs. Raises ValueError or IndexError: it cannot be read so."""
    for old, new in BARE:
        text = text.replace(old, new)
    if "\\text{ " in text:  # a unit
        text, _ = text.split("\\text{ ")
    text = text.replace("\\%", "").replace(" .", " 0.").replace("{.", "{0.")
    text = f"0{text}" if text.startswith(".") else text
    name, sign, value = text.partition("=")
    text = value if sign and "=" not in value and len(name) <= 2 else text
    head, *roots = text.split("\\sqrt")
    text = head + "".join(f"\\sqrt{root}" if root[0] == "{" else f"\\sqrt{{{root[0]}}}{root[1:]}" for root in roots)
    head, *parts = text.replace(" ", "").split("\\frac")
    is_whole = all(part[0] == "{" or len(part) > 1 for part in parts)
    text = head + "".join("\\frac" + (_two(part) if is_whole else part) for part in parts)
    if text == "0.5":
        return "\\frac{1}{2}"
    division = re.fullmatch(r"(-?[0-9]+)/(-?[0-9]+)", text)
    is_plain = division is not None and text == f"{int(division[1])}/{int(division[2])}"
    return f"\\frac{{{division[1]}}}{{{division[2]}}}" if division is not None and is_plain else text


def _two(part: str) -> str:
    """`12` after a fraction is `{1}{2}`."""
    if part[0] == "{":
        return part
    return f"{{{part[0]}}}{part[1:]}" if part[1] == "{" else f"{{{part[0]}}}{{{part[1]}}}{part[2:]}"


# ---- slime -------------------------------------------------------------------------------------------------

UNITS = (
    *("degree", "cm", "centimeter", "meter", "mile", "second", "minute", "hour", "day", "week", "month", "year"),
    *("foot", "feet", "inch", "yard"),
)
SIGNS = {"√": "sqrt", "π": "pi", "∞": "inf", "∪": "U", "·": "*", "×": "*"}
MACROS = {"sqrt": "sqrt()", "frac": "/", "pi": "pi", "infty": "inf", "cup": "U", "cdot": "*", "times": "*"}
TUPLE = "()[]"
READABLE = re.compile(r"[0-9a-z+\-*/^(). ]*")
"""What sympy is given: nothing that Python would call or look up."""
TOO_MUCH = re.compile(r"\^[{(]|\^[0-9]+\^|\^[0-9][0-9]|\*\*|(?:\^.*){4}")


def _of_slime(sample: Sample, kind: str) -> Scores:
    answer, label = sample["completion"], sample["ground_truth"]
    extra = sample["extra_info"] if isinstance(sample["extra_info"], Mapping) else {}
    kind = str(extra.get("rm_type") or kind).strip()
    if kind.startswith("boxed_"):
        kind, answer = kind.removeprefix("boxed_"), _boxed(answer) or ""
    if kind == "dapo":
        return _of_dapo(answer, str(int(float(_minerva(str(label))))))
    if kind == "deepscaler":
        answer = answer.rpartition("</think>")[2] if "</think>" in answer else "".join(answer.split("###Response")[1:2])
    elif kind != "math":
        raise NotImplementedError(
            f"slime's rm_type {kind!r} is not here; write it to a file: reward.function=FILE:NAME"
        )
    found, truth = _boxed(answer), str(label)
    wanted = _boxed(truth) if "\\boxed" in truth else truth
    if found is None or not wanted:
        return 0.0
    return float(_mathd(found) == _mathd(wanted) or _is_same_to_sympy(found, wanted))


def _mathd(text: str) -> str:
    text = text.strip()
    found = re.search(r"^\\text\{(.+?)\}$", text)
    text = found[1].strip() if found else text
    try:
        return _bare(text)
    except (ValueError, IndexError):
        return text


def _is_same_to_sympy(answer: str, truth: str) -> bool:
    given, wanted = _spelled(answer), _spelled(truth)
    if given == wanted or not given:
        return given == wanted
    ours, theirs = _elements(wanted), _elements(given)
    is_tuple = len(ours) > 1
    if len(ours) != len(theirs) or (is_tuple and (wanted[0], wanted[-1]) != (given[0], given[-1])):
        return False
    return all(_is_same_element(*pair) for pair in zip(ours, theirs, strict=True))


def _is_same_element(wanted: str, given: str) -> bool:
    """Fractions and whole numbers have to be the same text; all else may be simplified to the same."""
    if all(re.search(r"^-?[0-9]+.?/0*[1-9][0-9]*.?$", text) for text in (wanted, given)):
        return wanted == given
    if _is_whole(wanted) != _is_whole(given):
        return False
    difference = f"({wanted})-({given})"
    letters = {sign for sign in difference.replace("sqrt", "").replace("frac", "") if sign.isalpha()}
    if len(letters) > 2 or TOO_MUCH.search(difference) or not READABLE.fullmatch(difference):
        return False
    simplified = _sympy()
    return judged_apart(lambda: simplified(difference.replace("^", "**")) == 0, SECONDS) == SAME


def _spelled(text: str) -> str:
    """An answer as sympy's text, without units, blanks and braces."""
    found = re.search(r"^\\text\{(.+?)\}$", text)
    text = found[1] if found else text
    for old, new in (("\\%", "%"), ("\\$", "$"), ("$", ""), ("%", ""), (" or ", " , "), (" and ", " , ")):
        text = text.replace(old, new)
    for word, power in (("million", 6), ("billion", 9), ("trillion", 12)):
        text = text.replace(word, f"*10^{power}")
    for unit in UNITS:
        text = re.sub(rf"{unit}(es)?(s)? *(\^[0-9]+)?", "", text)
    text = re.sub(r"\^ *\\circ", "", text)
    text = text[1:-1] if text[:1] == "{" and text[-1:] == "}" else text
    text = re.sub(r",\\! *", "", text)
    number = _number(text)
    text = str(round(number)) if number is not None and abs(number - round(number)) <= 1e-7 else text
    text = re.sub("- *", "-", _without_latex(text) if "\\" in text else text)
    text = re.sub("([0-9]) +([0-9])", r"\1+\2", text)  # 7 3/4
    text = text.replace(" ", "").replace("{", "").replace("}", "").lower()
    return str(int(float(text.replace(",", "")))) if _is_whole(text) else text


def _without_latex(text: str) -> str:
    """Fractions, roots and signs in plain text; a macro that means nothing here is left out."""
    text = re.sub(r"\\[td]frac", r"\\frac", text)
    text = re.sub(r"\\(frac|sqrt)\s*(?=[^\s{\[\\])(.)", r"\\\1{\2}", text)
    text = re.sub(r"(\\frac\{[^{}]*\})\s*([^\s{\\])", r"\1{\2}", text)
    for _ in range(8):  # from within
        text = re.sub(r"\\frac\s*\{([^{}]*)\}\s*\{([^{}]*)\}", r" \1/\2", text)
        text = re.sub(r"\\sqrt\s*(?:\[[^\]]*\])?\{([^{}]*)\}", r"sqrt(\1)", text)
    for sign, plain in SIGNS.items():
        text = text.replace(sign, plain)
    text = re.sub(r"\\([A-Za-z]+) *", lambda found: MACROS.get(found[1], ""), text)
    return re.sub(r"\\([^A-Za-z])", r"\1", text).strip()


def _elements(text: str) -> list[str]:
    """Of a tuple or an interval; of anything else itself."""
    text = _without_thousands(text)
    is_tuple = len(text) > 2 and text[0] in TUPLE and text[-1] in TUPLE and not set(text[1:-1]) & set(TUPLE)
    return [one.strip() for one in text[1:-1].split(",")] if is_tuple else [text] if text else []


def _is_whole(text: str) -> bool:
    number = _number(_without_thousands(text))
    return number is not None and abs(number - round(number)) <= 1e-7


def _without_thousands(text: str) -> str:
    before = ""
    while before != text:
        before, text = text, re.sub(r"(\d)(,)(\d\d\d)($|\D)", r"\1\3\4", text)
    return text


def _number(text: str) -> float | None:
    try:
        number = float(text)
    except ValueError:
        return None
    return number if abs(number) < float("inf") else None


# ---- packages of the extra `math` --------------------------------------------------------------------------


@functools.cache
def _sympy() -> Callable[[str], Any]:
    """Text -> the simplified expression."""
    library("slime's rule")
    import sympy  # math-verify has brought it
    from sympy.parsing import sympy_parser as parser

    rules = (*parser.standard_transformations, parser.implicit_multiplication_application)
    names = {name: value for name, value in vars(sympy).items() if not name.startswith("_")}

    def simplified(text: str) -> Any:
        found = parser.parse_expr(text, local_dict={}, global_dict={"__builtins__": {}, **names}, transformations=rules)
        return sympy.simplify(found)

    simplified("(x+1)-(sqrt(2))")  # what it loads at first, no comparison has to load in its own process
    return simplified


@functools.cache
def _math_verify() -> tuple[Callable[..., Any], Callable[..., Any], tuple[Any, ...]]:
    found = library("AReaL's rule")
    targets = (found.ExprExtractionConfig(try_extract_without_anchor=True), found.LatexExtractionConfig())
    first = found.parse(r"$\frac{1}{2}$ or \boxed{3}", targets, parsing_timeout=None)  # loads what comparisons need
    found.verify(first, first, timeout_seconds=None)
    return found.parse, found.verify, targets
