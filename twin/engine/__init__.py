"""One vLLM replica in virtual time."""
