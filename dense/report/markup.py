"""Elements of HTML and SVG whose text is always escaped."""

from __future__ import annotations

import html
import json
from collections.abc import Iterable
from typing import Any

VOID = {'br', 'hr', 'img', 'link', 'meta'}


class Markup(str):
    """Text that is markup already. Any other string becomes text when it is put into an element."""


def element(tag: str, *children: Any, **attributes: Any) -> Markup:
    """``<tag attributes>children</tag>``.

    Children are markup, text (escaped), iterables of them, or None (left out). An attribute named ``class_``
    is ``class``, ``stroke_width`` is ``stroke-width``; True stands alone, None and False leave it out.
    """
    head = ''.join(_attribute(key, value) for key, value in attributes.items())
    if tag in VOID:
        return Markup(f'<{tag}{head}>')
    return Markup(f'<{tag}{head}>{join(children)}</{tag}>')


def join(children: Any) -> Markup:
    """Children as in :func:`element`, without an element around them."""
    if children is None:
        return Markup('')
    if isinstance(children, Markup):
        return children
    if isinstance(children, Iterable) and not isinstance(children, str):
        return Markup(''.join(join(child) for child in children))
    return Markup(html.escape(str(children), quote=False))


def data(content: Any) -> Markup:
    """A script element that holds JSON for the page's script."""
    # '<' is the only character that could end the element early.
    text = json.dumps(content, ensure_ascii=False, separators=(',', ':')).replace('<', '\\u003c')
    return Markup(f'<script type="application/json">{text}</script>')


def _attribute(key: str, value: Any) -> str:
    if value is None or value is False:
        return ''
    name = key.rstrip('_').replace('_', '-')
    return f' {name}' if value is True else f' {name}="{html.escape(str(value))}"'
