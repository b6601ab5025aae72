r"""Answers as people and datasets write them, tidied of the words around them and of LaTeX's spacing."""

from __future__ import annotations

import re

_SPANS = re.compile(r"\$\$(.+?)\$\$|\$(.+?)(?<!\\)\$|\\\((.+?)\\\)|\\\[(.+?)\\\]", re.DOTALL)
_BOX = re.compile(r"\\(?:boxed|fbox|framebox)(?![a-zA-Z])\s*")
_BARE = re.compile(r"-?\d+(?:\.\d+)?|[a-zA-Z](?![a-zA-Z])")
_ANCHOR = re.compile(r"(?:final\s+)?answer(?:\s+is)?\s*:?\s*\**\s*", re.IGNORECASE)
_PLAIN = re.compile(r"[^\W\d_]{2,}")
_TEXT = re.compile(
    r"\\(?:text|mathrm|mathbf|textbf|textit|mathit|mathsf|mbox|operatorname|textrm|bf|rm)\s*\{([^{}]*)\}"
)
_MARKED = re.compile(r"\\words\{([^{}]*)\}")
_SPACING = re.compile(
    r"(?<!\\)\\[,;:! ]|\\(?:left|right|displaystyle|limits|[bB]igg?[lr]?)(?![a-zA-Z])|~|\\q?quad(?![a-zA-Z])"
)
_THOUSANDS = re.compile(r"(?<![\d.])\d{1,3}(?:,\d{3})+(?!\d)(?!,\d)")
_WIDE = re.compile(r"(?<![\d.])\d{1,3}(?: \d{3})+(?![\d])")
_REPLACED = {
    "−": "-", "–": "-", "½": "\\frac{1}{2}", "¼": "\\frac{1}{4}", "¾": "\\frac{3}{4}", "°": "^\\circ", "≤": "\\le ",
    "≥": "\\ge ", "\\leqslant": "\\le", "\\geqslant": "\\ge", "\\leq": "\\le", "\\geq": "\\ge", "\\dfrac": "\\frac",
    "\\tfrac": "\\frac", "\\cfrac": "\\frac", "\\%": "%", "\\lbrace": "\\{", "\\rbrace": "\\}", "\\lbrack": "[",
    "\\rbrack": "]", "\\varnothing": "\\emptyset", "∅": "\\emptyset", "{,}": "\\thousands", "∞": "\\infty ",
    "\\$": "\\currency ", "€": "\\currency ", "£": "\\currency ", "\u00a0": " ", "\u202f": " ", "√": "\\sqrt",
}  # fmt: skip


def extract_boxed(text: str) -> str | None:
    r"""Return what stands in the last ``\boxed{...}``, braces balanced; ``None`` if there is none, or it is not closed.

    ``\boxed {5}``, ``\boxed 5`` and ``\fbox{5}`` are boxes too, and of a box in a box the inner one counts.
    """
    begun = None
    for match in _BOX.finditer(text):
        begun = match.end()
    return None if begun is None else _argument(text, begun)


def _argument(text: str, at: int) -> str | None:
    """Return a group in braces, without them; where there are none, the number, command or letter that stands there."""
    if text.startswith("{", at):
        end = _closing(text, at)
        return None if end < 0 else text[at + 1 : end].strip()
    match = _BARE.match(text, at)
    return match[0] if match else None


def _closing(text: str, at: int) -> int:
    depth = 0
    for i in range(at, len(text)):
        depth += (text[i] == "{") - (text[i] == "}")
        if depth == 0:
            return i
    return -1


def find_stated_answer(text: str) -> str | None:
    r"""Return the answer that a text names: its last box, or mathematics after its last "the answer is".

    Without a box a number in plain words is none: ``The answer is $12$`` is, ``The answer is 12`` is not.
    """
    if _BOX.search(text):
        return extract_boxed(text)
    for anchor in reversed(list(_ANCHOR.finditer(text))):
        if match := _SPANS.match(text, anchor.end()):
            return _inside(match)
    return None


def find_gold_answer(text: str) -> tuple[str, bool]:
    r"""Return the answer in a solution as GSM8K (``#### 42``), MATH (``\boxed{}``), DeepMath (``$42$``) write it.

    The second value is True where the solution marks it as one, so that words may be an answer.
    """
    if _BOX.search(text):
        return (extract_boxed(text) or "", True)
    if "####" in text:
        return text.rpartition("####")[2].strip(), True
    return _unwrapped(text.strip())


def _unwrapped(text: str) -> tuple[str, bool]:
    spans = list(_SPANS.finditer(text))
    if not spans:
        anchored = [m.end() for m in _ANCHOR.finditer(text)]
        return (text[anchored[-1] :].strip(), False) if anchored else (text, False)
    around = _SPANS.sub("\0", text)
    if re.fullmatch(r"[\s.,;\0]*(?:(?:and|or)?[\s.,;\0]*)*", around):  # nothing but mathematics
        return _SPANS.sub(lambda m: _inside(m), text).strip(), True
    for anchor in reversed(list(_ANCHOR.finditer(text))):
        if match := _SPANS.match(text, anchor.end()):
            return _inside(match), True
    before, _, after = around.partition("\0")
    if len(spans) > 1 or len(_PLAIN.findall(around)) > 3:
        return text, False  # a sentence
    unit = "" if _PLAIN.search(before) else after
    return f"{_inside(spans[0])} {unit}".strip(), True


def _inside(match: re.Match[str]) -> str:
    return next(group for group in match.groups() if group is not None).strip()


def tidy_answer(text: str) -> str:
    r"""Return an answer without what only the eye needs: spacing, ``\left``, ``\text``, a full stop, dollar signs."""
    text, _ = _unwrapped(text.strip())
    for old, new in _REPLACED.items():
        text = text.replace(old, new)
    text = _SPACING.sub(_space, text)
    text = _TEXT.sub(lambda m: f" \\words{{{m[1].strip()}}} ", text)
    text = re.sub(r"(?<=\d)\\thousands(?=\d{3}(?!\d))", "", text).replace("\\thousands", ",")
    if not re.search(r"[()\[\]{}]", _MARKED.sub("", text)):
        text = _THOUSANDS.sub(lambda m: m[0].replace(",", ""), text)
    text = _WIDE.sub(lambda m: m[0].replace(" ", ""), text)
    text = re.sub(r"\^\s*\{?\s*\\circ\s*\}?", "", text)
    text = re.sub(r"\s+", " ", text).strip().rstrip(".,;").strip()
    whole = _MARKED.fullmatch(text)
    return whole[1] if whole and whole[1][:1].isdigit() else text


def _space(match: re.Match[str]) -> str:
    return "" if match[0] in ("\\!",) or match[0].startswith(("\\left", "\\right", "\\b", "\\B", "\\d", "\\l")) else " "


def strip_text_marks(text: str) -> str:
    r"""Return a tidy answer's text alone, without the marks of ``\text``."""
    return re.sub(r"\s+", " ", _MARKED.sub(r"\1", text)).strip()
