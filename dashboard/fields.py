"""Inputs over the values of a document. One that nobody touches leaves what is written as it is."""

import math
from collections.abc import Mapping
from typing import Any

import streamlit as st

from twin.scenario_yaml import KeyPath, plain_copy

AS_IT_IS = "as in the scenario"
USUAL = "the default"
MOST = 2**53 - 1
"""The largest whole number that a browser takes."""


class Fields:
    """The inputs of one configuration, drawn from a document; what is changed in them is changed in a copy of it."""

    def __init__(self, document: Mapping[str, Any], key: str) -> None:
        self.document: dict[str, Any] = plain_copy(document)
        self._key = key

    def name(self, *path: str | int) -> str:
        """The name of the input of a value."""
        return ".".join(map(str, (self._key, *path)))

    def at(self, *path: str | int) -> Any:
        """What is written there; None for nothing. What is in the way, where a value stands in place of a section."""
        here: Any = self.document
        for step in path:
            if isinstance(here, dict):
                here = here.get(str(step))
            elif isinstance(here, list) and isinstance(step, int):
                here = here[step] if step < len(here) else None
            else:
                return here
        return here

    def put(self, value: Any, *path: str | int) -> None:
        """Write a value, and the sections around it that are not there yet."""
        here: Any = self.document
        for step in path[:-1]:
            if isinstance(here, dict) and here.get(str(step)) is None:
                here[str(step)] = {}
            here = here[step]
        here[path[-1]] = value

    def drop(self, *path: str | int) -> None:
        """Take a value of a section away, which then has its default."""
        section = self.at(*path[:-1])
        if isinstance(section, dict):
            section.pop(str(path[-1]), None)

    def _is_open(self, *path: str | int) -> bool:
        """Whether a value can be put there: all around it are sections, or not there yet."""
        here: Any = self.document
        for step in path:
            if here is None:
                return True
            if isinstance(here, list):
                if not (isinstance(step, int) and step < len(here)):
                    return False
                here = here[step]
            elif isinstance(here, dict):
                here = here.get(str(step))
            else:
                return False
        return True

    def as_it_is(self, label: str, *path: str | int) -> None:
        """Show what no input can."""
        text = str(self.at(*path))
        st.text_input(
            label, text if len(text) <= 60 else text[:57] + "...", disabled=True,
            key=self.name("shown", *path), help="As in the scenario; change it in the YAML below.",
        )  # fmt: skip

    def number(
        self, label: str, *path: str | int, is_whole: bool = True, help_text: str = ""
    ) -> None:
        """A number. None is too large or too small to be typed: what is on the screen is what a run is asked for."""
        value = self.at(*path)
        found = self.ask_number(label, value, is_whole, path, help_text)
        if found is None and value is not None:
            self.drop(*path)
        elif found != value:
            self.put(found, *path)

    def ask_number(
        self,
        label: str,
        value: Any,
        is_whole: bool,
        path: KeyPath,
        help_text: str = "",
        empty: str = USUAL,
    ) -> Any:
        """The number that an input for `value` holds: `value` itself where it is untouched, or cannot be shown."""
        if not self._is_open(*path) or not (value is None or _is_number(value, is_whole)):
            self.as_it_is(label, *path)
            return value
        kind = int if is_whole else float
        shown = None if value is None else kind(value)
        found = st.number_input(
            label, value=shown, step=1 if is_whole else None, format=None if is_whole else "%g",
            key=self.name(*path), help=help_text or None, placeholder=empty,
        )  # fmt: skip
        return value if found == shown else found

    def choice(self, label: str, options: list[str], *path: str | int, help_text: str = "") -> None:
        """One of several names. What is none of them, or not written, is offered as it is."""
        value = self.at(*path)
        if not self._is_open(*path):
            self.as_it_is(label, *path)
            return
        offered = options if value in options else [AS_IT_IS, *options]
        place = offered.index(value) if value in options else 0
        found = st.selectbox(label, offered, place, key=self.name(*path), help=help_text or None)
        if found not in (AS_IT_IS, value):
            self.put(found, *path)

    def toggle(self, label: str, usual: bool, *path: str | int) -> None:
        """Yes or no; `usual` is what not written means."""
        value = self.at(*path)
        if not self._is_open(*path) or not (value is None or isinstance(value, bool)):
            self.as_it_is(label, *path)
            return
        shown = usual if value is None else value
        found = st.toggle(label, shown, key=self.name(*path))
        if found != shown:
            self.put(found, *path)


def _is_number(value: Any, is_whole: bool) -> bool:
    """Whether an input can show it without changing it."""
    if isinstance(value, bool) or not isinstance(value, int if is_whole else int | float):
        return False
    return abs(value) <= MOST if isinstance(value, int) else math.isfinite(value)
