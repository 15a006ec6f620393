"""The shared scheduler on a real vLLM engine."""
