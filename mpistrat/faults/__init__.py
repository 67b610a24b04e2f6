"""Fault injection: a rank is late, lost or wrong at a named collective."""
