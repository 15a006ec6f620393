"""Every form in which a result is shown."""
