"""Failures: who notices one, how it is reported, and how a job ends."""
