"""Failures: who notices, who is told, and how a job ends."""
