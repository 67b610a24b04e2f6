"""Faults on purpose: a rank is late, lost or wrong at a collective that is named."""
