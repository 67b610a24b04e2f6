"""Diagnosis of an installation and a launch, before a job fails.

Every check is a function of facts, which the ranks gather first. So all ranks come to the same
findings, and a check can be tested without the machine that it is about.
"""

from mpistrat.doctor.facts import Level
from mpistrat.doctor.report import examine

__all__ = ["Level", "examine"]
