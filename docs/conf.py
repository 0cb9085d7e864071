"""Sphinx: pages in Markdown, the reference from docstrings. Warnings are errors in `make docs`."""

from __future__ import annotations

import re
from types import GenericAlias
from typing import Any

from docutils import nodes
from latex2mathml.converter import convert

import stiefel_opt

project = "stiefel_opt"
release = stiefel_opt.__version__
extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
]
html_math_renderer = "mathml"  # below: the pages need neither a script nor a network
html_static_path = ["_static"]
html_css_files = ["style.css"]
html_theme = "furo"
html_title = "stiefel_opt"
html_show_copyright = False
html_show_sphinx = False

myst_enable_extensions = ["amsmath", "attrs_block", "dollarmath"]
myst_heading_anchors = 3

autodoc_member_order = "bysource"
autodoc_typehints = "none"
autodoc_inherit_docstrings = False
napoleon_numpy_docstring = False
napoleon_use_param = False  # keeps arguments that share a description together
napoleon_custom_sections = ["Reference"]

SECTION = re.compile(r"^(Returns|Raises|Note|Reference): *(\S.*)?$")
MARKUP = re.compile(r"[|*]|(?<=\w)_(?=\W|$)|(?<=: \w)\.")  # "n: L. Default" is no list of letters
LITERAL = re.compile(r"(:\w+:`[^`]*`|``[^`]*``)")


def unfold(lines: list[str]) -> list[str]:
    """Put ``Returns: text`` on two lines, and names of arguments on one, as napoleon wants it."""
    found: list[str] = []
    inside = False
    for line in re.sub(r"^( {4}[\w, ]+,)\n {8}", r"\1 ", "\n".join(lines), flags=re.M).split("\n"):
        section = SECTION.match(line)
        if section:
            if found and found[-1].strip():
                found.append("")
            found.append(section.group(1) + ":")
            inside = section.group(2) is not None
            if inside:
                found.append("    " + section.group(2))
        elif inside and line.strip():
            found.append("    " + line.strip())
        else:
            inside = False
            found.append(line)
    return found


def escape(lines: list[str]) -> list[str]:
    """Keep |X'X - I|, sgd_ and A* from being read as markup; indented formulas are literal."""
    found: list[str] = []
    state = "text"  # or "math": below a directive, or "formula": indented below a line of text
    for line in lines:
        indented = line.startswith("    ")
        if state != "text" and line.strip() and not indented:
            state = "text"
        if line.startswith(".. math::"):
            state = "math"
        elif state == "text" and indented and found and not found[-1].strip():
            above = [text for text in found if text.strip()]
            if above and not above[-1].startswith(("    ", "Args", "Attributes")):
                state = "formula"
                found += ["::", ""]
        if state == "text":
            parts = LITERAL.split(line)
            for index in range(0, len(parts), 2):
                parts[index] = MARKUP.sub(r"\\\g<0>", parts[index])
            line = "".join(parts)
        found.append(line)
    return found


def rewrite_docstring(
    app: Any, what: str, name: str, owner: Any, options: Any, lines: list[str]
) -> None:
    """Turn a docstring of this package into what napoleon and docutils read."""
    if what == "data" and isinstance(owner, GenericAlias):
        lines.clear()  # of ``dict[str, Any]`` autodoc finds that of dict
    lines[:] = escape(unfold(lines))


def unescape_attributes(
    app: Any, what: str, name: str, owner: Any, options: Any, lines: list[str]
) -> None:
    """Names of attributes are read as they are; scikit-learn's end with an underscore."""
    lines[:] = [
        line.replace(r"\_", "_") if line.startswith(".. attribute:: ") else line for line in lines
    ]


def write_inline(self: Any, node: nodes.math) -> None:
    """A formula within a line, as MathML."""
    self.body.append(convert(node.astext()))
    raise nodes.SkipNode


def write_display(self: Any, node: nodes.math_block) -> None:
    """A formula on lines of its own, as MathML; what a page cannot hold scrolls."""
    formula = node.astext().strip().replace("{aligned}", "{align*}")
    if r"\\" in formula and "{align*}" not in formula:
        formula = r"\begin{align*}" + formula + r"\end{align*}"
    self.body.append('<div class="formula">' + convert(formula, display="block") + "</div>")
    raise nodes.SkipNode


def setup(app: Any) -> None:
    """Formulas as MathML; rewrite docstrings before napoleon does, and after it."""
    app.add_html_math_renderer("mathml", (write_inline, None), (write_display, None))
    app.connect("autodoc-process-docstring", rewrite_docstring, priority=400)
    app.connect("autodoc-process-docstring", unescape_attributes, priority=600)
