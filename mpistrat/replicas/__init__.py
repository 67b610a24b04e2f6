"""Replicas of one rank: one, or several that take turns and communicate as one rank."""
