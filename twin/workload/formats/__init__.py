"""Traces of requests in files: read and written row by row, each format a small module of its own."""
