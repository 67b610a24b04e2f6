"""Scaling benchmark: messages of all-reductions, counted, and a cost model of many nodes."""
