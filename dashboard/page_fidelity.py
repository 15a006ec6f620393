"""*Fidelity*: how far predictions were from what was measured, where both are there."""

import streamlit as st


def page() -> None:
    """The page."""
    st.title("Fidelity")
