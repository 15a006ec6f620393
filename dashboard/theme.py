"""The colours of the report, put into the charts of a page, light or dark."""

import re
from importlib import resources
from typing import Any

import streamlit as st


@st.cache_resource
def _palettes() -> dict[str, dict[str, str]]:
    """Theme -> name of a variable -> colour, as twin/report/page.css has them."""
    css = (resources.files("twin.report") / "page.css").read_text(encoding="utf-8")
    light, dark = re.split(r"(?=:root\[data-theme=\"dark\"\])", css, maxsplit=1)
    found = {}
    for name, text in (("light", light), ("dark", dark)):
        block = text[text.index("{") + 1 : text.index("}")]
        found[name] = dict(re.findall(r"--([a-z0-9-]+): (#[0-9a-f]{6})", block))
    return found


def kind() -> str:
    """light or dark, as the reader sees the page."""
    return "dark" if st.context.theme.type == "dark" else "light"


def painted(figure: Any) -> Any:
    """A figure with colours in place of the names of variables."""
    return _paint(figure, _palettes()[kind()])


def _paint(value: Any, colors: dict[str, str]) -> Any:
    if isinstance(value, str):
        name = re.fullmatch(r"var\(--([a-z0-9-]+)\)", value)
        return colors[name[1]] if name else value
    if isinstance(value, list):
        return [_paint(item, colors) for item in value]
    if isinstance(value, dict):
        return {key: _paint(item, colors) for key, item in value.items()}
    return value


def plain(text: str) -> str:
    """Text for Streamlit's Markdown, every character standing for itself."""
    return re.sub(r"([\\`*_{}\[\]()#+!$~<>|:])", r"\\\1", text)


def sentences(text: str) -> str:
    """Faults, one a line, for Streamlit's Markdown."""
    return "\n\n".join(map(plain, text.splitlines()))


def with_unit(label: str, unit: str) -> str:
    """The heading of a column of figures; seconds and shares have their unit beside each, some names say theirs."""
    says_it = label == unit or (unit == "h" and label.endswith("hours"))
    return label if says_it or unit in ("", "s", "1") else f"{label}, {unit}"


def show(figure: Any, how_to_read: str, key: str, height: int = 300, **options: Any) -> Any:
    """A chart with its title, its units and a sentence on how to read it; what was selected in it."""
    made = painted(figure)
    layout = {
        **made["layout"],
        "height": height,
        "margin": {"l": 10, "r": 10, "t": 10, "b": 10},
        "legend": {"orientation": "h", "x": 0, "y": 1, "yanchor": "bottom"},
    }
    for axis in ("xaxis", "yaxis"):
        layout[axis] = {"automargin": True, **layout[axis]}
    st.markdown(f"**{made['title']}**")
    chosen = st.plotly_chart(
        {"data": made["data"], "layout": layout},
        key=key,
        config={"displaylogo": False, "displayModeBar": False},
        **options,
    )
    st.caption(how_to_read)
    return chosen
