"""Tracing: spans, the flight recorder, and timelines of jobs."""
